"""Reading a store: equal bits however the samples were laid, only what is needed is touched, and no fault reads as data."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hs_assets.errors import StoreError, StoreVersionError
from hs_assets.store import Eagle3Sample, open_store
from hs_assets.store.layout import STORE_VERSION, StorePaths, create
from hs_assets.store.manifest import UnstoredRow
from hs_assets.store.masks import read_final_norm, read_masks, write_final_norm, write_masks
from hs_assets.store.writer import ArrayShape
from hs_assets.wire.layers import LayerSet
from hs_assets_tests.store_material import (
    DTYPES,
    FINGERPRINT,
    LAYERS,
    PARTITION,
    PROMPTS,
    SHAPE,
    bits,
    flip_byte,
    generation_folder,
    make_partition,
)

NAMES = {2: "residual_002", 4: "residual_004", 8: "final"}


@pytest.fixture
def paths():
    """An empty store, in memory: a test makes some hundred small files and syncs each."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield create(Path(folder) / "store.zarr")


def assert_equal(states, expected, tokens=slice(None)):
    """The same residual ids, and the same bits of each."""
    assert list(states) == sorted(expected)
    for residual_id, rows in states.items():
        assert rows.dtype == expected[residual_id].dtype
        assert np.array_equal(bits(rows), bits(expected[residual_id][tokens])), residual_id


def assert_sample(sample, made):
    assert isinstance(sample, Eagle3Sample)
    assert sample.input_ids.dtype == np.int32
    assert sample.loss_mask.dtype == np.bool_
    assert sample.input_ids.tolist() == made.input_ids[sample.sample_id].tolist()
    assert sample.loss_mask.tolist() == made.masks[sample.sample_id].tolist()
    assert_equal(sample.states, made.states[sample.sample_id])


def files_below(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@st.composite
def partitions(draw):
    """Lengths of samples, which generation each goes to, and which residual ids lie together."""
    lengths = draw(st.lists(st.integers(0, 17), min_size=1, max_size=4))
    generation_of = draw(st.lists(st.integers(0, 1), min_size=len(lengths), max_size=len(lengths)))
    together = draw(st.sampled_from([[(2, 4, 8)], [(2,), (4, 8)], [(8, 2), (4,)]]))
    chunk = draw(st.integers(2, 5))
    shape = ArrayShape(draw(st.integers(1, 5)), draw(st.sampled_from(sorted(DTYPES))), chunk, chunk * draw(st.integers(1, 3)))
    return lengths, generation_of, together, shape


@settings(max_examples=12, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # small as they are
@given(partitions(), st.integers(0, 2**32), st.data())
def test_what_is_read_is_what_was_written(partition, seed, data):
    lengths, generation_of, together, shape = partition
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        paths = create(Path(folder) / "s")
        made = make_partition(paths, lengths, generation_of=generation_of, ids_by_generation=together, shape=shape, seed=seed)
        store = open_store(paths.root)
        view = store.layer_set(LAYERS.id)
        assert [sample.sample_id for sample in view] == list(made.states)
        for sample in view:
            assert_sample(sample, made)
        sample_id = data.draw(st.sampled_from(list(made.states)))
        tokens = data.draw(st.slices(len(made.input_ids[sample_id])).map(lambda s: slice(s.start, s.stop)))
        layers = data.draw(st.sets(st.sampled_from(LAYERS.residual_ids)))
        wanted = {i: made.states[sample_id][i] for i in layers}
        assert_equal(store.read(sample_id, layers=layers, tokens=tokens), wanted, tokens)


@pytest.fixture(scope="module")
def long_sample(tmp_path_factory):
    """A store whose middle sample of 40 tokens lies in six shards, beginning inside one."""
    paths = create(tmp_path_factory.mktemp("long") / "s")
    return open_store(paths.root), make_partition(paths, [5, 40, 7])


@settings(deadline=None)
@given(st.slices(40).filter(lambda s: s.step is None or s.step > 0).map(lambda s: slice(s.start, s.stop)))
def test_token_slices_are_those_of_numpy(long_sample, tokens):
    store, made = long_sample
    sample_id = f"{PARTITION}/0001"
    assert_equal(store.read(sample_id, layers=[4], tokens=tokens), {4: made.states[sample_id][4]}, tokens)


@pytest.mark.parametrize(
    "tokens",
    [slice(-5, None), slice(None, -35), slice(30, 10), slice(40, 50), slice(-100, 3), slice(7, 8), slice(0, 0), slice(0, 40, 1)],
)
def test_token_slices_at_the_edges(long_sample, tokens):
    store, made = long_sample
    sample_id = f"{PARTITION}/0001"
    assert_equal(store.read(sample_id, tokens=tokens), made.states[sample_id], tokens)


@pytest.mark.parametrize("step", [2, -1])
def test_steps_are_refused(long_sample, step):
    store, _ = long_sample
    with pytest.raises(StoreError, match="tokens are read in steps of 1") as caught:
        store.read(f"{PARTITION}/0001", tokens=slice(None, None, step))
    assert f"\n  where: {PARTITION}/0001\n  got: slice(None, None, {step})" in str(caught.value)


def test_a_view_is_a_sequence(paths):
    made = [make_partition(paths, [3, 4], partition=f"demo-{n:05d}", seed=n) for n in (1, 0)]
    view = open_store(paths.root).layer_set(LAYERS.id)
    ids = ["demo-00000/0000", "demo-00000/0001", "demo-00001/0000", "demo-00001/0001"]
    assert len(view) == 4
    assert [sample.sample_id for _, sample in view.entries] == ids
    assert [sample.sample_id for sample in view] == ids
    assert [sample.sample_id for sample in view[1:3]] == ids[1:3]
    assert view[-1].sample_id == ids[-1]
    assert_sample(view[0], made[1])
    assert_sample(view[3], made[0])
    with pytest.raises(IndexError):
        view[4]


def test_rows_without_states_are_no_samples(paths):
    row = UnstoredRow(f"{PARTITION}/0002", 2, "f" * 64, "failed", "finite", "slot 1, token 7", 1)
    make_partition(paths, [3, 4], unstored=(row,))
    store = open_store(paths.root)
    assert len(store.layer_set(LAYERS.id)) == 2
    assert store.manifests(LAYERS.id)[0].unstored == (row,)
    with pytest.raises(StoreError, match="no such sample"):
        store.read(row.sample_id)


@pytest.mark.parametrize("name", ["../outside/0000", f"../{LAYERS.id}/{PARTITION}/0000", "/etc/passwd", "", "a" * 5000])
def test_what_is_no_sample_id_touches_no_path(paths, name):
    make_partition(paths, [3])
    outside = paths.views / "outside.json"
    outside.write_text("{}")  # no manifest: reading it would raise otherwise
    with pytest.raises(StoreError, match="no such sample"):
        open_store(paths.root).find(name)


@pytest.mark.parametrize("together", [[(2, 8), (4,)], [(4,), (2, 8)], [(2,), (4,), (8,)]])
def test_residual_ids_of_several_generations(paths, together):
    """A layer set that was widened later: its samples have parts of two captures, at other offsets."""
    made = make_partition(paths, [5, 9, 6], ids_by_generation=together, generation_of=[0, 1, 0])
    store = open_store(paths.root)
    assert all(len(sample.parts) == len(together) for sample in made.manifest.samples)
    for sample in store.layer_set(LAYERS.id):
        assert_sample(sample, made)
    assert_equal(store.read(f"{PARTITION}/0002", layers=[4, 2]), {i: made.states[f"{PARTITION}/0002"][i] for i in (2, 4)})


def test_a_smaller_layer_set_over_the_same_generation(paths):
    made = make_partition(paths, [5, 9])
    narrow = LayerSet((4,), 8)
    samples = tuple(
        dataclasses.replace(s, parts=(dataclasses.replace(s.parts[0], residual_ids=(4, 8), norms=(1.0, 1.0)),))
        for s in made.manifest.samples
    )
    dataclasses.replace(made.manifest, layer_set=narrow.id, samples=samples).write(paths)
    store = open_store(paths.root)
    assert store.layer_sets() == [LAYERS.id, narrow.id]
    for sample in store.layer_set(narrow.id):
        assert_equal(sample.states, {i: made.states[sample.sample_id][i] for i in (4, 8)})
    assert_equal(store.read(f"{PARTITION}/0001"), made.states[f"{PARTITION}/0001"])


def test_a_residual_id_is_found_in_whatever_layer_set_has_it(paths):
    make_partition(paths, [5], layers=LayerSet((2,), 8), seed=1)
    wide = make_partition(paths, [5], layers=LayerSet((4, 6), 8), seed=2)
    store = open_store(paths.root)
    assert_equal(store.read(f"{PARTITION}/0000", layers=[6]), {6: wide.states[f"{PARTITION}/0000"][6]})
    assert list(store.read(f"{PARTITION}/0000")) == [2, 8]


def test_lineage(paths):
    make_partition(paths, [3, 4])
    sample = open_store(paths.root).layer_set(LAYERS.id)[1]
    entry = open_store(paths.root).manifests(LAYERS.id)[0].samples[1]
    record = sample.lineage
    assert (record.sample_id, record.partition, record.layer_set) == (f"{PARTITION}/0001", PARTITION, "r2-4-8")
    assert (record.state_fingerprint, record.state_spec["dtype"]) == (FINGERPRINT, "BF16")
    assert record.parts == entry.parts
    assert record.token_sha256 == entry.token_sha256
    assert (record.source_row, record.source_sha256) == (1, f"{1:064x}")
    assert dataclasses.asdict(PROMPTS) == {
        "version": record.prompts_version,
        "source_name": record.source_name,
        "source_path": record.source_path,
        "template_sha256": record.template_sha256,
        "tokenizer_sha256": record.tokenizer_sha256,
    }


@given(st.lists(st.lists(st.booleans(), max_size=9), max_size=5))
@settings(max_examples=15, deadline=None)
def test_loss_masks_are_read_as_they_were_written(masks):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        paths = StorePaths(Path(folder))
        arrays = [np.array(mask, bool) for mask in masks]
        write_masks(paths, PARTITION, "v", arrays)
        write_masks(paths, PARTITION, "v", arrays)
        read = read_masks(paths, PARTITION, "v")
        assert [mask.dtype for mask in read] == [np.bool_] * len(masks)
        assert [mask.tolist() for mask in read] == masks


def test_loss_masks_are_found_by_the_version_of_the_prompts(paths):
    """A change of masks rewrites masks and the manifest, and no state."""
    made = make_partition(paths, [3, 4])
    inverted = [~mask for mask in made.masks.values()]
    write_masks(paths, PARTITION, "prompts-2", [np.zeros(9, bool), *inverted])
    samples = tuple(
        dataclasses.replace(s, mask=s.mask + 1, supervised_tokens=int(m.sum()))
        for s, m in zip(made.manifest.samples, inverted, strict=True)
    )
    prompts = dataclasses.replace(PROMPTS, version="prompts-2")
    dataclasses.replace(made.manifest, prompts=prompts, samples=samples).write(paths)
    view = open_store(paths.root).layer_set(LAYERS.id)
    assert [sample.loss_mask.tolist() for sample in view] == [mask.tolist() for mask in inverted]
    assert_equal(view[1].states, made.states[view[1].sample_id])


def test_final_norm(paths):
    weight = np.linspace(-1, 1, 8).astype(np.float32)
    write_final_norm(paths, "weights-1", "KimiK25ForConditionalGeneration", weight, 1e-6)
    write_final_norm(paths, "weights-1", "KimiK25ForConditionalGeneration", weight, 1e-6)
    group = zarr.open_group(paths.model("weights-1"), mode="r")
    assert dict(group.attrs) == {"eps": 1e-6, "model_class": "KimiK25ForConditionalGeneration"}
    assert np.array_equal(group["final_norm_weight"][:], weight)
    assert [path.name for path in (paths.root / "models").iterdir()] == ["weights-1"]
    read, eps = read_final_norm(paths, "weights-1")
    assert (read.dtype, read.tolist(), eps) == (np.float32, weight.tolist(), 1e-6)
    assert read_final_norm(paths, "weights-2") is None


@pytest.mark.parametrize("name", ["zarr.json", "final_norm_weight/zarr.json", "final_norm_weight/c/0"])
@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-9]), lambda path: flip_byte(path, 0)],
    ids=["missing", "cut", "flipped"],
)  # fmt: skip
def test_a_damaged_final_norm(paths, name, damage):
    """A chunk that is gone would read as zeros: all states would be 0 after the norm."""
    write_final_norm(paths, "weights-1", "LlamaForCausalLM", np.linspace(-1, 1, 8).astype(np.float32), 1e-6)
    damage(paths.model("weights-1") / name)
    with pytest.raises(StoreError, match="a final norm cannot be read"):
        read_final_norm(paths, "weights-1")


# What must not be touched, and what must not be taken for data


def test_a_read_touches_only_the_shards_and_chunks_that_it_needs(paths):
    """Samples of 5, 40 and 7 tokens; tokens 13..20 of the second are rows 18..25: shards 2 and 3, chunks of four rows."""
    made = make_partition(paths, [5, 40, 7])
    folder, sample_id = generation_folder(paths, made), f"{PARTITION}/0001"
    for name in ("residual_002", "final", "input_ids"):
        shutil.rmtree(folder / name / "c")
    for shard in (0, 1, 4, 5, 6):
        (folder / "residual_004" / "c" / str(shard) / "0").unlink()
    shutil.rmtree(paths.root / "masks")
    store, expected = open_store(paths.root), made.states[sample_id][4]
    assert_equal(store.read(sample_id, layers=[4], tokens=slice(13, 21)), {4: expected}, slice(13, 21))
    for tokens in (slice(10, 21), slice(13, 28)):
        with pytest.raises(StoreError, match="a shard is gone"):
            store.read(sample_id, layers=[4], tokens=tokens)

    flip_byte(folder / "residual_004" / "c" / "2" / "0", 0)  # rows 16..19; rows 20..23 lie behind them
    assert_equal(store.read(sample_id, layers=[4], tokens=slice(15, 21)), {4: expected}, slice(15, 21))
    with pytest.raises(StoreError, match="states cannot be read"):
        store.read(sample_id, layers=[4], tokens=slice(14, 21))


def test_a_read_opens_no_other_file(paths, monkeypatch):
    made = make_partition(paths, [5, 40, 7])
    store, sample_id = open_store(paths.root), f"{PARTITION}/0001"
    store.read(sample_id, layers=[4], tokens=slice(0, 1))
    opened, open_path = [], Path.open
    monkeypatch.setattr(Path, "open", lambda path, *more, **named: (opened.append(path), open_path(path, *more, **named))[1])
    store.read(sample_id, layers=[4], tokens=slice(13, 21))
    shards = {path.relative_to(generation_folder(paths, made)).as_posix() for path in opened if path.suffix != ".json"}
    assert shards == {"residual_004/c/2/0", "residual_004/c/3/0"}


def test_entries_are_known_without_reading_any_state(paths):
    make_partition(paths, [5, 40, 7])
    shutil.rmtree(paths.root / "data")
    shutil.rmtree(paths.root / "masks")
    view = open_store(paths.root).layer_set(LAYERS.id)
    assert [sample.tokens for _, sample in view.entries] == [5, 40, 7]


@pytest.mark.parametrize("residual_id", LAYERS.residual_ids)
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_a_missing_shard_of_states(paths, residual_id, dtype):
    made = make_partition(paths, [5, 40, 7], shape=ArrayShape(4, dtype, 4, 8))
    (generation_folder(paths, made) / NAMES[residual_id] / "c" / "3" / "0").unlink()
    store = open_store(paths.root)
    with pytest.raises(StoreError, match="states are missing: a shard is gone") as caught:
        store.read(f"{PARTITION}/0001")
    message, generation = str(caught.value), made.manifest.samples[1].parts[0].generation
    assert f"\n  where: {PARTITION}/0001, residual id {residual_id}, generation {generation}\n" in message
    assert "\n  remedy: remove the damaged folder" in message
    assert_equal(store.read(f"{PARTITION}/0000"), made.states[f"{PARTITION}/0000"])
    assert_equal(store.read(f"{PARTITION}/0002"), made.states[f"{PARTITION}/0002"])


@pytest.mark.parametrize("residual_id", LAYERS.residual_ids)
def test_a_flipped_byte_anywhere_in_a_shard(paths, residual_id):
    made = make_partition(paths, [24])
    shard = generation_folder(paths, made) / NAMES[residual_id] / "c" / "1" / "0"
    size = shard.stat().st_size
    for position in range(0, size, 3):
        flip_byte(shard, position)
        with pytest.raises(StoreError) as caught:
            open_store(paths.root).read(f"{PARTITION}/0000")
        assert f"\n  where: {PARTITION}/0000, residual id {residual_id}, generation " in str(caught.value)
        flip_byte(shard, position)
    assert_equal(open_store(paths.root).read(f"{PARTITION}/0000"), made.states[f"{PARTITION}/0000"])


@pytest.mark.filterwarnings("ignore:overflow encountered in scalar add:RuntimeWarning")
def test_a_shard_cut_anywhere(paths):
    """Cut behind a chunk of the index's size, zarr takes that chunk for the index, whose sums overflow before it gives up."""
    made = make_partition(paths, [24])
    shard = generation_folder(paths, made) / "final" / "c" / "1" / "0"
    data = shard.read_bytes()
    for length in range(0, len(data), 3):
        shard.write_bytes(data[:length])
        with pytest.raises(StoreError) as caught:
            open_store(paths.root).read(f"{PARTITION}/0000")
        assert f"\n  where: {PARTITION}/0000, residual id 8, generation " in str(caught.value)


@pytest.fixture(scope="module")
def pattern(tmp_path_factory):
    """A store of two samples that lie in three shards, to be copied and damaged."""
    paths = create(tmp_path_factory.mktemp("pattern") / "s")
    return paths, make_partition(paths, [11, 6])


ARRAYS = ("residual_002", "residual_004", "final")
STATE_FILES = [f"{name}/{file}" for name in ARRAYS for file in ("zarr.json", "c/0/0", "c/1/0", "c/2/0")]
ID_FILES = [f"input_ids/{file}" for file in ("zarr.json", "c/0", "c/1", "c/2")]
MASK_FILES = ["zarr.json", *(f"{name}/{file}" for name in ("loss_mask", "offsets") for file in ("zarr.json", "c/0"))]
FILES = [*(("data", name) for name in ("zarr.json", *STATE_FILES, *ID_FILES)), *(("masks", name) for name in MASK_FILES)]


@pytest.mark.parametrize(("kind", "name"), FILES, ids=[f"{kind}-{name}" for kind, name in FILES])
@pytest.mark.parametrize("fault", ["gone", "flipped", "cut"])
def test_no_damaged_file_reads_as_data(pattern, tmp_path, kind, name, fault):
    """Ids and masks have a fill value as states have, but one that could be data."""
    paths, made = pattern
    root = tmp_path / "s"
    shutil.copytree(paths.root, root)
    copy = StorePaths(root)
    path = (generation_folder(copy, made) if kind == "data" else copy.masks(PARTITION, PROMPTS.version)) / name
    if fault == "gone":
        path.unlink()
    elif fault == "flipped":
        flip_byte(path, 5)
    else:
        path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(StoreError) as caught:
        list(open_store(root).layer_set(LAYERS.id))
    assert PARTITION in str(caught.value.where)


def test_the_damaged_files_are_all_that_are_read(pattern):
    paths, made = pattern
    files = {("data", file) for file in files_below(generation_folder(paths, made))}
    files |= {("masks", file) for file in files_below(paths.masks(PARTITION, PROMPTS.version))}
    assert files - set(FILES) == {("data", "offsets/zarr.json"), ("data", "offsets/c/0")}
    for sample in open_store(paths.root).layer_set(LAYERS.id):
        assert_sample(sample, made)


def test_a_generation_that_is_gone(paths):
    made = make_partition(paths, [5])
    folder = generation_folder(paths, made)
    shutil.rmtree(folder)
    with pytest.raises(StoreError, match="a generation cannot be opened") as caught:
        open_store(paths.root).read(f"{PARTITION}/0000")
    message = str(caught.value)
    assert f"\n  where: {folder}" in message
    assert "\n  remedy: remove the damaged folder" in message


def test_rows_beyond_the_end_of_a_generation(paths):
    made = make_partition(paths, [5])
    part = dataclasses.replace(made.manifest.samples[0].parts[0], offset=3)
    sample = dataclasses.replace(made.manifest.samples[0], parts=(part,))
    dataclasses.replace(made.manifest, samples=(sample,)).write(paths)
    with pytest.raises(StoreError, match="states are missing"):
        open_store(paths.root).read(f"{PARTITION}/0000")


def test_a_cut_manifest(paths):
    make_partition(paths, [5])
    path = paths.manifest(LAYERS.id, PARTITION)
    path.write_bytes(path.read_bytes()[:-20])
    store = open_store(paths.root)
    for read in (lambda: store.read(f"{PARTITION}/0000"), lambda: store.layer_set(LAYERS.id)):
        with pytest.raises(StoreError, match="a manifest cannot be read") as caught:
            read()
        assert f"\n  where: {path}" in str(caught.value)


def test_a_manifest_of_a_newer_version(paths):
    make_partition(paths, [5])
    path = paths.manifest(LAYERS.id, PARTITION)
    path.write_text(path.read_text().replace('"version": 1', '"version": 2', 1))
    with pytest.raises(StoreVersionError, match="not a manifest of this version"):
        open_store(paths.root).layer_set(LAYERS.id)


def test_a_store_of_a_newer_version(paths):
    make_partition(paths, [5])
    path = paths.root / "zarr.json"
    body = json.loads(path.read_text())
    body["attributes"]["hs_assets_store_version"] += 1
    path.write_text(json.dumps(body))
    with pytest.raises(StoreVersionError, match="the store has another version") as caught:
        open_store(paths.root)
    assert f"\n  expected: {STORE_VERSION}\n  got: {STORE_VERSION + 1}" in str(caught.value)


def test_no_store(tmp_path):
    with pytest.raises(StoreError, match="there is no store here"):
        open_store(tmp_path / "nothing")


def test_an_empty_store(paths):
    store = open_store(str(paths.root))
    assert store.layer_sets() == []
    with pytest.raises(StoreError, match="no such layer set"):
        store.layer_set(LAYERS.id)


def test_an_unknown_layer_set(paths):
    make_partition(paths, [5])
    store = open_store(paths.root)
    for ask in (store.layer_set, store.manifests):
        with pytest.raises(StoreError, match="no such layer set in the store") as caught:
            ask("r3-31-59-61")
        message = str(caught.value)
        assert f"\n  where: {paths.root}\n  expected: ['{LAYERS.id}']\n  got: r3-31-59-61" in message


@pytest.mark.parametrize("sample_id", [f"{PARTITION}/0001", "demo-00007/0000", "0000", "", "/", f"{PARTITION}/"])
def test_an_unknown_sample(paths, sample_id):
    make_partition(paths, [5])
    with pytest.raises(StoreError, match="no such sample in the store"):
        open_store(paths.root).read(sample_id)


@pytest.mark.parametrize("layers", [[6], [2, 6], [2, 4, 8, 61]])
def test_an_unknown_residual_id(paths, layers):
    make_partition(paths, [5])
    with pytest.raises(StoreError, match="no such states of this sample in the store") as caught:
        open_store(paths.root).read(f"{PARTITION}/0000", layers=layers)
    assert f"\n  where: {PARTITION}/0000\n  expected: residual ids {tuple(layers)}" in str(caught.value)


def test_what_no_manifest_names_is_not_there(paths):
    made = make_partition(paths, [5, 6])
    other = make_partition(paths, [9], partition="demo-00001", seed=3)
    paths.manifest(LAYERS.id, "demo-00001").unlink()
    assert generation_folder(paths, other).is_dir()
    assert [sample.sample_id for sample in open_store(paths.root).layer_set(LAYERS.id)] == list(made.states)


def test_shape_of_the_material():
    """The tests above count on shards of two chunks of four tokens."""
    assert (SHAPE.chunk_tokens, SHAPE.shard_tokens) == (4, 8)
