"""Reading arrays without zarr: the bits that zarr wrote, whatever the cut, in every kind of process, and no fault as data."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec

from hs_assets.store import open_store
from hs_assets.store.arrays import BFLOAT16, MissingRowsError, open_array
from hs_assets.store.dtype import as_bits
from hs_assets.store.layout import create
from hs_assets_tests.store_material import LAYERS, PARTITION, bits, flip_byte, generation_folder, make_partition

PATTERNS = np.random.default_rng(0).permutation(65_536).astype(np.uint16).reshape(-1, 32)  # all of bfloat16: 2048 rows
BLOSC = BloscCodec(typesize=2, cname="zstd", clevel=1, shuffle="shuffle", blocksize=1 << 19)
CODECS = {"plain": [Crc32cCodec()], "blosc": [BLOSC, Crc32cCodec()]}


def zarr_writes(folder, codecs, rows=2048, shards=(384, 32)):
    """All patterns as zarr itself writes them."""
    array = zarr.create_array(
        folder,
        shape=(rows, 32),
        chunks=(128, 32),
        shards=shards,
        dtype=BFLOAT16,
        compressors=codecs,
        fill_value=float("nan"),
        config={"write_empty_chunks": True},
    )
    as_bits(array)[:] = PATTERNS[:rows]
    return folder


@pytest.fixture(scope="module", params=CODECS)
def written(request, tmp_path_factory):
    return open_array(zarr_writes(tmp_path_factory.mktemp("arrays") / request.param, CODECS[request.param]))


@settings(deadline=None)
@given(st.integers(0, 2048), st.integers(0, 2048))
def test_any_rows_that_zarr_wrote(written, one, other):
    start, stop = sorted((one, other))
    assert np.array_equal(written.read(start, stop).view(np.uint16), PATTERNS[start:stop])


def test_what_zarr_wrote_unsharded(tmp_path):
    array = open_array(zarr_writes(tmp_path / "a", CODECS["plain"], shards=None))
    assert not array.sharded
    assert np.array_equal(array.read(100, 1000).view(np.uint16), PATTERNS[100:1000])


def test_rows_go_where_they_are_wanted(written):
    """Into a part of a larger buffer, and nothing beside it is touched."""
    buffer = np.full((400, 32), 0xABCD, np.uint16)
    out = buffer[50:350].view(BFLOAT16)
    assert written.read(300, 600, out) is out
    assert np.array_equal(buffer[50:350], PATTERNS[300:600])
    assert (buffer[:50] == 0xABCD).all()
    assert (buffer[350:] == 0xABCD).all()


@pytest.mark.parametrize(
    "out",
    [np.empty((300, 32), np.uint16), np.empty((299, 32), BFLOAT16), np.empty((300, 64), BFLOAT16)[:, ::2]],
    ids=["dtype", "shape", "strided"],
)
def test_what_does_not_fit_is_refused(written, out):
    with pytest.raises(ValueError, match="out must be a C-contiguous bfloat16"):
        written.read(300, 600, out)


@pytest.mark.parametrize("rows", [(0, 2049), (-1, 3), (5, 4)])
def test_rows_that_are_not_there(written, rows):
    with pytest.raises(MissingRowsError):
        written.read(*rows)


@pytest.mark.parametrize("codecs", CODECS)
def test_every_flipped_byte_of_a_shard_raises(tmp_path, codecs):
    array = open_array(zarr_writes(tmp_path / "a", CODECS[codecs], rows=384))
    shard = array.shard_path(0)
    for position in range(0, shard.stat().st_size, 501):
        flip_byte(shard, position)
        with pytest.raises(ValueError, match=r"checksum is wrong|index of a shard"):
            array.read()
        flip_byte(shard, position)
    assert np.array_equal(array.read().view(np.uint16), PATTERNS[:384])


@pytest.mark.parametrize("codecs", CODECS)
def test_every_cut_of_a_shard_raises(tmp_path, codecs):
    array = open_array(zarr_writes(tmp_path / "a", CODECS[codecs], rows=384))
    data = array.shard_path(0).read_bytes()
    for length in [*range(0, len(data), 997), len(data) - 1]:
        array.shard_path(0).write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"is cut|index of a shard|bytes, not|checksum"):
            array.read()
    array.shard_path(0).unlink()
    with pytest.raises(MissingRowsError, match="is gone"):
        array.read()


def test_a_chunk_that_was_never_written(tmp_path):
    array = zarr.create_array(
        tmp_path / "a", shape=(8, 2), chunks=(2, 2), shards=(8, 2), dtype=np.float32, compressors=[Crc32cCodec()], fill_value=7
    )
    array[4:6] = 1
    with pytest.raises(MissingRowsError, match="chunk 1 of"):
        open_array(tmp_path / "a").read(3, 6)
    assert open_array(tmp_path / "a").read(4, 6).tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    "codecs", [[GzipCodec(), Crc32cCodec()], [GzipCodec()], [BLOSC]], ids=["gzip", "no-checksum", "blosc-no-checksum"]
)
def test_other_codecs_are_refused_by_name(tmp_path, codecs):
    zarr_writes(tmp_path / "a", codecs)
    with pytest.raises(ValueError, match=r"codecs .* are not read here") as caught:
        open_array(tmp_path / "a")
    assert type(codecs[0]).__name__.removesuffix("Codec").lower() in str(caught.value)


def test_big_endian_is_refused(tmp_path):
    path = zarr_writes(tmp_path / "a", CODECS["plain"]) / "zarr.json"
    body = json.loads(path.read_text())
    body["codecs"][0]["configuration"]["codecs"][0]["configuration"]["endian"] = "big"
    path.write_text(json.dumps(body))
    with pytest.raises(ValueError, match="big-endian"):
        open_array(path.parent)


# In other processes and threads


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    paths = create(tmp_path_factory.mktemp("store") / "s")
    return open_store(paths.root), make_partition(paths, [40, 11, 25])


def read_all(store):
    return {
        sample.sample_id: {i: bits(states).tobytes() for i, states in sample.states.items()}
        for sample in store.layer_set(LAYERS.id)
    }


def send_all(store, queue):
    queue.put(read_all(store))


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_readers_in_other_processes(store, method):
    """Also after this process has read: what it has cached and opened goes with a fork."""
    opened, made = store
    expected = {name: {i: bits(states).tobytes() for i, states in of.items()} for name, of in made.states.items()}
    assert read_all(opened) == expected
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    processes = [context.Process(target=send_all, args=(opened, queue)) for _ in range(2)]
    for process in processes:
        process.start()
    assert [queue.get() for _ in processes] == [expected] * 2
    for process in processes:
        process.join(30)
        assert process.exitcode == 0


def test_readers_in_threads(store):
    """A thread's scratch memory is its own."""
    opened, made = store
    expected = {name: {i: bits(states).tobytes() for i, states in of.items()} for name, of in made.states.items()}
    results = []
    threads = [threading.Thread(target=lambda: results.extend(read_all(opened) for _ in range(20))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 80


def test_a_view_can_be_pickled(store):
    opened, made = store
    view = pickle.loads(pickle.dumps(opened.layer_set(LAYERS.id)))
    assert [sample.sample_id for sample in view] == list(made.states)


def test_reading_loads_neither_zarr_nor_torch(store):
    opened, _ = store
    code = (
        f"import sys; from hs_assets.store import open_store; s = open_store({str(opened.paths.root)!r});"
        f"print(len(s.layer_set({LAYERS.id!r})[0].input_ids)); print(sorted({{'zarr', 'torch', 'asyncio'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["40", "[]"]


def test_states_go_straight_into_buffers(store):
    opened, made = store
    manifest, entry = opened.find(f"{PARTITION}/0000")
    buffers = {i: np.zeros((9, 4), BFLOAT16) for i in (4, 8)}
    states = opened.states(manifest, entry, (8, 4), slice(13, 22), buffers)
    assert {i: rows is buffers[i] for i, rows in states.items()} == {4: True, 8: True}
    for i, rows in buffers.items():
        assert np.array_equal(bits(rows), bits(made.states[entry.sample_id][i][13:22]))


def test_a_manifest_that_is_replaced_is_read_again(tmp_path):
    paths = create(tmp_path / "s")
    make_partition(paths, [3])
    store = open_store(paths.root)
    assert store.find(f"{PARTITION}/0000")[1].tokens == 3
    make_partition(paths, [5])
    assert store.find(f"{PARTITION}/0000")[1].tokens == 5


def test_the_files_that_a_generation_is_read_from(store):
    opened, made = store
    array = open_array(generation_folder(opened.paths, made) / "residual_004")
    assert (array.rows, array.row_shape, array.chunk_rows, array.shard_rows) == (76, (4,), 4, 8)
    assert array.shard_path(9).is_file()
    assert not array.shard_path(10).exists()
