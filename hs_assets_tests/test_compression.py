"""Compressed states: the same bits for every reader, as zarr itself compresses them, and a ratio that is measured."""

from __future__ import annotations

import dataclasses
import json
import subprocess

import numpy as np
import pytest
import tensorstore as ts
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec

from hs_assets.config import ConfigError, parse_settings, read_preset
from hs_assets.errors import StoreError
from hs_assets.store import open_store
from hs_assets.store.arrays import BFLOAT16
from hs_assets.store.compression import measure_compression
from hs_assets.store.dtype import as_bits
from hs_assets.store.layout import create
from hs_assets.store.manifest import read_manifest
from hs_assets.store.writer import ArrayShape, GenerationWriter
from hs_assets_tests.store_material import (
    FINGERPRINT,
    LAYERS,
    PARTITION,
    bits,
    flip_byte,
    generation_folder,
    make_partition,
)

SHAPE = ArrayShape(64, "BF16", 32, 96, "blosc")  # a shard of three chunks, which cannot be longer


def smooth_states(tokens, width=64, seed=0):
    """States whose exponents are alike, as real ones' are; they get smaller."""
    return np.random.default_rng(seed).normal(size=(tokens, width)).astype(BFLOAT16)


@pytest.fixture
def written(tmp_path):
    """A generation of 300 rows, compressed, and what it holds."""
    paths, states = create(tmp_path / "s"), {i: smooth_states(300, seed=i) for i in LAYERS.residual_ids}
    writer = GenerationWriter(paths, FINGERPRINT, PARTITION, LAYERS.residual_ids, 8, SHAPE)
    writer.append(np.arange(300, dtype=np.int32), states)
    return paths.generation(FINGERPRINT, PARTITION, writer.publish()), states


def test_zarr_and_tensorstore_read_the_same_bits(written):
    folder, states = written
    for name, i in (("residual_002", 2), ("final", 8)):
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder / name}/"}}
        assert np.array_equal(bits(np.asarray(ts.open(spec).result().read().result())), bits(states[i]))
        assert np.array_equal(as_bits(zarr.open_array(folder / name, mode="r"))[:], bits(states[i]))


def test_shards_are_those_that_zarr_writes(written, tmp_path):
    folder, states = written
    array = zarr.create_array(
        tmp_path / "zarr",
        shape=(300, 64),
        chunks=(32, 64),
        shards=(96, 64),
        dtype=np.uint16,
        compressors=[BloscCodec(typesize=2, cname="zstd", clevel=1, shuffle="shuffle", blocksize=1 << 19), Crc32cCodec()],
        fill_value=0x7FC0,
        config={"write_empty_chunks": True},
    )
    array[:] = bits(states[4])
    ours = json.loads((folder / "residual_004" / "zarr.json").read_text())
    assert ours["codecs"] == json.loads((tmp_path / "zarr" / "zarr.json").read_text())["codecs"]
    for shard in "0123":
        assert (folder / "residual_004" / "c" / shard / "0").read_bytes() == (tmp_path / "zarr/c" / shard / "0").read_bytes()


def test_what_is_read_is_what_was_written(tmp_path):
    paths = create(tmp_path / "s")
    made = make_partition(paths, [40, 7, 200, 1], shape=SHAPE, ids_by_generation=[(2, 8), (4,)])
    for sample in open_store(paths.root).layer_set(LAYERS.id):
        assert sample.input_ids.tolist() == made.input_ids[sample.sample_id].tolist()
        for i, states in sample.states.items():
            assert np.array_equal(bits(states), bits(made.states[sample.sample_id][i]))
    rows = open_store(paths.root).read(f"{PARTITION}/0002", layers=[4], tokens=slice(30, 170))[4]
    assert np.array_equal(bits(rows), bits(made.states[f"{PARTITION}/0002"][4][30:170]))


def test_damage_raises(tmp_path):
    paths = create(tmp_path / "s")
    made = make_partition(paths, [100], shape=SHAPE)
    shard = generation_folder(paths, made) / "final" / "c" / "0" / "0"
    for position in range(0, shard.stat().st_size, 97):
        flip_byte(shard, position)
        with pytest.raises(StoreError, match=f"{PARTITION}/0000, residual id 8"):
            open_store(paths.root).read(f"{PARTITION}/0000")
        flip_byte(shard, position)
    assert np.array_equal(bits(open_store(paths.root).read(f"{PARTITION}/0000")[8]), bits(made.states[f"{PARTITION}/0000"][8]))


def test_the_ratio_is_that_of_the_files(tmp_path):
    """Against du: bytes of what lies in the arrays that the samples use, and no others."""
    paths = create(tmp_path / "s")
    made = make_partition(paths, [200, 100], shape=SHAPE, ids_by_generation=[(2, 8), (4,)])
    measured = measure_compression(paths, FINGERPRINT, PARTITION, made.manifest.samples)
    folders = [generation_folder(paths, made, part=0) / "residual_002", generation_folder(paths, made, part=0) / "final"]
    folders.append(generation_folder(paths, made, part=1) / "residual_004")
    count = ["find", *folders, "-path", "*/c/*", "-type", "f", "-printf", r"%s\n"]
    sizes = subprocess.run(count, capture_output=True, text=True, check=True).stdout.split()
    assert len(sizes) == 12
    assert (measured.codec, measured.raw_bytes, measured.stored_bytes) == ("blosc", 300 * 3 * 128, sum(map(int, sizes)))
    manifest = dataclasses.replace(made.manifest, compression=measured)
    assert manifest.write(paths)
    path = paths.manifest(LAYERS.id, PARTITION)
    assert read_manifest(path) == manifest
    assert json.loads(path.read_text())["compression"]["ratio"] == round(300 * 3 * 128 / sum(map(int, sizes)), 4)
    assert not manifest.write(paths), "it is what was written already"


def test_what_is_not_compressed_has_no_ratio(tmp_path):
    paths = create(tmp_path / "s")
    made = make_partition(paths, [20])
    assert measure_compression(paths, FINGERPRINT, PARTITION, made.manifest.samples) is None
    assert "compression" not in json.loads(paths.manifest(LAYERS.id, PARTITION).read_text())


def test_states_whose_exponents_are_alike_get_smaller(written):
    folder, _ = written
    size = sum((folder / "residual_002" / "c" / shard / "0").stat().st_size for shard in "0123")
    assert size < 0.85 * 300 * 128


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [
        (ArrayShape(7168, "BF16", 128, 8192, "blosc"), 128),
        (ArrayShape(576, "BF16", 128, 8192, "blosc"), 512),
        (ArrayShape(576, "F32", 128, 8192, "blosc"), 256),
        (ArrayShape(576, "BF16", 128, 8192, "none"), 128),
        (ArrayShape(576, "BF16", 128, 384, "blosc"), 128),
        (ArrayShape(4, "BF16", 128, 1024, "blosc"), 1024),
    ],
)
def test_chunks_that_are_compressed_are_long_enough(tmp_path, shape, tokens):
    """A block of 512 KiB, as far as the shard can be cut so; on disk as zarr reads it."""
    dtype = np.dtype(np.float32) if shape.dtype == "F32" else BFLOAT16
    paths, states = create(tmp_path / "s"), np.ones((3, shape.hidden_size), dtype)
    writer = GenerationWriter(paths, FINGERPRINT, PARTITION, (8,), 8, shape)
    writer.append(np.zeros(3, np.int32), {8: states})
    array = zarr.open_array(paths.generation(FINGERPRINT, PARTITION, writer.publish()) / "final", mode="r")
    assert (array.chunks, array.shards) == ((tokens, shape.hidden_size), (shape.shard_tokens, shape.hidden_size))
    assert np.array_equal(as_bits(array)[:], bits(states) if dtype == BFLOAT16 else states)


def test_the_setting():
    text = read_preset("demo").replace("[store]\n", "")
    assert parse_settings(text, "here").store.compression == "none"
    assert parse_settings(f'{text}\n[store]\ncompression = "blosc"', "here").store.compression == "blosc"
    with pytest.raises(ConfigError, match=r"store\.compression"):
        parse_settings(f'{text}\n[store]\ncompression = "gzip"', "here")
