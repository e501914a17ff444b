"""Exports as folders: whole or not there, identical or replaced, refused where a trainer would take them wrongly."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from hs_assets.errors import ExportError, StoreError
from hs_assets.exports import export as export_module
from hs_assets.exports import torch_file
from hs_assets.exports.export import Exported, check_room, choose_manifests, export_partition
from hs_assets.exports.folder import ExportFolder
from hs_assets.exports.summary import begin, combine, finish
from hs_assets.exports.trainer import Trainer
from hs_assets.exports.trainers import MODELOPT, SPECFORGE, SPECULATORS, SPECULATORS_LEGACY, TRAINERS
from hs_assets.store import Store, open_store
from hs_assets.store.layout import create
from hs_assets.store.manifest import UnstoredRow
from hs_assets.wire.layers import LayerSet
from hs_assets_tests.export_material import FINGERPRINT, HIDDEN, LAYERS, Put, put_partition, put_store, random_sample

LENGTHS = {"chats-00000": [37, 4000], "chats-00001": [9]}
MANIFEST = "hs_assets_export.json"
SUFFIXES = {"specforge": ".ckpt", "speculators": ".safetensors", "speculators-legacy": ".pt", "modelopt": ".pt"}


def export(
    store: Store, trainer: Trainer, root: Path, partitions: Sequence[str] = (), layer_set: str = LAYERS.id
) -> list[Exported]:
    manifests, folder = choose_manifests(store, layer_set, partitions), ExportFolder(root)
    begin(folder, manifests[0], trainer)
    exported = [export_partition(store, manifest, trainer, folder, lambda *_: None) for manifest in manifests]
    finish(folder, trainer, manifests[0], exported, None)
    return exported


def states(root: Path) -> dict[str, str]:
    """Every file under a folder, with its sha256."""
    return {p.relative_to(root).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in root.rglob("*") if p.is_file()}


def random_samples(partition: str, lengths: Sequence[int], seed: int) -> list[Put]:
    random = np.random.default_rng(seed)
    return [random_sample(f"{partition}/{row:04d}", length, random) for row, length in enumerate(lengths)]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return put_store(tmp_path / "store.zarr", LENGTHS)[0]


@pytest.mark.parametrize("trainer", TRAINERS.values(), ids=TRAINERS)
def test_the_manifest_accounts_for_every_file(store: Store, tmp_path: Path, trainer: Trainer) -> None:
    export(store, trainer, tmp_path / "export")
    files = sorted(path for path in (tmp_path / "export").rglob(f"*{SUFFIXES[trainer.name]}"))
    listed = []
    for key in LENGTHS:
        body = json.loads((tmp_path / "export" / key / MANIFEST).read_text())
        for sample in body["samples"]:
            path = tmp_path / "export" / key / sample["file"]
            assert (sample["bytes"], sample["sha256"]) == (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
            ids_and_mask = 8 if trainer is SPECULATORS else 16  # its masks are in the dataset
            expected = sample["tokens"] * (4 * HIDDEN * 2 + ids_and_mask)
            assert 0 <= sample["bytes"] - expected < 4096, "tokens are padded, or states do not take two bytes an element"
            listed.append((sample["sample_id"], sample["tokens"], path))
        assert (body["trainer"], body["layer_set"], body["state_fingerprint"]) == (trainer.name, LAYERS.id, FINGERPRINT)
    assert [(sample_id, tokens) for sample_id, tokens, _ in listed] == [
        ("chats-00000/0000", 37), ("chats-00000/0001", 4000), ("chats-00001/0000", 9),
    ]  # fmt: skip
    assert [path for *_, path in listed] == files, "the names do not sort as the samples do"
    whole = json.loads((tmp_path / "export" / MANIFEST).read_text())
    assert (whole["samples"], whole["tokens"], list(whole["partitions"])) == (3, 4046, list(LENGTHS))


@pytest.mark.parametrize(
    ("trainer", "mask", "final"),
    [
        (SPECFORGE, "of token i + 1 (shifted left by one, last position 0)", "after the norm"),
        (SPECULATORS, "of token i (token coordinates)", "before the norm"),
        (SPECULATORS_LEGACY, "of token i (token coordinates)", "before the norm"),
        (MODELOPT, "of token i (token coordinates)", "after the norm"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_manifest_says_what_mask_and_final_state_are(tmp_path: Path, trainer: Trainer, mask: str, final: str) -> None:
    """Of ids 0 to 9 the assistant's are 4, 5 and 6; test_trainers.py says what the trainers make of it."""
    store, _ = put_store(tmp_path / "store.zarr", {})
    (made,) = random_samples("chats-00000", [10], 1)
    span = dataclasses.replace(made, ids=np.arange(10, dtype=np.int32), mask=np.isin(np.arange(10), (4, 5, 6)))
    put_partition(store.paths, [span])
    export(store, trainer, tmp_path / "export")
    body = json.loads((tmp_path / "export" / "chats-00000" / MANIFEST).read_text())
    assert (body["loss_mask"].startswith(mask), body["final_state"]) == (True, final)
    assert [sample["trained_positions"] for sample in body["samples"]] == [3]


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        (SPECFORGE, {"eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 29, 57]}}),
        (SPECULATORS, {"target_layer_ids": [2, 30, 58], "eagle_aux_hidden_state_layer_ids": [2, 30, 58]}),
        (
            MODELOPT,
            {"eagle_architecture_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 29, 57]}},
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_layer_ids_are_in_the_trainers_own_numbering(tmp_path: Path, trainer: Trainer, expected: dict[str, object]) -> None:
    """61 layers, and the same tensors for all three."""
    layers, paths = LayerSet((2, 30, 58), 61), create(tmp_path / "store.zarr")
    put_store(paths.root, {})
    (made,) = random_samples("chats-00000", [5], 1)
    renamed = dict(zip(layers.residual_ids, made.states.values(), strict=True))
    put_partition(paths, [dataclasses.replace(made, states=renamed)], layers=layers)
    export(open_store(paths.root), trainer, tmp_path / "export", layer_set=layers.id)
    assert json.loads((tmp_path / "export" / "trainer_config.json").read_text()) == expected


def test_exporting_again_leaves_alone_what_is_identical_and_replaces_what_is_not(store: Store, tmp_path: Path) -> None:
    root = tmp_path / "export"
    assert [one.state for one in export(store, SPECFORGE, root)] == ["written", "written"]
    before, inode = states(root), (root / "chats-00000").stat().st_ino
    assert [one.state for one in export(store, SPECFORGE, root)] == ["identical", "identical"]
    assert (states(root), (root / "chats-00000").stat().st_ino) == (before, inode)

    with (root / "chats-00000" / "data_0001.ckpt").open("r+b") as file:
        file.seek(5000)
        file.write(b"x")
    damaged, other = export(store, SPECFORGE, root)
    assert (damaged.state, damaged.why) == ("replaced", "data_0001.ckpt is not as it was exported")
    assert other.state == "identical"
    assert states(root) == before, "the same samples give the same bytes"

    (root / "chats-00000" / "copy.ckpt").touch()  # a trainer would read it
    (root / "chats-00001" / "data_0000.ckpt").unlink()
    assert [one.why for one in export(store, SPECFORGE, root)] == [
        "copy.ckpt is no file of the export",
        "data_0000.ckpt is gone",
    ]
    assert states(root) == before

    put_partition(store.paths, random_samples("chats-00001", [9], 3), prompts_version="prompts-2")
    same, changed = export(store, SPECFORGE, root)
    assert (same.state, changed.state, changed.why) == (
        "identical",
        "replaced",
        "its samples, masks or states are other ones now",
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["export", "store.zarr"], "something is left beside the export"


def test_a_partition_can_be_added(store: Store, tmp_path: Path) -> None:
    export(store, MODELOPT, tmp_path / "export", ["chats-00001"])
    assert [p.name for p in (tmp_path / "export").rglob("*.pt")] == ["chats-00001-0000.pt"]
    export(store, MODELOPT, tmp_path / "export", ["chats-00000"])
    whole = json.loads((tmp_path / "export" / MANIFEST).read_text())
    assert (whole["samples"], list(whole["partitions"])) == (3, ["chats-00000", "chats-00001"])


def test_one_dataset_of_speculators_over_all_partitions(store: Store, tmp_path: Path) -> None:
    root = tmp_path / "export"
    export(store, SPECULATORS, root)
    assert combine(ExportFolder(root)) == combine(ExportFolder(root)) == 3
    given = [load_file(root / "all" / "hidden_states" / f"hs_{i}.safetensors") for i in range(3)]
    assert [len(one["token_ids"]) for one in given] == [37, 4000, 9]
    put_partition(store.paths, random_samples("chats-00000", [8], 9), prompts_version="prompts-2")
    export(store, SPECULATORS, root)
    assert not (root / "all").exists(), "it would be of the states of before"
    assert combine(ExportFolder(root)) == 2
    with pytest.raises(ExportError, match="no export for speculators"):
        combine(ExportFolder(tmp_path / "nothing"))


def test_names_sort_as_samples_do_beyond_four_digits(tmp_path: Path) -> None:
    store, _ = put_store(tmp_path / "store.zarr", {})
    random = np.random.default_rng(0)
    put_partition(store.paths, [random_sample(f"chats-00000/{row}", 3, random) for row in ("0002", "9999", "10000")])
    export(store, SPECFORGE, tmp_path / "export")
    names = [path.name for path in sorted((tmp_path / "export").rglob("*.ckpt"))]
    assert names == ["data_00002.ckpt", "data_09999.ckpt", "data_10000.ckpt"]


def test_rows_that_are_not_stored_are_in_the_manifest(tmp_path: Path) -> None:
    store, _ = put_store(tmp_path / "store.zarr", {})
    dropped = UnstoredRow("chats-00000/0002", 2, "0" * 64, "dropped", "too_long", "", 0)
    put_partition(store.paths, random_samples("chats-00000", [5, 6], 2), unstored=(dropped,))
    export(store, MODELOPT, tmp_path / "export")
    body = json.loads((tmp_path / "export" / "chats-00000" / MANIFEST).read_text())
    assert body["ledger"] == {"in": 3, "stored": 2, "dropped": {"too_long": 1}, "failed": {}}


@pytest.mark.parametrize("trainer", TRAINERS.values(), ids=TRAINERS)
def test_other_token_ids_than_the_manifest_says_raise(store: Store, tmp_path: Path, trainer: Trainer) -> None:
    (manifest, _) = choose_manifests(store, LAYERS.id)
    wrong = dataclasses.replace(manifest.samples[1], token_sha256="0" * 64)
    dataclasses.replace(manifest, samples=(manifest.samples[0], wrong)).write(store.paths)
    with pytest.raises(StoreError, match=r"not those of the manifest(.|\n)*chats-00000/0001"):
        export(store, trainer, tmp_path / "export")
    assert sorted(p.name for p in (tmp_path / "export").rglob("*")) == [MANIFEST]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["export", "store.zarr"]


def test_what_a_trainer_cannot_have_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    store, _ = put_store(tmp_path / "store.zarr", {})
    for layers in (LayerSet((2, 4), 8), LayerSet((0, 2, 4), 8)):
        (made,) = random_samples("chats-00000", [5], 1)
        sample = dataclasses.replace(made, states=dict.fromkeys(layers.residual_ids, made.states[LAYERS.final]))
        put_partition(store.paths, [sample], layers=layers)
    with pytest.raises(ExportError, match=r"exactly three auxiliary layers(.|\n)*got: 2"):
        export(store, SPECFORGE, tmp_path / "export", layer_set="r2-4-8")
    for trainer in (SPECFORGE, MODELOPT):
        with pytest.raises(ExportError, match=r"the embedding output is none(.|\n)*for speculators"):
            export(store, trainer, tmp_path / "export", layer_set="r0-2-4-8")
    assert not (tmp_path / "export").exists()
    assert [one.state for one in export(store, SPECULATORS, tmp_path / "export", layer_set="r0-2-4-8")] == ["written"]


def test_without_the_final_norm_there_is_no_state_after_it(tmp_path: Path) -> None:
    paths = create(tmp_path / "store.zarr")
    put_partition(paths, random_samples("chats-00000", [5], 1))
    store = open_store(paths.root)
    for trainer in (SPECFORGE, MODELOPT):
        with pytest.raises(ExportError, match=r"final norm of this model is not known(.|\n)*LlamaForCausalLM"):
            export(store, trainer, tmp_path / trainer.name)
    for trainer in (SPECULATORS, SPECULATORS_LEGACY):
        export(store, trainer, tmp_path / trainer.name)


def test_states_of_different_specs_are_not_mixed(store: Store, tmp_path: Path) -> None:
    put_partition(store.paths, random_samples("chats-00002", [5], 1), fingerprint="f" * 16)
    with pytest.raises(ExportError, match=r"made in different ways(.|\n)*chats-00002"):
        export(store, SPECFORGE, tmp_path / "export")
    export(store, SPECFORGE, tmp_path / "export", list(LENGTHS))
    with pytest.raises(ExportError, match=r"another export is in this folder(.|\n)*ffff(.|\n)*choose another folder"):
        export(store, SPECFORGE, tmp_path / "export", ["chats-00002"])
    with pytest.raises(ExportError, match="another export is in this folder"):
        export(store, SPECULATORS, tmp_path / "export", ["chats-00000"])


def test_a_folder_with_something_else_in_it_is_refused(store: Store, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "holiday.jpg").touch()
    with pytest.raises(ExportError, match="not empty, and no export"):
        export(store, SPECFORGE, tmp_path / "photos")
    assert [p.name for p in (tmp_path / "photos").iterdir()] == ["holiday.jpg"]


def test_partitions_that_are_not_stored_are_named(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"not stored in this layer set(.|\n)*chats-00000(.|\n)*chats-00007"):
        export(store, SPECFORGE, tmp_path / "export", ["chats-00000", "chats-00007"])


def test_an_export_larger_than_the_disk_is_refused(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = sum(length for lengths in LENGTHS.values() for length in lengths) * 4 * HIDDEN * 2
    monkeypatch.setattr(export_module.shutil, "disk_usage", lambda _: type("usage", (), {"free": needed - 1}))
    manifests, folder = choose_manifests(store, LAYERS.id), ExportFolder(tmp_path / "export")
    with pytest.raises(ExportError, match=rf"cannot hold this export(.|\n)*{needed:,} bytes(.|\n)*{needed - 1:,} bytes free"):
        check_room(store, manifests, folder)
    monkeypatch.undo()
    check_room(store, manifests, folder)


def test_two_exports_of_one_partition_wait_for_each_other(store: Store, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda _: export(store, SPECFORGE, tmp_path / "export", ["chats-00000"])[0], range(2)))
    assert sorted(one.state for one in done) == ["identical", "written"]


_KILLED = """
import os, signal, sys
from pathlib import Path
from hs_assets_tests.test_exports import SPECFORGE, export, open_store, torch_file
import hs_assets.exports.folder as folder

def dies(function, after):
    calls = iter(range(1000))
    def dying(*arguments):
        if next(calls) == after:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)
    return dying

what, after, store, root = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]
where = {"save": torch_file, "sync": folder, "write_manifest": sys.modules["hs_assets.exports.export"], "rename": Path}[what]
setattr(where, what, dies(getattr(where, what), after))
export(open_store(store), SPECFORGE, Path(root))
"""


@pytest.mark.parametrize(("what", "after"), [("save", 1), ("save", 2), ("write_manifest", 0), ("sync", 2), ("rename", 0)])
def test_killed_at_any_moment_no_half_partition_is_ever_there(store: Store, tmp_path: Path, what: str, after: int) -> None:
    root = tmp_path / "export"
    command = [sys.executable, "-c", _KILLED, what, str(after), str(store.paths.root), str(root)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    there = {path.parent.name for path in root.rglob("*.ckpt")}
    for key in there:
        body = json.loads((root / key / MANIFEST).read_text())
        assert {s["file"]: s["sha256"] for s in body["samples"]} == {k: v for k, v in states(root / key).items() if k != MANIFEST}
    assert there == ({"chats-00000"} if (what, after) == ("save", 2) else set())
    assert {one.partition: one.state for one in export(store, SPECFORGE, root)} == {
        key: "identical" if key in there else "written" for key in LENGTHS
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == ["export", "store.zarr"], "what the killed one left is still there"


def test_values_that_no_tensor_has_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="no tensor has the dtype uint16"):
        torch_file.save({"a": np.zeros(3, np.uint16)}, tmp_path / "a.pt")
    with pytest.raises(TypeError, match="cannot be saved"):
        torch_file.save({"a": 1.5}, tmp_path / "a.pt")  # type: ignore[dict-item]


def test_a_folder_where_a_disk_is_mounted_has_no_place_beside_it(store: Store) -> None:
    with pytest.raises(ExportError, match=r"where a disk is mounted(.|\n)*/dev/shm/export"):
        export(store, SPECFORGE, Path("/dev/shm"))
