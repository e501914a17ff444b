"""Of a generation that is still used, the states that only a replaced layer set had go, and nothing else of it."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
import zarr
from click.testing import CliRunner

from hs_assets.cli import main
from hs_assets.config import Project
from hs_assets.errors import StoreError
from hs_assets.extraction.extract import Report
from hs_assets.extraction.plan import compare
from hs_assets.serving.launch import resolve
from hs_assets.store import open_store
from hs_assets.store.disposal import Garbage, Kept
from hs_assets.store.gc import collect
from hs_assets.store.generation import open_generation
from hs_assets.store.layout import StorePaths, create
from hs_assets.store.lineage import Question, lineage_rows
from hs_assets.store.verify import verify
from hs_assets_tests.conftest import write_project
from hs_assets_tests.fake_server import fake_server
from hs_assets_tests.store_material import LAYERS, OTHER, PARTITION, Partition, bits, generation_folder, make_partition, widen
from hs_assets_tests.test_extract import make_prompts, run, write_rows

LENGTHS = [5, 20, 6]
FREED = ["residual_002", "residual_004"]


@pytest.fixture
def paths(tmp_path: Path) -> StorePaths:
    return create(tmp_path / "store.zarr")


def two_layer_sets(paths: StorePaths) -> Partition:
    """All of LAYERS in one generation; OTHER has its final state, and two streams in a generation of their own."""
    made = make_partition(paths, LENGTHS)
    widen(paths, made)
    return made


def gc(paths: StorePaths, **options: object) -> list[Garbage | Kept]:
    chosen = {"current": OTHER.id, "min_age": 3600.0, "delete": True} | options
    return list(collect(paths, paths.root.parent / "locks", **chosen))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def problems(paths: StorePaths) -> list[str]:
    open_generation.cache_clear()
    return [problem.detail for one in verify(open_store(paths.root), 1) for problem in one.problems]


def test_the_arrays_that_only_the_replaced_layer_set_names(paths: StorePaths) -> None:
    made = two_layer_sets(paths)
    generation, before = generation_folder(paths, made), files(paths.root)
    assert gc(paths, current=None) == [], "both layer sets are readable"
    dry = gc(paths, delete=False)
    assert files(paths.root) == before, "a dry run removes nothing"
    arrays = [one for one in dry if isinstance(one, Garbage) and one.kind == "array"]
    assert [(one.path, one.reason) for one in arrays] == [
        (generation / name, "only replaced layer sets name it") for name in FREED
    ]
    for one in arrays:
        sizes = subprocess.run(["find", one.path, "-type", "f", "-printf", r"%s\n"], capture_output=True, text=True, check=True)
        assert one.bytes == sum(map(int, sizes.stdout.split()))
    assert gc(paths) == dry
    attributes = json.loads((generation / "zarr.json").read_text())["attributes"]
    assert (attributes["residual_ids"], attributes["freed"]) == ([8], [2, 4])
    inside = str(generation.relative_to(paths.root))
    gone = {f"views/{LAYERS.id}/{PARTITION}.json", *(n for n in before if n.startswith(tuple(f"{inside}/{f}/" for f in FREED)))}
    changed = f"{inside}/zarr.json"
    after = files(paths.root)
    assert {name: text for name, text in after.items() if name != changed} == {
        name: text for name, text in before.items() if name not in {*gone, changed}
    }
    assert gc(paths) == []
    assert problems(paths) == []
    assert [row.layer_set for row in lineage_rows(open_store(paths.root), Question(sample_id=f"{PARTITION}/0001"))] == [OTHER.id]


def test_zarr_and_tensorstore_open_what_remains(paths: StorePaths) -> None:
    made = two_layer_sets(paths)
    gc(paths)
    folder = generation_folder(paths, made)
    expected = np.concatenate([states[8] for states in made.states.values()])
    group = zarr.open_group(folder, mode="r")
    assert sorted(group.array_keys()) == ["final", "input_ids", "offsets"]
    assert np.array_equal(bits(np.asarray(group["final"][:])), bits(expected))
    read = ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/final/"}}, open=True).result()
    assert np.array_equal(bits(read.read().result()), bits(expected))


@pytest.mark.parametrize("cached", [True, False])
def test_a_reader_that_holds_the_store_open_gets_an_error_or_its_data(paths: StorePaths, cached: bool) -> None:
    made = two_layer_sets(paths)
    store = open_store(paths.root)
    view = store.layer_set(LAYERS.id)
    if cached:
        assert list(view[1].states) == [2, 4, 8]
    gc(paths)
    if not cached:
        open_generation.cache_clear()
    with pytest.raises(StoreError, match=r"was removed since the store was opened(.|\n)*open the store again"):
        view[1]
    manifest, entry = view.entries[1]
    kept = store.states(manifest, entry, [8])[8]
    assert np.array_equal(bits(kept), bits(made.states[entry.sample_id][8]))
    assert np.array_equal(store.ids_and_mask(manifest, entry)[0], made.input_ids[entry.sample_id])
    with pytest.raises(StoreError, match="no such states of this sample"):
        open_store(paths.root).read(entry.sample_id, [2])


def test_readers_while_it_happens(paths: StorePaths) -> None:
    made = two_layer_sets(paths)
    view, wrong, refused, done = open_store(paths.root).layer_set(LAYERS.id), list[str](), list[str](), threading.Event()

    def read() -> None:
        while not done.is_set():
            for (manifest, entry), i in itertools.product(view.entries, (2, 4)):
                try:
                    states = view.store.states(manifest, entry, [i])[i]
                except StoreError as error:
                    refused.append(error.problem)
                else:
                    if not np.array_equal(bits(states), bits(made.states[entry.sample_id][i])):
                        wrong.append(entry.sample_id)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    gc(paths)
    while len(refused) < 20:
        threading.Event().wait(0.01)
    done.set()
    for reader in readers:
        reader.join()
    assert wrong == []
    assert "the sample was removed since the store was opened" in refused


def test_what_is_gone_and_was_not_freed_is_damage(paths: StorePaths) -> None:
    made = two_layer_sets(paths)
    pattern = paths.root.with_name("pattern.zarr")
    shutil.copytree(paths.root, pattern)
    shutil.rmtree(generation_folder(paths, made) / "residual_004")
    assert any("a generation cannot be opened" in detail for detail in problems(paths))
    shutil.rmtree(paths.root)
    shutil.copytree(pattern, paths.root)
    gc(paths)
    shutil.rmtree(generation_folder(paths, made) / "final")
    assert any("a generation cannot be opened" in detail for detail in problems(paths))


def test_a_manifest_that_names_what_was_freed_is_a_problem(paths: StorePaths) -> None:
    """As after a restored backup of the manifests."""
    made = two_layer_sets(paths)
    path = paths.manifest(LAYERS.id, PARTITION)
    text = path.read_text()
    gc(paths)
    path.write_text(text)
    assert all("has no such residual id" in detail for detail in problems(paths))
    assert len(problems(paths)) == len(made.manifest.samples)


def test_young_arrays_that_no_manifest_ever_named_stay(paths: StorePaths) -> None:
    made = make_partition(paths, LENGTHS)
    path = paths.manifest(LAYERS.id, PARTITION)
    body = json.loads(path.read_text())
    for sample in body["samples"]:
        sample["parts"][0].update(residual_ids=[2, 8], norms=[1.0, 1.0])
    path.write_text(json.dumps(body))
    array = generation_folder(paths, made) / "residual_004"
    assert gc(paths, current=None) == [Kept(PARTITION, array, "no manifest names it, yet")]
    assert array.exists()
    (found,) = gc(paths, current=None, min_age=0.0)
    assert (found.path, found.reason, array.exists()) == (array, "no manifest names it", False)


def test_a_generation_whose_metadata_are_damaged_stays(paths: StorePaths) -> None:
    made = two_layer_sets(paths)
    folder = generation_folder(paths, made)
    (folder / "zarr.json").write_text("{")
    found = gc(paths)
    assert [one.where for one in found if isinstance(one, Kept)] == [folder]
    assert (folder / "residual_002").exists()


@pytest.mark.parametrize(("removal", "step"), [("gc", 1), ("remove", 4)])
def test_killed_before_any_of_its_changes(removal: str, step: int) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # where fsync takes no time
        command = [sys.executable, "-m", "hs_assets_tests.killed_removals", folder, removal, str(step)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 15


def test_a_layer_set_that_is_asked_for_again_captures_just_what_was_freed(
    home: Path, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    source, exported = write_rows(tmp_path / "rows.jsonl", 5), tmp_path / "exported"

    def project(layers: str) -> Project:
        top, server = f"layers = {layers}", "spool_bytes = 200_000_000"
        made = write_project(home, checkpoint("llama"), source, top=top, server=server)
        make_prompts(made)
        return made

    def captured(layers: str) -> tuple[list[int], Report]:
        with fake_server(project(layers)) as server:
            report = run(project(layers))
            assert report.problems == []
            return sorted(server.rows), report

    def command(*words: str) -> str:
        result = CliRunner().invoke(main, [*words, "--home", str(home)])
        assert result.exit_code == 0, result.output
        return result.stdout

    captured("[2, 4, 5]")
    store = open_store(home / "store.zarr")
    before = {sample.sample_id: sample.states for sample in store.layer_set("r2-4-5-8")}
    captured("[2, 5, 6]")
    command("export", "specforge", str(exported))
    files_before = files(exported)
    freed = json.loads(command("gc", "--old-layer-sets", "--delete", "--json"))
    assert freed["counts"] == {"manifest": 1, "array": 1}
    assert [Path(one["path"]).name for one in freed["garbage"]] == ["rows-00000.json", "residual_004"]
    assert json.loads(command("verify", "--json")) == {"samples": 5, "problems": []}
    command("export", "specforge", str(exported))
    assert files(exported) == files_before
    again = project("[2, 4, 5]")
    plan = compare(again, resolve(again), StorePaths(again.store_path), "rows-00000")
    assert {plan.missing(prompt.row) for prompt in plan.to_capture} == {(4,)}
    rows, report = captured("[2, 4, 5]")
    assert rows == list(range(5))
    assert report.intake
    (generation,) = report.intake.generations
    folder = again.store_path / "data" / resolve(again).spec.fingerprint / "rows-00000" / generation
    assert {path.name for path in folder.iterdir()} == {"zarr.json", "residual_004", "input_ids", "offsets"}
    open_generation.cache_clear()
    for sample in store.layer_set("r2-4-5-8"):
        assert all(np.array_equal(bits(sample.states[i]), bits(before[sample.sample_id][i])) for i in (2, 4, 5, 8))
    assert json.loads(command("verify", "--json")) == {"samples": 10, "problems": []}
