"""The store: bf16 hidden states in zarr v3, written once, and manifests that say which of them make a sample.

    from hs_assets.store import open_store

    store = open_store(".hs_assets/store.zarr")
    view = store.layer_set("r2-4-5-8")
    sample = view[0]                        # Eagle3Sample
    store.read(sample.sample_id, layers=[4], tokens=slice(0, 128))

    arrays.py       rows of an array, read straight into a buffer, checksums checked
    dtype.py        bfloat16 for zarr
    layout.py       where everything lies, and the version
    writer.py       a generation: arrays written aside, published at once
    generation.py   the arrays of one, and which of them were freed
    compression.py  how much smaller a partition became
    manifest.py     a view of a partition: its samples, its ledger, its lineage
    summary.py      its counts, without its samples
    masks.py        loss masks, by partition and version of the prompts
    reader.py       open_store and what it gives
    lineage.py      a record a row; those of a source row, a run or a state spec
    verify.py       the store against its own promises
    gc.py           what can go
    disposal.py     how it goes: at once for readers, and whole in the end whoever is killed
    removed.py      manifests of removed partitions, for lineage
    processes.py    workers that end with who started them

README.md beside this specifies the format.
"""

from hs_assets.store.reader import Eagle3Sample, LayerSetView, Store, open_store

__all__ = ["Eagle3Sample", "LayerSetView", "Store", "open_store"]
