"""How much smaller the states of a partition became: measured from its files."""

from __future__ import annotations

from collections.abc import Iterable

from hs_assets.errors import StoreError
from hs_assets.store.generation import open_generation
from hs_assets.store.layout import StorePaths
from hs_assets.store.manifest import Compression, StoredSample


def measure_compression(
    paths: StorePaths, fingerprint: str, partition: str, samples: Iterable[StoredSample]
) -> Compression | None:
    """Sizes of the state arrays that samples lie in, each array once; None where none of them is compressed.

    Raises:
        StoreError: a generation is gone or damaged.
    """
    raw = stored = 0
    codecs = set()
    for generation, residual_id in sorted(
        {(p.generation, i) for sample in samples for p in sample.parts for i in p.residual_ids}
    ):
        array = open_generation(paths.generation(fingerprint, partition, generation)).states[residual_id]
        raw += array.rows * array.row_bytes
        try:
            stored += sum(array.shard_path(shard).stat().st_size for shard in range(array.shards))
        except OSError as error:
            remedy = "remove its generation, then materialise the partition again"
            raise StoreError("a shard is gone", where=array.folder, got=error, remedy=remedy) from error
        codecs.add("blosc" if array.compressed else "none")
    return Compression("+".join(sorted(codecs)), raw, stored) if "blosc" in codecs and stored else None
