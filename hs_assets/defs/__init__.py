"""The only Dagster code: assets and what they need.

project.py     the resource that every asset takes its configuration from
partitions.py  one partition a shard of prompts
layer_set.py   what is to be extracted, recorded: asset `layer_set`
responses.py   the model's own answers to rows: asset `responses`, where it is enabled
prompts.py     rows → token ids and masks: asset `prompts`
extraction.py  one step, two assets: `raw_dumps` and `eagle3_samples`, with their checks
exports.py     files for trainers, and the draft vocabulary
checks.py      the checks of a partition
failures.py    why a run failed, in one line
retry.py       which failures are worth another try
report_metadata.py  what the UI shows of an extraction
plots.py       plots in plain text
recorded.py    what the instance knows of the samples of every partition
reextract.py   after a change of the layer set: schedule `reextract_stale`
backfills.py   room for all of a backfill
processes.py   runs whose process was killed
sensors.py     what crashes left; a page on each finished backfill
demo.py        the demo, through a real instance
"""
