"""The ledger of every partition, as people and programs ask for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from hs_assets.cli import main
from hs_assets.config import Project, load_project
from hs_assets.errors import PromptError, StoreError
from hs_assets.extraction.backfill_summary import FinishedBackfill, summarize
from hs_assets.extraction.status import status
from hs_assets.samples.prompts import find_counts, table_path
from hs_assets.wire.rid import Rid
from hs_assets_tests.conftest import write_project
from hs_assets_tests.fake_server import fake_server, healthy
from hs_assets_tests.test_extract import make_prompts, run, write_rows

KEY = "rows-00000"


@pytest.fixture
def project(home: Path, checkpoint: Callable[[str], Path], tmp_path: Path) -> Project:
    source = write_rows(tmp_path / "rows.jsonl", 6)
    with source.open("a") as file:
        file.write('{"messages": [{"role": "user", "content": "and then?"}]}\n')
    made = write_project(home, checkpoint("llama"), source, top="layers = [2, 4]", server="spool_bytes = 200_000_000")
    make_prompts(made)
    return made


def asked(project: Project, *words: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["status", "--home", str(project.home.root), *words])
    return result.exit_code, result.output


def test_a_partition_from_its_prompts_to_its_samples(project: Project) -> None:
    (prepared,) = status(project)
    assert (prepared.state, prepared.rows, prepared.pending, prepared.dropped) == ("prepared", 7, 6, {"no_assistant_turn": 1})
    with fake_server(project):
        run(project)
    code, printed = asked(project, "--json")
    (one,) = json.loads(printed)["partitions"]
    lengths = [len(ids) for ids in pq.read_table(table_path(project.home.prompts, KEY))["input_ids"].to_pylist() if ids]
    assert (code, one["in"], one["stored"], one["dropped"], one["failed"]) == (0, 7, 6, {"no_assistant_turn": 1}, {})
    assert one["tokens"] == sum(lengths)
    states = [path for path in (project.store_path / "data").rglob("c/*/*") if path.is_file() and "input_ids" not in str(path)]
    width = 2 * json.loads((project.settings.model.path / "config.json").read_text())["hidden_size"]
    assert one["bytes"] == 3 * sum(lengths) * width <= sum(path.stat().st_size for path in states)


def test_counts_of_prompts_are_those_of_the_table_also_where_it_does_not_say_them(project: Project) -> None:
    path = table_path(project.home.prompts, KEY)
    table = pq.read_table(path)
    dropped = [reason for reason in table["dropped"].to_pylist() if reason]
    found = find_counts(project.home.prompts, KEY)
    assert found
    assert (found.prompts, found.dropped) == (table.num_rows - len(dropped), {"no_assistant_turn": len(dropped)})
    assert found.source_rows == len(set(table["source_row"].to_pylist()))
    metadata = {name: value for name, value in table.schema.metadata.items() if name != b"counts"}
    pq.write_table(table.replace_schema_metadata(metadata), path)
    assert find_counts(project.home.prompts, KEY) == found
    assert find_counts(project.home.prompts, "rows-00001") is None


def test_a_layer_set_that_nobody_knows_is_an_error_that_names_the_known_ones(project: Project) -> None:
    with fake_server(project):
        run(project)
    config = project.home.config
    config.write_text(config.read_text().replace("layers = [2, 4]", "layers = [2, 5]"))
    assert asked(project, "--layer-set", "r2-4-8")[0] == 0
    assert asked(project, "--layer-set", "r2-5-8")[0] == 0
    changed = load_project(project.home.root)
    assert [(one.state, one.pending) for one in (*status(changed), *status(changed, "r2-4-8"))] == [("stale", 6), ("complete", 0)]
    code, printed = asked(project, "--layer-set", "r1-8")
    assert (code, "expected: r2-4-8 or r2-5-8" in printed, "got: r1-8" in printed) == (1, True, True)
    with pytest.raises(StoreError, match="no such layer set"):
        status(project, "r-eagle")


def test_a_row_that_failed_and_one_that_is_not_explained_fail_the_command(project: Project) -> None:
    def nan(rid: Rid, states: np.ndarray) -> np.ndarray:
        return states * np.nan if rid.row == 2 else states

    with fake_server(project, nan) as server:
        run(project)
        code, printed = asked(project, "--json")
        (one,) = json.loads(printed)["partitions"]
        assert (code, one["state"], one["failed"], one["stored"]) == (1, "incomplete", {"finite": 1}, 5)
        server.fault = healthy
        assert run(project).problems == []
    assert asked(project)[0] == 0
    with project.settings.prompts.sources[0].path.open("a") as file:
        file.write('{"messages": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1!"}]}\n')
    code, printed = asked(project, "--json")
    (one,) = json.loads(printed)["partitions"]
    assert (code, one["state"], one["in"], one["pending"]) == (1, "incomplete", 8, 1)


def test_the_demo_fails_where_a_row_does(project: Project) -> None:
    with fake_server(project, lambda rid, states: states * np.nan if rid.row == 2 else states) as server:
        result = CliRunner().invoke(main, ["demo", "--home", str(project.home.root)])
        assert (result.exit_code, "NOT COMPLETE" in result.stderr, "finite" in result.stderr) == (1, True, True)
        server.fault = healthy
        result = CliRunner().invoke(main, ["demo", "--home", str(project.home.root)])
        assert (result.exit_code, "NOT COMPLETE" in result.stderr) == (0, False)


def test_a_partition_of_a_source_that_is_gone_is_named(project: Project) -> None:
    config = project.home.config
    config.write_text(config.read_text() + 'name = "other"\n')
    with pytest.raises(PromptError, match=r"not configured(.|\n)*where: rows-00000(.|\n)*expected: \['other'\]"):
        run(load_project(project.home.root))


def test_what_the_system_says_of_a_file_is_shown_without_a_traceback(project: Project, tmp_path: Path) -> None:
    with fake_server(project):
        run(project)
    path = tmp_path / "nowhere" / "lineage.parquet"
    result = CliRunner().invoke(main, ["lineage", "--parquet", str(path), "--home", str(project.home.root)])
    assert (result.exit_code, result.output.startswith("Error: "), str(path.parent) in result.output) == (1, True, True)


@pytest.fixture
def two(home: Path, checkpoint: Callable[[str], Path], tmp_path: Path) -> Project:
    """Two partitions of four rows, both stored."""
    source = write_rows(tmp_path / "rows.jsonl", 8)
    settings = {"top": "layers = [2, 4]", "server": "spool_bytes = 200_000_000", "prompts": "rows_per_partition = 4"}
    made = write_project(home, checkpoint("llama"), source, **settings)
    make_prompts(made)
    with fake_server(made):
        for key in ("rows-00000", "rows-00001"):
            assert run(made, key).problems == []
    return made


def test_a_damaged_partition_is_named_and_all_others_are_shown(two: Project) -> None:
    whole = json.loads(asked(two, "--json")[1])
    assert whole["states"] == {"complete": 2}
    path = two.store_path / "views" / "r2-4-8" / "rows-00000.json"
    text = path.read_bytes()
    path.write_bytes(text[:-20])
    code, printed = asked(two, "--json")
    damaged, other = json.loads(printed)["partitions"]
    assert (code, other, json.loads(printed)["states"]) == (1, whole["partitions"][1], {"damaged": 1, "complete": 1})
    assert (damaged["partition"], damaged["state"], damaged["in"], damaged["pending"]) == ("rows-00000", "damaged", 4, 4)
    assert "a manifest cannot be read" in damaged["problem"]
    assert str(path) in damaged["problem"]
    code, printed = asked(two)
    assert code == 1
    assert "a manifest cannot be read" in next(line for line in printed.splitlines() if "rows-00000" in line)
    assert "1 damaged" in next(line for line in printed.splitlines() if "2 partitions" in line)
    plan = CliRunner().invoke(main, ["plan", "--home", str(two.home.root), "--json"])
    need = json.loads(plan.stdout)
    assert (plan.exit_code, need["partitions"], need["samples"], list(need["damaged"])) == (1, 2, 0, ["rows-00000"])
    assert "DAMAGED rows-00000" in CliRunner().invoke(main, ["plan", "--home", str(two.home.root)]).stdout
    backfill = FinishedBackfill("b", "failed", "then", 1.0, ["rows-00000", "rows-00001"], frozenset({"rows-00001"}), {}, {})
    page = summarize(backfill, status(two))
    assert "rows: 8 = 4 stored + 0 dropped + 0 failed + 4 pending" in page
    assert "| rows-00000 | a manifest cannot be read" in page
    path.write_bytes(text)
    assert json.loads(asked(two, "--json")[1]) == whole
    table_path(two.home.prompts, "rows-00001").write_bytes(b"no table")
    path.with_name("rows-00001.json").unlink()
    code, printed = asked(two, "--json")
    assert (code, [one["state"] for one in json.loads(printed)["partitions"]]) == (1, ["complete", "damaged"])


def test_stored_partitions_of_sources_that_are_not_configured(two: Project, tmp_path: Path) -> None:
    before = json.loads(asked(two, "--json")[1])["partitions"]
    write_rows(tmp_path / "others.jsonl", 3)
    config = two.home.config
    text = config.read_text()
    config.write_text(text.replace("rows.jsonl", "others.jsonl"))
    code, printed = asked(two, "--json")
    found = json.loads(printed)
    assert (code, found["states"]) == (0, {"new": 1, "not configured": 2})
    assert [one["partition"] for one in found["partitions"]] == ["others-00000", "rows-00000", "rows-00001"]
    assert found["partitions"][1:] == [one | {"state": "not configured"} for one in before]
    assert "2 not configured" in asked(two)[1]
    config.write_text(text.replace("rows.jsonl", "others.jsonl").replace("layers = [2, 4]", "layers = [5]"))
    stored_elsewhere = json.loads(asked(two, "--json")[1])["partitions"][1:]
    assert stored_elsewhere == found["partitions"][1:]
    assert "in layer set r2-4-8" in asked(two)[1]
    removed = CliRunner().invoke(main, ["remove", "rows", "--delete", "--home", str(two.home.root)])
    assert removed.exit_code == 0, removed.output
    assert json.loads(asked(two, "--json")[1])["states"] == {"new": 1}
    config.write_text(text)
    assert [(one.state, one.pending) for one in status(load_project(two.home.root))] == [("prepared", 4)] * 2
    with fake_server(two) as server:
        assert run(two, "rows-00001").problems == []
        assert sorted(server.rows) == list(range(4))
    assert [one.state for one in status(load_project(two.home.root))] == ["prepared", "complete"]
