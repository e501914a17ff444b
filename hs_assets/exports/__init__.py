"""Stored samples as the files that trainers read. What each trainer wants is said in its module, and proven with its loader.

torch_file.py   the file that torch.save writes, without torch
trainer.py      a sample as a trainer gets it, and what an export needs to know of a trainer
specforge.py    SpecForge, offline
speculators.py  speculators, and the format of its first versions
modelopt.py     NVIDIA ModelOpt, offline
trainers.py     all of them, by name
vocabulary.py   draft vocabulary: d2t, t2d
final_norm.py   the state after the final norm
folder.py       a folder of exported partitions: each whole or not there
export.py       a partition of a store → such a folder
processes.py    several partitions at once
summary.py      what lies beside the partitions

    DEST/
      hs_assets_export.json      what this is an export of, its partitions, the hash of the vocabulary mapping
      trainer_config.json        layer ids in the trainer's own numbering
      <partition>/
        …                        one file a sample, named so that the order of the names is that of the samples
        hs_assets_export.json    written last: for each file its sample id, source row and sha256
"""
