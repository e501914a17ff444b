"""A generation is written aside, shard by shard, and is there whole or not at all; TensorStore reads what was written."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
import zarr

from hs_assets.errors import StoreError
from hs_assets.store import open_store
from hs_assets.store.layout import create
from hs_assets.store.writer import STAGING_PREFIX, ArrayShape, GenerationWriter
from hs_assets_tests.store_material import (
    DTYPES,
    FINGERPRINT,
    PARTITION,
    SHAPE,
    bits,
    generation_folder,
    make_partition,
    make_states,
)

IDS, FINAL = (2, 4, 8), 8
NAMES = {2: "residual_002", 4: "residual_004", 8: "final"}


@pytest.fixture
def paths():
    """An empty store, in memory: a test makes some hundred small files and syncs each."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield create(Path(folder) / "store.zarr")


def new_writer(paths, shape=SHAPE, ids=IDS):
    return GenerationWriter(paths, FINGERPRINT, PARTITION, ids, FINAL, shape)


def make_sample(length, shape=SHAPE, seed=0):
    source = np.random.default_rng(seed)
    return source.integers(0, 160_000, length).astype(np.int32), {i: make_states(source, length, shape) for i in IDS}


def folders(paths):
    return sorted(path.name for path in paths.generations(FINGERPRINT, PARTITION).iterdir())


def staging_of(paths, writer):
    return paths.generations(FINGERPRINT, PARTITION) / f"{STAGING_PREFIX}{writer.name}"


def tensorstore_read(folder):
    return np.asarray(ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/"}}).result().read().result())


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("lengths", [(5,), (8,), (3, 4, 1), (7, 9), (1, 40, 2), (8, 8), (0, 3), (3, 0)], ids=str)
def test_tensorstore_reads_the_same_bits(paths, lengths, dtype):
    shape = ArrayShape(4, dtype, chunk_tokens=4, shard_tokens=8)
    writer = new_writer(paths, shape)
    samples = [make_sample(length, shape, seed) for seed, length in enumerate(lengths)]
    offsets = [writer.append(*sample) for sample in samples]
    folder = paths.generation(FINGERPRINT, PARTITION, writer.publish())
    assert offsets == [sum(lengths[:i]) for i in range(len(lengths))]
    assert tensorstore_read(folder / "offsets").tolist() == [*offsets, sum(lengths)]
    ids = tensorstore_read(folder / "input_ids")
    assert (ids.dtype, ids.tolist()) == (np.int32, np.concatenate([ids for ids, _ in samples]).tolist())
    for residual_id in IDS:
        states = tensorstore_read(folder / NAMES[residual_id])
        assert states.dtype == DTYPES[dtype]
        assert np.array_equal(bits(states), bits(np.concatenate([states[residual_id] for _, states in samples])))


def test_what_lies_on_disk(paths):
    writer = new_writer(paths, ArrayShape(4, "BF16", chunk_tokens=4, shard_tokens=16))
    writer.append(*make_sample(37))
    folder = paths.generation(FINGERPRINT, PARTITION, writer.publish())
    attributes = dict(zarr.open_group(folder, mode="r").attrs)
    assert attributes.pop("writer") > 0
    assert attributes == {"state_fingerprint": FINGERPRINT, "partition": PARTITION, "residual_ids": [2, 4, 8], "final": 8}
    assert {path.name for path in folder.iterdir()} == {*NAMES.values(), "input_ids", "offsets", "zarr.json"}
    for name in NAMES.values():
        metadata = json.loads((folder / name / "zarr.json").read_text())
        assert (metadata["data_type"], metadata["shape"], metadata["fill_value"]) == ("bfloat16", [37, 4], "NaN")
        assert metadata["chunk_grid"]["configuration"]["chunk_shape"] == [16, 4]
        (sharding,) = metadata["codecs"]
        assert sharding["configuration"]["chunk_shape"] == [4, 4]
        assert [codec["name"] for codec in sharding["configuration"]["codecs"]] == ["bytes", "crc32c"]
        assert sorted(path.name for path in (folder / name / "c").iterdir()) == ["0", "1", "2"]
    shard = folder / "final" / "c" / "0" / "0"
    index_bytes = 4 * 16 + 4
    assert shard.stat().st_size == 16 * 4 * 2 + 4 * 4 + index_bytes, "two bytes an element, and checksums"


def test_states_take_two_bytes_an_element_and_tokens_are_not_padded(paths):
    """Long and short samples together: rows as they are, and on disk beside them a rest of a chunk, checksums and an index."""
    lengths, width = (37, 4000, 1), 64
    made = make_partition(paths, lengths, shape=ArrayShape(width, "BF16", 128, 1024))
    view = open_store(paths.root).layer_set(made.manifest.layer_set)
    assert [{rows.shape for rows in sample.states.values()} for sample in view] == [{(n, width)} for n in lengths]
    assert sum(rows.nbytes for sample in view for rows in sample.states.values()) == sum(lengths) * 3 * width * 2
    chunks, shards = -(-sum(lengths) // 128), -(-sum(lengths) // 1024)
    for name in NAMES.values():
        files = list((generation_folder(paths, made) / name / "c").glob("*/0"))
        index = 1024 // 128 * 16 + 4
        assert sum(path.stat().st_size for path in files) == chunks * (128 * width * 2 + 4) + shards * index


def test_chunks_of_zeros_keep_their_sign(paths):
    writer = new_writer(paths)
    zeros = np.zeros((16, 4), DTYPES["BF16"])
    writer.append(np.zeros(16, np.int32), {2: -zeros, 4: zeros, 8: -zeros})
    folder = paths.generation(FINGERPRINT, PARTITION, writer.publish())
    assert [np.unique(bits(tensorstore_read(folder / NAMES[i]))).tolist() for i in IDS] == [[0x8000], [0], [0x8000]]


def test_every_shard_is_written_once(paths, monkeypatch):
    """It is made anew (x), and nobody opens it to write a second time."""
    written, open_path = Counter(), Path.open

    def counted(path, mode="r", *more, **named):
        if "c" in path.parts[-3:-1] and "offsets" not in path.parts:
            written[path.as_posix().partition(f"{writer.name}/")[2], mode] += mode != "rb"
        return open_path(path, mode, *more, **named)

    monkeypatch.setattr(Path, "open", counted)
    writer = new_writer(paths)
    for seed, length in enumerate([3, 20, 8, 1, 9]):
        writer.append(*make_sample(length, seed=seed))
    writer.publish()
    keys = [f"{name}/c/{i}/0" for name in NAMES.values() for i in range(6)] + [f"input_ids/c/{i}" for i in range(6)]
    assert {key: times for key, times in written.items() if times} == {(key, "xb"): 1 for key in keys}


def test_memory_is_a_chunk_of_each_array(paths):
    """64 MB in shards of 32 MB and chunks of 256 KB: what is held at most is far below a shard."""
    shape = ArrayShape(1024, "BF16", chunk_tokens=128, shard_tokens=16_384)
    states = make_states(np.random.default_rng(0), 1024, shape)
    writer = new_writer(paths, shape, ids=(8,))
    tracemalloc.start()
    try:
        for _ in range(32):
            writer.append(np.zeros(1024, np.int32), {8: states})
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held < 4_000_000
    assert tensorstore_read(paths.generation(FINGERPRINT, PARTITION, writer.publish()) / "final").shape == (32 * 1024, 1024)


def test_states_may_be_views_of_a_dump(paths):
    """Slots of a dump lie between each other: a residual's rows are not contiguous."""
    dump = make_states(np.random.default_rng(0), 10 * 3).reshape(10, 3, 4)
    dump.flags.writeable = False
    writer = new_writer(paths)
    writer.append(np.arange(10, dtype=np.int32), {residual_id: dump[:, slot] for slot, residual_id in enumerate(IDS)})
    folder = paths.generation(FINGERPRINT, PARTITION, writer.publish())
    for slot, residual_id in enumerate(IDS):
        assert np.array_equal(bits(tensorstore_read(folder / NAMES[residual_id])), bits(dump)[:, slot])


def test_counters(paths):
    writer = new_writer(paths)
    assert (writer.samples, writer.bytes) == (0, 0)
    writer.append(*make_sample(5))
    writer.append(*make_sample(7))
    assert (writer.samples, writer.bytes) == (2, 12 * 3 * 4 * 2)
    writer.discard()


def test_nothing_has_its_name_before_it_is_published(paths):
    writer = new_writer(paths)
    writer.append(*make_sample(20))
    assert folders(paths) == [STAGING_PREFIX + writer.name]
    assert writer.publish() == writer.name
    assert folders(paths) == [writer.name]
    assert re.fullmatch(r"\d{8}T\d{6}-[0-9a-f]{8}", writer.name)


def test_discard_removes_what_was_not_published_and_nothing_else(paths):
    kept, dropped = new_writer(paths), new_writer(paths)
    kept.append(*make_sample(20))
    dropped.append(*make_sample(20))
    kept.publish()
    dropped.discard()
    kept.discard()
    assert folders(paths) == [kept.name]
    assert tensorstore_read(paths.generation(FINGERPRINT, PARTITION, kept.name) / "final").shape == (20, 4)


def test_two_writers_of_one_partition_do_not_meet(paths):
    writers = [new_writer(paths) for _ in range(3)]
    samples = [make_sample(9, seed=seed) for seed in range(3)]
    for writer, sample in zip(writers, samples, strict=True):
        writer.append(*sample)
    for writer, (_, states) in zip(writers, samples, strict=True):
        folder = paths.generation(FINGERPRINT, PARTITION, writer.publish())
        assert np.array_equal(bits(tensorstore_read(folder / "final")), bits(states[8]))
    assert len(folders(paths)) == 3


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda s: s.pop(4), id="a residual id is missing"),
        pytest.param(lambda s: s.update({6: s[4]}), id="one too many"),
        pytest.param(lambda s: s.update({6: s.pop(4)}), id="another one"),
        pytest.param(lambda s: s.update({4: s[4][:-1]}), id="a row short"),
        pytest.param(lambda s: s.update({4: s[4][:, :-1]}), id="narrow"),
        pytest.param(lambda s: s.update({4: s[4].reshape(-1)}), id="flat"),
    ],
)
def test_a_sample_that_does_not_fit_is_refused_whole(paths, change):
    writer = new_writer(paths)
    token_ids, states = make_sample(5)
    change(states)
    with pytest.raises(StoreError, match="a sample does not fit its generation") as caught:
        writer.append(token_ids, states)
    assert "\n  expected: int32 ids, and ((5, 4), dtype(bfloat16)) for each of [2, 4, 8]\n  got: int32 ids, and {" in str(
        caught.value
    )
    good = make_sample(6, seed=1)
    assert writer.append(*good) == 0
    folder = paths.generation(FINGERPRINT, PARTITION, writer.publish())
    assert np.array_equal(bits(tensorstore_read(folder / "final")), bits(good[1][8]))


@pytest.mark.parametrize(("dtype", "given"), [("BF16", "F16"), ("BF16", "F32"), ("F16", "BF16"), ("F32", "BF16")])
def test_states_of_another_dtype_are_refused(paths, dtype, given):
    """Float16 states taken for bfloat16 would be other numbers in the same bytes."""
    writer = new_writer(paths, ArrayShape(4, dtype, 4, 8))
    with pytest.raises(StoreError, match="does not fit its generation"):
        writer.append(*make_sample(5, ArrayShape(4, given, 4, 8)))


def test_token_ids_of_another_dtype_are_refused(paths):
    writer = new_writer(paths)
    token_ids, states = make_sample(5)
    with pytest.raises(StoreError, match="does not fit its generation"):
        writer.append(token_ids.astype(np.int64), states)


@pytest.mark.parametrize("name", [*NAMES.values(), "input_ids"])
@pytest.mark.parametrize("fault", ["gone", "empty"])
def test_a_missing_shard_is_noticed_before_publishing(paths, name, fault):
    writer = new_writer(paths)
    writer.append(*make_sample(20))
    shard = staging_of(paths, writer) / name / "c" / "1" / ("" if name == "input_ids" else "0")
    if fault == "gone":
        shard.unlink()
    else:
        shard.write_bytes(b"")
    with pytest.raises(StoreError, match="a generation is not whole") as caught:
        writer.publish()
    message = str(caught.value)
    assert "\n  expected: 20 rows in every array" in message
    assert shard.relative_to(staging_of(paths, writer)).as_posix() in message
    assert folders(paths) == [STAGING_PREFIX + writer.name]


KILLS = 100


def test_writers_killed_at_any_moment_leave_nothing_half(tmp_path):
    """After each of the kills every sample that a manifest names has every bit, and gc knows all else as garbage."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        command = [sys.executable, "-m", "hs_assets_tests.killed_writers", f"{folder}/store.zarr", str(KILLS)]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["published"] >= KILLS / 2
    assert found["cut"] >= KILLS / 5, "too few writers were killed while they wrote"
