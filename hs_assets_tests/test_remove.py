"""Partitions and sources that are not wanted any more go whole, nothing else with them, and lineage remembers them."""

from __future__ import annotations

import fcntl
import json
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from hs_assets.cli import main
from hs_assets.store import open_store
from hs_assets.store.layout import StorePaths, create
from hs_assets.store.manifest import UnstoredRow
from hs_assets.store.verify import verify
from hs_assets.store.writer import GenerationWriter
from hs_assets_tests.store_material import FINGERPRINT, LAYERS, OTHER, SHAPE, make_partition, make_samples, widen

OLD = ["old-00000", "old-00001"]


@pytest.fixture
def paths(tmp_path: Path) -> StorePaths:
    """Two partitions of `old`, one of them in two layer sets, and one of `new`; prompts and answers of all."""
    paths = create(tmp_path / "store.zarr")
    dropped = UnstoredRow("old-00001/0002", 2, "f" * 64, "dropped", "too_long", "9000 tokens", 0)
    widen(paths, make_partition(paths, [5, 6], partition="old-00000"))
    make_partition(paths, [7, 8], partition="old-00001", unstored=(dropped,), seed=1)
    make_partition(paths, [9], partition="new-00000", seed=2)
    for key in (*OLD, "new-00000"):
        for name in (f"prompts/{key}.parquet", f"prompts/{key}.html", f"responses/{key}.parquet", f"responses/{key}.jsonl"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(name)
    return paths


def ask(paths: StorePaths, *words: str) -> Result:
    return CliRunner().invoke(main, [*words, "--home", str(paths.root.parent)])


def remove(paths: StorePaths, *words: str, code: int = 0) -> dict:
    result = ask(paths, "remove", "--json", *words)
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.parent.name != "locks"
    }


def without(before: dict[str, bytes], *keys: str, outside: bool = False) -> dict[str, bytes]:
    """What must be left once partitions are removed, `outside` the store too."""
    folders = () if outside else ("prompts/", "responses/")
    return {name: text for name, text in before.items() if name.startswith(folders) or not any(key in name for key in keys)}


def in_use(paths: StorePaths) -> dict[str, bytes]:
    """All files but what lineage remembers."""
    return {name: text for name, text in files(paths.root.parent).items() if not name.startswith("store.zarr/removed/")}


def test_a_source(paths: StorePaths) -> None:
    before = files(paths.root.parent)
    dry = remove(paths, "old")
    assert files(paths.root.parent) == before, "a dry run removes nothing"
    assert dry["counts"] == {"manifest": 3, "generation": 3, "masks": 2}
    data = [text for name, text in before.items() if "old" in name and name.startswith(("store.zarr/data/", "store.zarr/masks/"))]
    assert dry["bytes"] == sum(map(len, data))
    assert remove(paths, "old", "--delete") == dry | {"deleted": True}
    assert in_use(paths) == without(before, *OLD)
    assert [problem for one in verify(open_store(paths.root), 1) for problem in one.problems] == []
    assert [row[1].sample_id for row in open_store(paths.root).layer_set(LAYERS.id).entries] == ["new-00000/0000"]
    gone = ask(paths, "remove", "old")
    assert (gone.exit_code, "one of the sources ['new']" in gone.output) == (1, True)


def test_lineage_remembers(paths: StorePaths, tmp_path: Path) -> None:
    known = json.loads(ask(paths, "lineage", "old-00001/0001", "--json").stdout)
    remove(paths, "old", "--delete")
    (line,) = ask(paths, "lineage", "old-00001/0001", "--json").stdout.splitlines()
    row = json.loads(line)
    assert (row["outcome"], row["reason"], row["token_sha256"]) == ("removed", "removed", known["token_sha256"])
    assert (row["source_sha256"], row["run_ids"]) == (known["source_sha256"], [known["parts"][0]["run_id"]])
    today = time.strftime("%Y-%m-%d", time.gmtime())
    assert row["detail"].startswith(f"with its partition, {today}")
    assert "before: stored" in row["detail"]
    both = ask(paths, "lineage", "old-00000/0000").stdout
    assert [text.split("  ")[1:3] for text in both.splitlines()] == [[LAYERS.id, "removed"], [OTHER.id, "removed"]]
    dropped = ask(paths, "lineage", "old-00001/0002").stdout
    assert "before: dropped, too_long: 9000 tokens" in dropped
    assert ask(paths, "lineage", "--parquet", str(tmp_path / "lineage.parquet")).exit_code == 0
    table = pq.read_table(tmp_path / "lineage.parquet")
    outcomes = {(row["sample_id"], row["layer_set"]): row["outcome"] for row in table.to_pylist()}
    assert len(outcomes) == table.num_rows == 8
    assert [key for key, outcome in outcomes.items() if outcome == "stored"] == [("new-00000/0000", LAYERS.id)]
    make_partition(paths, [5, 6], partition="old-00000")
    (again,) = ask(paths, "lineage", "old-00000/0000", "--json").stdout.splitlines()
    assert json.loads(again)["layer_set"] == LAYERS.id
    rows = [json.loads(line) for line in ask(paths, "lineage", "--partition", "old-00000", "--json").stdout.splitlines()]
    assert [(one["layer_set"], one["outcome"]) for one in rows] == [(LAYERS.id, "stored")] * 2 + [(OTHER.id, "removed")] * 2


def test_prompts_and_answers_go_if_asked(paths: StorePaths) -> None:
    before = files(paths.root.parent)
    counts = remove(paths, "old-00001", "--prompts", "--delete")["counts"]
    assert counts == {"manifest": 1, "generation": 1, "masks": 1, "prompts": 2, "responses": 2}
    assert in_use(paths) == without(before, "old-00001", outside=True)
    (paths.root.parent / "prompts" / "young-00000.parquet").write_text("prompts alone")
    assert ask(paths, "remove", "young-00000").exit_code == 1
    assert remove(paths, "young-00000", "--prompts", "--delete")["counts"] == {"prompts": 1}


@pytest.mark.parametrize("lock", ["old-00000.lock", "old-00000.responses.lock"])
def test_a_partition_with_a_run_stays_whole(paths: StorePaths, lock: str) -> None:
    before, locks = files(paths.root.parent), paths.root.parent / "locks"
    locks.mkdir()
    with (locks / lock).open("w") as run:
        fcntl.flock(run, fcntl.LOCK_EX)
        said = remove(paths, "old", "--prompts", "--delete", code=1)
    assert [(one["partition"], one["reason"]) for one in said["kept"]] == [("old-00000", "a run is at work on it")]
    assert in_use(paths) == without(before, "old-00001", outside=True)


def test_what_a_run_elsewhere_may_be_about_to_name_stays(paths: StorePaths) -> None:
    writer = GenerationWriter(paths, FINGERPRINT, "old-00000", LAYERS.residual_ids, LAYERS.final, SHAPE)
    for sample_id, ids in (made := make_samples([5])).input_ids.items():
        writer.append(ids, made.states[sample_id])
    folder = paths.generation(FINGERPRINT, "old-00000", writer.publish())
    said = remove(paths, "old-00000", "--delete", code=1)
    assert [(one["where"], one["reason"]) for one in said["kept"]] == [(str(folder), "no manifest names it, yet")]
    assert list(folder.parent.iterdir()) == [folder]
    assert remove(paths, "old-00000", "--delete", "--min-age", "0")["counts"] == {"generation": 1}


def test_a_partition_whose_manifest_is_damaged(paths: StorePaths) -> None:
    path = paths.manifest(LAYERS.id, "old-00001")
    path.write_text(path.read_text()[:-30])
    said = remove(paths, "old-00001", "--delete", "--min-age", "0")
    (manifest,) = [one for one in said["garbage"] if one["kind"] == "manifest"]
    assert manifest["reason"] == "lineage cannot keep what it says: a manifest cannot be read"
    assert not [name for name in files(paths.root) if "old-00001" in name]
    assert ask(paths, "lineage", "--source", "demo", "--json").exit_code == 0


def test_names_are_not_guessed(paths: StorePaths) -> None:
    make_partition(paths, [5], partition="old-00000-00000")
    before = files(paths.root.parent)
    for name, said in (
        ("ol", "nothing is stored of such"),
        ("old-00000", "have the same name"),
        ("old-0000", "nothing is stored"),
    ):
        result = ask(paths, "remove", "--delete", "new", name)
        assert (result.exit_code, said in result.output) == (1, True), result.output
    assert files(paths.root.parent) == before
    assert remove(paths, "new", "new-00000")["counts"] == {"manifest": 1, "generation": 1, "masks": 1}


def test_what_people_read(paths: StorePaths) -> None:
    printed = ask(paths, "remove", "new").stdout.splitlines()
    assert printed[0] == f"new-00000: views/{LAYERS.id}/new-00000.json: lineage keeps what it says (0 bytes)"
    assert printed[-1].startswith("3 files and folders (manifest 1, generation 1, masks 1), ")
    assert printed[-1].endswith(" could go (--delete removes it); 0 kept")
