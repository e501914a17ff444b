"""Every exported sample goes through the trainers' own loaders, from their published packages, and is what was stored."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from hs_assets.exports.export import choose_manifests, export_partition
from hs_assets.exports.folder import ExportFolder
from hs_assets.exports.summary import begin, combine, finish
from hs_assets.exports.trainers import TRAINERS
from hs_assets.exports.vocabulary import VocabularyMapping, make_mapping
from hs_assets_tests.bfloat16_bits import ulps
from hs_assets_tests.conftest import say
from hs_assets_tests.export_material import (
    EPS,
    HIDDEN,
    LAYERS,
    NORM_WEIGHT,
    VOCABULARY,
    Put,
    bits,
    numbered_sample,
    put_partition,
    put_store,
)
from hs_assets_tests.trainer_loaders import install, read_exports

LENGTHS = {"chats-00000": [37, 4000, 5], "chats-00001": [64, 300]}
DRAFT_SIZES = (500, 5900)
POST_NORM_ULP = 2
LEGACY = "speculators-legacy"

Loaded = list[dict[str, np.ndarray]]


@dataclass(frozen=True)
class Everything:
    """What was stored, the exports of it under ``root`` by trainer, and what their loaders give."""

    samples: list[Put]
    root: Path
    mappings: dict[int, VocabularyMapping]
    loaded: dict[str, Loaded]

    def after_norm(self) -> list[np.ndarray]:
        """The final state of each sample after the norm of transformers, as bits."""
        (together,) = self.loaded["norm"]
        return np.split(together["normed"], np.cumsum([len(sample.ids) for sample in self.samples])[:-1])


@pytest.fixture(scope="module")
def everything(engine_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Everything:
    """Two partitions, and in each lengths that differ a lot, and one whose tokens say where they are, exported for all trainers.

    All loaders but the older speculators run in one process: most of its time is their imports.
    """
    work = tmp_path_factory.mktemp("trainers")
    store, samples = put_store(work / "store.zarr", LENGTHS)
    samples.append(numbered_sample("numbers-00000/0000"))
    put_partition(store.paths, samples[-1:])
    manifests = choose_manifests(store, LAYERS.id)
    mappings = {size: make_mapping(store, manifests, size, VOCABULARY, lambda: None) for size in DRAFT_SIZES}
    root = work / "exports"
    for trainer in TRAINERS.values():
        folder = ExportFolder(root / trainer.name)
        begin(folder, manifests[0], trainer)
        exported = [export_partition(store, manifest, trainer, folder, lambda *_: None) for manifest in manifests]
        finish(folder, trainer, manifests[0], exported, mappings[DRAFT_SIZES[0]])
    assert combine(ExportFolder(root / "speculators")) == len(samples)
    finals = np.concatenate([bits(sample.states[LAYERS.final]) for sample in samples])
    np.savez(work / "states.npz", bits=finals, weight=NORM_WEIGHT, eps=EPS)
    ids, counts = np.unique(np.concatenate([s.ids[s.mask] for s in samples]), return_counts=True)
    assert DRAFT_SIZES[0] < len(ids) < DRAFT_SIZES[1], "one of the vocabularies is to be filled up"
    sources = {
        "specforge": ("specforge", root / "specforge"),
        "all": ("speculators", root / "speculators" / "all"),
        "one partition": ("speculators", root / "speculators" / "chats-00001"),
        "modelopt": ("modelopt", root / "modelopt"),
        "plain": ("plain", root),
        "norm": ("norm", work / "states.npz"),
    }
    for size in DRAFT_SIZES:
        np.savez(work / f"counts-{size}.npz", ids=ids, counts=counts, draft_size=size, target_size=VOCABULARY)
        sources[f"vocabulary {size}"] = "vocabulary", work / f"counts-{size}.npz"
    loaders = install(engine_python, say)
    jobs = [argument for key, source in sources.items() for argument in (*source, work / f"{key}.npz")]
    read_exports(engine_python, loaders, *jobs)
    read_exports(engine_python, loaders, LEGACY, root / LEGACY, work / f"{LEGACY}.npz", legacy=True)
    return Everything(samples, root, mappings, {key: samples_in(work / f"{key}.npz") for key in (*sources, LEGACY)})


def samples_in(path: Path) -> Loaded:
    """What `read_exports.py` wrote: for each sample its tensors."""
    samples: dict[int, dict[str, np.ndarray]] = {}
    with np.load(path) as arrays:
        for key in arrays.files:
            number, _, name = key.partition("/")
            samples.setdefault(int(number), {})[name] = arrays[key]
    return [samples[i] for i in sorted(samples)]


def side_by_side(sample: Put) -> np.ndarray:
    return np.concatenate([bits(sample.states[i]) for i in LAYERS.aux], axis=1)


def trained(sample: dict[str, np.ndarray]) -> list[tuple[int, int, int]]:
    """For a numbered sample: of each position with a loss, the token of its auxiliary states, its id, its target's token."""
    rows = np.flatnonzero(sample["trained_mask"])
    aux, target = ((sample[f"trained_{name}"][rows, 0]).astype(np.uint32) << 16 for name in ("aux", "target"))
    numbers = zip(aux.view(np.float32), sample["trained_ids"][rows], target.view(np.float32), strict=True)
    return [(int(a) - 1, int(i), int(t) - 1) for a, i, t in numbers]


SUPERVISED_4_TO_6 = [(3, 4, 4), (4, 5, 5), (5, 6, 6)]
"""States of the token before, the supervised token itself, and the target's state of it, which predicts the one after."""


def check_trained_after_norm(sample: dict[str, np.ndarray], final: np.ndarray) -> None:
    """As `SUPERVISED_4_TO_6`, where the norm has taken the numbers from the final states."""
    assert [pair for *pair, _ in trained(sample)] == [pair for *pair, _ in SUPERVISED_4_TO_6]
    rows = np.flatnonzero(sample["trained_mask"])
    np.testing.assert_array_equal(sample["trained_target"][rows], final[[token for *_, token in SUPERVISED_4_TO_6]])


def test_specforge(everything: Everything) -> None:
    loaded = everything.loaded["specforge"]
    for ours, theirs, after_norm in zip(everything.samples, loaded, everything.after_norm(), strict=True):
        np.testing.assert_array_equal(theirs["input_ids"], ours.ids)
        np.testing.assert_array_equal(theirs["loss_mask"], [*ours.mask[1:], False])
        np.testing.assert_array_equal(theirs["hidden_state"], side_by_side(ours))
        assert ulps(theirs["target"], after_norm) <= POST_NORM_ULP
    check_trained_after_norm(loaded[-1], loaded[-1]["target"])


@pytest.mark.parametrize("which", ["all", LEGACY, "one partition"])
def test_speculators(everything: Everything, which: str) -> None:
    loaded, samples = everything.loaded[which], everything.samples
    expected = [s for s in samples if s.sample_id.startswith("chats-00001/")] if which == "one partition" else samples
    for ours, theirs in zip(expected, loaded, strict=True):
        np.testing.assert_array_equal(theirs["input_ids"], ours.ids)
        np.testing.assert_array_equal(theirs["loss_mask"], ours.mask)
        np.testing.assert_array_equal(theirs["hidden_states"], side_by_side(ours))
        np.testing.assert_array_equal(theirs["verifier_last_hidden_states"], bits(ours.states[LAYERS.final]))
    if which != "one partition":
        assert trained(loaded[-1]) == SUPERVISED_4_TO_6


def test_modelopt(everything: Everything) -> None:
    loaded = everything.loaded["modelopt"]
    for ours, theirs, after_norm in zip(everything.samples, loaded, everything.after_norm(), strict=True):
        np.testing.assert_array_equal(theirs["input_ids"], ours.ids)
        np.testing.assert_array_equal(theirs["loss_mask"], ours.mask)
        np.testing.assert_array_equal(theirs["aux_hidden_states"], side_by_side(ours))
        assert ulps(theirs["base_model_hidden_states"], after_norm) <= POST_NORM_ULP
        assert not theirs["prenorm"]
    check_trained_after_norm(loaded[-1], loaded[-1]["base_model_hidden_states"])


def test_torch_alone_reads_every_file(everything: Everything) -> None:
    """Nothing but tensors and plain values is in them, and they can be mapped."""
    loaded, mapping = everything.loaded["plain"], everything.mappings[DRAFT_SIZES[0]]
    mappings = [one for one in loaded if "d2t" in one or "tensor" in one]
    assert len(loaded) == 3 * len(everything.samples) + len(mappings) == 3 * 6 + 2
    for one in mappings:
        np.testing.assert_array_equal(one.get("d2t", one.get("tensor")), mapping.d2t, strict=True)
    (specforge,) = [one for one in mappings if "t2d" in one]
    np.testing.assert_array_equal(specforge["t2d"], mapping.t2d, strict=True)
    shapes = [(one["hidden_state"].shape, one["aux_hidden_state"].shape) for one in loaded if "aux_hidden_state" in one]
    assert shapes == [((1, len(s.ids), HIDDEN), (1, len(s.ids), 3 * HIDDEN)) for s in everything.samples]


def test_speculators_finds_the_vocabulary_beside_its_data(everything: Everything) -> None:
    mapping = everything.mappings[DRAFT_SIZES[0]]
    for folder in ("speculators", "speculators/all", LEGACY):
        for name, array in {"d2t": mapping.d2t, "t2d": mapping.t2d}.items():
            np.testing.assert_array_equal(np.load(everything.root / folder / f"{name}-500.npy"), array, strict=True)


@pytest.mark.parametrize("draft_size", DRAFT_SIZES)
def test_the_vocabulary_is_the_one_that_speculators_would_make(everything: Everything, draft_size: int) -> None:
    mapping, (theirs,) = everything.mappings[draft_size], everything.loaded[f"vocabulary {draft_size}"]
    np.testing.assert_array_equal(mapping.d2t, theirs["d2t"])
    np.testing.assert_array_equal(mapping.t2d, theirs["t2d"])
