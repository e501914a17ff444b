"""Random partitions in which each layer has all 65,536 bit patterns, read by this reader, by zarr and by TensorStore."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
import zarr
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hs_assets.store import open_store
from hs_assets.store.dtype import as_bits
from hs_assets.store.layout import create
from hs_assets.store.writer import ArrayShape
from hs_assets_tests.store_material import DTYPES, LAYERS, Made, bits, generation_folder, make_partition, make_samples

WIDTH = 32
ROWS = 65_536 // WIDTH
NAMES = {2: "residual_002", 4: "residual_004", 8: "final"}


@st.composite
def shapes(draw: st.DrawFn, compression: str) -> ArrayShape:
    chunk = draw(st.integers(16, 400))
    return ArrayShape(WIDTH, "BF16", chunk, chunk * draw(st.integers(1, 5)), compression)  # type: ignore[arg-type]


@st.composite
def lengths(draw: st.DrawFn) -> list[int]:
    """Of samples that have as many rows together as all patterns take; some may be empty."""
    cuts = sorted(draw(st.lists(st.integers(0, ROWS), max_size=5)))
    return np.diff([0, *cuts, ROWS]).tolist()


def all_patterns(sizes: Sequence[int], seed: int) -> tuple[Made, dict[int, np.ndarray]]:
    """Samples of these lengths, and the rows of each layer from the first to the last, uint16 [2048, 32]."""
    random, made, rows = np.random.default_rng(seed), make_samples(sizes), {}
    for i in LAYERS.residual_ids:
        rows[i] = random.permutation(65_536).astype(np.uint16).reshape(ROWS, WIDTH)
        begins = np.cumsum([0, *sizes])
        for sample_id, begin, size in zip(made.states, begins, sizes, strict=False):
            made.states[sample_id][i] = rows[i][begin : begin + size].view(DTYPES["BF16"])
    return made, rows


@pytest.mark.parametrize("compression", ["none", "blosc"])
@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(data=st.data(), sizes=lengths(), seed=st.integers(0, 2**32))
def test_every_pattern_is_read_by_all(compression: str, data: st.DataObject, sizes: list[int], seed: int) -> None:
    shape = data.draw(shapes(compression))
    made, rows = all_patterns(sizes, seed)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        paths = create(Path(folder) / "s")
        partition = make_partition(paths, sizes, shape=shape, made=made)
        for sample in open_store(paths.root).layer_set(LAYERS.id):
            assert all(np.array_equal(bits(sample.states[i]), bits(made.states[sample.sample_id][i])) for i in rows)
            assert np.array_equal(sample.input_ids, made.input_ids[sample.sample_id])
            assert np.array_equal(sample.loss_mask, made.masks[sample.sample_id])
        generation = generation_folder(paths, partition)
        for i, name in NAMES.items():
            spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{generation / name}/"}}
            assert np.array_equal(bits(np.asarray(ts.open(spec).result().read().result())), rows[i])
            assert np.array_equal(as_bits(zarr.open_array(generation / name, mode="r"))[:], rows[i])
        ids = np.concatenate(list(made.input_ids.values()))
        assert np.array_equal(zarr.open_array(generation / "input_ids", mode="r")[:], ids)
        assert np.array_equal(zarr.open_array(generation / "offsets", mode="r")[:], np.cumsum([0, *sizes]))
        masks = zarr.open_group(paths.masks(partition.manifest.partition, partition.manifest.prompts.version), mode="r")
        assert np.array_equal(np.asarray(masks["loss_mask"]), np.concatenate(list(made.masks.values())))
