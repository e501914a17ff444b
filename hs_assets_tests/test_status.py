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
