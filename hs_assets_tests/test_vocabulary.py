"""The draft vocabulary: full size whatever the data, and never another one unless it is asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hs_assets.errors import ExportError
from hs_assets.exports.export import choose_manifests, export_partition
from hs_assets.exports.folder import ExportFolder
from hs_assets.exports.summary import begin, finish
from hs_assets.exports.trainer import Trainer
from hs_assets.exports.trainers import TRAINERS
from hs_assets.exports.vocabulary import VocabularyMapping, find_mapping, keep_mapping, make_mapping, samples_hash
from hs_assets.store import Store, open_store
from hs_assets.store.layout import create
from hs_assets_tests.export_material import HIDDEN, LAYERS, Put, put_partition, put_store


def sample(sample_id: str, ids: Sequence[int], supervised: Sequence[bool] | None = None) -> Put:
    states = np.ones((len(ids), HIDDEN), "f4").astype("bfloat16")
    mask = np.ones(len(ids), bool) if supervised is None else np.array(supervised)
    return Put(sample_id, np.array(ids, np.int32), mask, dict.fromkeys(LAYERS.residual_ids, states))


def store_of(root: Path, *samples: Put) -> Store:
    paths = create(root / "store.zarr")
    put_partition(paths, samples)
    return open_store(paths.root)


def now(store: Store) -> dict[str, str]:
    """What is stored today, as a mapping knows it."""
    return {manifest.partition: samples_hash(manifest) for manifest in choose_manifests(store, LAYERS.id)}


def make(store: Store, draft_size: int, target_size: int) -> VocabularyMapping:
    return make_mapping(store, choose_manifests(store, LAYERS.id), draft_size, target_size, lambda: None)


def test_the_most_frequent_supervised_ids_are_chosen(tmp_path: Path) -> None:
    """Id 9 is the most frequent, but never supervised; 3 and 5 are equals, and the lower one is taken."""
    ids, mask = [9, 9, 9, 9, 7, 7, 7, 5, 5, 3, 3, 2], [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]
    mapping = make(store_of(tmp_path, sample("chats-00000/0000", ids, [bool(b) for b in mask])), 2, 10)
    assert mapping.ids == (3, 7)
    np.testing.assert_array_equal(mapping.d2t, [3, 6])
    np.testing.assert_array_equal(np.flatnonzero(mapping.t2d), [3, 7])
    assert (mapping.supervised_tokens, mapping.covered_tokens, mapping.supervised_ids) == (8, 5, 4)


def test_among_equals_the_lower_ids_are_chosen(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).permutation(np.arange(50, 1050))
    assert make(store_of(tmp_path, sample("chats-00000/0000", ids.tolist())), 100, 2000).ids == tuple(range(50, 150))


def test_a_draft_vocabulary_larger_than_the_supervised_ids_is_filled_up(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).permutation(163_840)[:6054]
    mapping = make(store_of(tmp_path, sample("chats-00000/0000", ids.tolist())), 32_000, 163_840)
    assert (len(mapping.d2t), int(mapping.t2d.sum()), mapping.supervised_ids) == (32_000, 32_000, 6054)
    targets = np.arange(32_000) + mapping.d2t
    assert mapping.t2d[ids].all()
    assert set(ids.tolist()) <= set(targets.tolist())
    assert (np.diff(targets) > 0).all()
    np.testing.assert_array_equal(np.flatnonzero(mapping.t2d), targets)


def test_sizes_and_ids_that_cannot_be_are_refused(tmp_path: Path) -> None:
    store = store_of(tmp_path, sample("chats-00000/0000", [1, 2, 50]))
    with pytest.raises(ExportError, match=r"larger than the target's(.|\n)*1 to 60(.|\n)*got: 61"):
        make(store, 61, 60)
    with pytest.raises(ExportError, match=r"outside the target's vocabulary(.|\n)*chats-00000/0000(.|\n)*0 to 49(.|\n)*1 to 50"):
        make(store, 10, 50)


def test_it_is_stale_after_a_change_and_never_silently_replaced(tmp_path: Path) -> None:
    store, file = store_of(tmp_path, sample("chats-00000/0000", [1, 2, 3])), tmp_path / "vocabulary.json"
    first = make(store, 3, 10)
    assert keep_mapping(file, first, replace=False)
    assert find_mapping(file) == first
    assert first.stale(now(store)) is None
    assert not keep_mapping(file, make(store, 3, 10), replace=False), "nothing changed"

    put_partition(store.paths, [sample("chats-00001/0000", [7, 7, 8, 8])])
    assert first.stale(now(store)) == "partitions since it was made: 1 new (chats-00001)"
    second, before = make(store, 3, 10), file.read_bytes()
    with pytest.raises(ExportError, match=rf"another(.|\n)*{second.sha256}(.|\n)*{first.sha256}(.|\n)*--replace"):
        keep_mapping(file, second, replace=False)
    assert file.read_bytes() == before
    assert keep_mapping(file, second, replace=True)
    assert find_mapping(file) == second


def test_a_new_version_of_the_prompts_makes_it_stale(tmp_path: Path) -> None:
    """As another longest length does, or another template."""
    store = store_of(tmp_path, sample("chats-00000/0000", [1, 2, 3]))
    mapping = make(store, 3, 10)
    put_partition(store.paths, [sample("chats-00000/0000", [1, 2])], prompts_version="prompts-2")
    assert mapping.stale(now(store)) == "partitions since it was made: 1 changed (chats-00000)"


def test_a_sample_that_failed_and_was_made_since_makes_it_stale(tmp_path: Path) -> None:
    store = store_of(tmp_path, sample("chats-00000/0000", [1, 2, 3]))
    mapping = make(store, 3, 10)
    put_partition(store.paths, [sample("chats-00000/0000", [1, 2, 3]), sample("chats-00000/0001", [4, 4])])
    assert mapping.stale(now(store)) == "partitions since it was made: 1 changed (chats-00000)"


@pytest.mark.parametrize("trainer", TRAINERS.values(), ids=TRAINERS)
def test_each_export_carries_its_hash_and_says_whether_it_is_stale(tmp_path: Path, trainer: Trainer) -> None:
    store, _ = put_store(tmp_path / "store.zarr", {"chats-00000": [5]})
    mapping, folder = make(store, 100, 6000), ExportFolder(tmp_path / "export")

    def export() -> dict[str, object]:
        manifests = choose_manifests(store, LAYERS.id)
        begin(folder, manifests[0], trainer)
        done = [export_partition(store, manifest, trainer, folder, lambda *_: None) for manifest in manifests]
        finish(folder, trainer, manifests[0], done, mapping)
        return json.loads((folder.root / "hs_assets_export.json").read_text())["vocabulary"]

    said = export()
    assert (said["sha256"], said["draft_size"], said["stale"]) == (mapping.sha256, 100, None)
    files = [folder.root / name for name in trainer.vocabulary(mapping)]
    written = [file.read_bytes() for file in files]
    assert len(written) > 0
    put_partition(store.paths, [sample("chats-00001/0000", [1, 2])])
    said = export()
    assert (said["sha256"], said["stale"]) == (mapping.sha256, "partitions since it was made: 1 new (chats-00001)")
    assert [file.read_bytes() for file in files] == written
    assert '"draft_vocab_size": 100' in (folder.root / "trainer_config.json").read_text()


@pytest.mark.parametrize(
    ("old", "new"), [("}", ""), ('"version": 1', '"version": 9'), ('"ids"', '"id"'), ("[1, 2, 3]", "[1, 2, 4]")]
)
def test_a_damaged_file_is_not_taken_for_a_mapping(tmp_path: Path, old: str, new: str) -> None:
    store, file = store_of(tmp_path, sample("chats-00000/0000", [1, 2, 3])), tmp_path / "vocabulary.json"
    keep_mapping(file, make(store, 3, 10), replace=False)
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(ExportError, match=r"cannot be read(.|\n)*vocabulary.json"):
        find_mapping(file)
