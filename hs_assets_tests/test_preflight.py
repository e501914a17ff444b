"""What an extraction would take is known, and refused where it cannot fit, before anything is asked for."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from hs_assets.cli import main
from hs_assets.config import Project, load_project
from hs_assets.errors import ExtractionError
from hs_assets.extraction.extract import capture_only, extract
from hs_assets.extraction.preflight import predict
from hs_assets.samples.conversations import Dropped
from hs_assets.samples.prompts import read_partition_table, table_path, write_partition
from hs_assets.serving.launch import resolve
from hs_assets.wire.spool import Spool
from hs_assets_tests.conftest import say, write_project
from hs_assets_tests.fake_server import fake_server
from hs_assets_tests.test_extract import make_prompts, run, write_rows

KEY = "rows-00000"


@pytest.fixture
def make(home: Path, checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[..., Project]:
    """A project of one partition of `count` rows with its prompts made."""

    def build(count: int, layers: str = "[2, 4]") -> Project:
        source = write_rows(tmp_path / "rows.jsonl", count)
        prompts, server = "rows_per_partition = 2000", "spool_bytes = 200_000_000\n"
        project = write_project(home, checkpoint("llama"), source, top=f"layers = {layers}", prompts=prompts, server=server)
        make_prompts(project)
        return project

    return build


def lengthen(project: Project, tokens: int) -> None:
    """Make every prompt of the first partition so long."""
    made = read_partition_table(project.home.prompts, KEY)
    rows = []
    for row in made.rows:
        assert not isinstance(row.content, Dropped)
        ids = np.resize(row.content.input_ids, tokens)
        mask = np.ones(tokens, row.content.loss_mask.dtype)
        rows.append(dataclasses.replace(row, content=dataclasses.replace(row.content, input_ids=ids, loss_mask=mask)))
    write_partition(dataclasses.replace(made, rows=tuple(rows)), project.home.prompts)


def with_free(monkeypatch: pytest.MonkeyPatch, **free: int) -> None:
    """Have disks say that so much is free: ``shm`` in /dev/shm, ``disk`` elsewhere."""
    real = shutil.disk_usage

    def usage(path: Path) -> object:
        name = "shm" if str(path).startswith("/dev/shm") else "disk"
        return SimpleNamespace(free=free[name]) if name in free else real(path)

    monkeypatch.setattr(shutil, "disk_usage", usage)


def test_300_prompts_of_64k_tokens_are_refused_before_the_first_request(
    make: Callable[..., Project],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    project = make(300, "[2, 4, 5]")
    lengthen(project, 65_536)
    with_free(monkeypatch, disk=10_000_000_000)
    target = resolve(project)
    with fake_server(project) as server:
        wide = dataclasses.replace(target, facts=dataclasses.replace(target.facts, hidden_size=2880))
        needed = 300 * 65_536 * 4 * 2880 * 2
        assert f"{needed:,}" == "452,984,832,000"
        with pytest.raises(ExtractionError, match=r"452,984,832,000 bytes for 300 samples(.|\n)*10,000,000,000 bytes free"):
            extract(project, wide, KEY, "run", say)
        assert server.rows == []
    need = predict(project, wide)
    assert (need.samples, need.tokens, need.store_bytes) == (300, 300 * 65_536, needed)
    assert any("452,984,832,000 bytes are needed, 10,000,000,000 are free" in problem for problem in need.problems)
    assert need.larger_than_spool == 300
    assert any("dumps are larger than the spool" in problem for problem in need.problems)


def test_what_is_predicted_is_what_is_written_and_nothing_is_left_afterwards(make: Callable[..., Project]) -> None:
    project = make(20)
    need = predict(project, resolve(project))
    with fake_server(project):
        report = run(project)
    assert report.intake
    assert (need.store_bytes, need.samples, need.problems) == (report.intake.stored_bytes, 20, [])
    arrays = [path for path in (project.store_path / "data").rglob("c/*/*") if path.is_file() and "input_ids" not in str(path)]
    assert sum(path.stat().st_size for path in arrays) > need.store_bytes
    after = predict(project, resolve(project))
    assert (after.partitions, after.samples, after.store_bytes, after.largest_dump_bytes) == (1, 0, 0, 0)


def test_the_command_prints_it_and_fails_where_it_does_not_fit(
    make: Callable[..., Project],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    project = make(20)
    table_path(project.home.prompts, KEY).unlink()
    words = ["plan", "--home", str(project.home.root)]
    estimated = json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)
    make_prompts(project)
    exact = json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)
    assert (estimated["estimated"], exact["estimated"], exact["problems"]) == (1, 0, [])
    assert exact["samples"] == estimated["samples"] == 20
    assert exact["tokens"] / 2 < estimated["tokens"] < exact["tokens"] * 4
    assert exact["layer_set"] == "r2-4-8"

    result = CliRunner().invoke(main, [*words, "rows-00009"])
    assert (result.exit_code, "no such partition" in result.output) == (1, True)
    result = CliRunner().invoke(main, [*words, KEY])
    assert result.exit_code == 0
    assert f"{exact['store_bytes']:,} bytes" in result.output

    with_free(monkeypatch, shm=60_000_000)  # what a container has that nobody asked more for
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 1
    assert "DOES NOT FIT the spool is too small" in result.output
    assert "docker run --shm-size" in result.output


def test_a_spool_too_small_is_said_before_anything_is_started(
    make: Callable[..., Project],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    project = make(4)
    with fake_server(project) as server:
        config = project.home.config.read_text().replace("spool_bytes = 200_000_000\n", "")
        project.home.config.write_text(config)
        with_free(monkeypatch, shm=64 << 20)
        with pytest.raises(Exception, match="docker run --shm-size"):
            run(load_project(project.home.root))
        assert server.rows == []


def test_dumps_that_stay_must_fit_beside_those_of_others(make: Callable[..., Project]) -> None:
    project = make(20)
    target = resolve(project)
    need = predict(project, target, [KEY], kept=True)
    with fake_server(project):
        report = capture_only(project, target, KEY, say)
    assert (report.problems, report.kept) == ([], 20)
    lying = sum(path.stat().st_size for path in Spool(project.spool_path).dumps.glob("*.safetensors"))
    assert (need.dump_bytes, need.problems) == (lying, [])
    after = predict(project, target, [KEY], kept=True)  # those that lie there are the ones that are needed
    assert (after.spool_left_bytes, after.problems) == (need.spool_left_bytes, [])
    for path in list(Spool(project.spool_path).dumps.iterdir()):  # somebody else's, as it were
        path.rename(path.with_name(path.name.replace(KEY, "other-00000")))
    text = project.home.config.read_text()
    project.home.config.write_text(text.replace("spool_bytes = 200_000_000", f"spool_bytes = {(64 << 20) + 1}"))
    narrow = load_project(project.home.root)
    wide = dataclasses.replace(target, facts=dataclasses.replace(target.facts, hidden_size=target.facts.hidden_size * 400))
    need = predict(narrow, wide, [KEY], kept=True)
    assert need.spool_left_bytes == (64 << 20) + 1 - lying
    assert [problem.partition(":")[0] for problem in need.problems] == ["the dumps cannot lie in the spool together"]
    assert f"{need.dump_bytes:,} bytes" in need.problems[0]


def test_what_differs_from_the_state_spec_that_is_stored_is_named(make: Callable[..., Project]) -> None:
    project = make(4)
    with fake_server(project):
        run(project)
    words = ["plan", "--home", str(project.home.root)]
    assert json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)["warnings"] == []
    config = project.home.config
    as_made = config.read_text()
    config.write_text(as_made.replace("layers = [2, 4]", "layers = [2, 5]"))
    assert json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)["warnings"] == []  # another layer set is none
    config.write_text(as_made.replace("[server]", '[server]\ndtype = "float32"\ntensor_parallel = 2'))
    result = CliRunner().invoke(main, words)
    assert (result.exit_code, "to capture   4 samples" in result.output) == (0, True)
    assert "WARNING      1 partitions are stored under another state spec" in result.output
    assert (
        "dtype: bfloat16 there, float32 now; flags: --dtype bfloat16, --tp-size 1 there, --dtype float32, --tp-size 2 now"
        in result.output
    )


def test_rows_that_changed_under_prompts_are_named(make: Callable[..., Project]) -> None:
    project = make(12)
    words, source = ["plan", "--home", str(project.home.root)], project.settings.prompts.sources[0].path
    assert json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)["warnings"] == []
    lines = source.read_bytes().splitlines(keepends=True)
    for rows in (lines[:10], [*lines[:11], lines[0]], [*lines, lines[3]]):  # fewer, another one, one more
        source.write_bytes(b"".join(rows))
        (warning,) = json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)["warnings"]
        assert warning == f"the source has other rows now than the prompts were made of: materialise prompts of {KEY}"
    source.write_bytes(b"".join(lines))
    assert json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)["warnings"] == []
