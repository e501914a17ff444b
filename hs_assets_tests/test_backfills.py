"""Backfills through Dagster's own daemon code: one run a partition, failures that stay alone, and redoing only those."""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import dagster as dg
import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from dagster._core.execution.backfill import BulkActionStatus, PartitionBackfill
from dagster._core.test_utils import create_test_daemon_workspace_context
from dagster._core.workspace.load_target import PythonFileTarget
from dagster._daemon.backfill import execute_backfill_iteration

from hs_assets.cli import main
from hs_assets.config import Project, load_project
from hs_assets.defs import retry
from hs_assets.defs.build import build_definitions
from hs_assets.defs.project import ProjectResource
from hs_assets.defs.recorded import RAW_DUMPS, SAMPLES
from hs_assets.errors import ExtractionError
from hs_assets.extraction import preflight
from hs_assets.extraction.backfill_room import Wanted, require_room
from hs_assets.serving.launch import resolve
from hs_assets.serving.state import FAILED, ServerFolder
from hs_assets.store import open_store
from hs_assets.wire.rid import Rid
from hs_assets_tests.broken_sglang import BrokenSglang
from hs_assets_tests.conftest import say, write_project
from hs_assets_tests.fake_server import fake_server
from hs_assets_tests.test_extract import make_prompts, write_rows

PROMPTS = dg.AssetKey("prompts")
KEYS = [f"rows-{number:05d}" for number in range(3)]
_IN_PROCESS = {
    "telemetry": {"enabled": False},
    "code_servers": {"wait_for_local_processes_on_shutdown": True},
    "run_launcher": {"module": "dagster._core.launcher.sync_in_memory_run_launcher", "class": "SyncInMemoryRunLauncher"},
    "run_coordinator": {"module": "dagster._core.run_coordinator", "class": "DefaultRunCoordinator"},
}


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    folder = tmp_path / "dagster"
    folder.mkdir()
    with dg.DagsterInstance.local_temp(str(folder), overrides=_IN_PROCESS) as made:
        yield made


@pytest.fixture
def project(home: Path, checkpoint: Callable[[str], Path], tmp_path: Path) -> Project:
    source = write_rows(tmp_path / "rows.jsonl", 6)
    prompts, server = "rows_per_partition = 2", "spool_bytes = 200_000_000"
    rules = "max_rejected_share = 0.5"
    return write_project(home, checkpoint("llama"), source, top="layers = [2, 4]", prompts=prompts, server=server, rules=rules)


def backfill(project: Project, instance: dg.DagsterInstance, name: str, keys: list[str], folder: Path) -> list[dg.DagsterRun]:
    """Have the daemon's code run a backfill to its end; its runs."""
    code = folder / "definitions.py"
    code.write_text(
        "from hs_assets.config import load_project\nfrom hs_assets.defs.build import build_definitions\n"
        f"defs = build_definitions(load_project({str(project.home.root)!r}))\n"
    )
    made = PartitionBackfill.from_asset_partitions(
        backfill_id=name,
        asset_graph=build_definitions(project).resolve_asset_graph(),
        partition_names=keys,
        asset_selection=[PROMPTS, RAW_DUMPS, SAMPLES],
        backfill_timestamp=1.0,
        tags={},
        dynamic_partitions_store=instance,
        all_partitions=False,
        title=None,
        description=None,
        run_config=None,
    )
    instance.add_backfill(made)
    target = PythonFileTarget(python_file=str(code), attribute=None, working_directory=str(folder), location_name="code")
    with create_test_daemon_workspace_context(target, instance) as workspace:
        for _ in range(10):
            assert not any(execute_backfill_iteration(workspace, logging.getLogger("backfill")))
            found = instance.get_backfill(name)
            assert found
            if found.status != BulkActionStatus.REQUESTED:
                break
    gc.collect()  # what Dagster left open is complained of here, not in another test
    return list(instance.get_runs(dg.RunsFilter(tags={"dagster/backfill": name})))


def failed_and_missing(project: Project, instance: dg.DagsterInstance) -> list[str]:
    """What the UI selects when a user launches "failed and missing"."""
    partitions = build_definitions(project).resolve_asset_graph().get(SAMPLES).partitions_def
    statuses = instance.get_status_by_partition(SAMPLES, KEYS, partitions) or {}
    return [key for key in KEYS if getattr(statuses.get(key), "name", None) != "MATERIALIZED"]


def summary(project: Project, instance: dg.DagsterInstance, name: str) -> str:
    """What the sensor writes of a backfill; evaluated twice, as a daemon would."""
    repository = build_definitions(project).get_repository_def()
    project_resource = ProjectResource(home=str(project.home.root), config=project.origin)
    for _ in range(2):
        context = dg.build_sensor_context(instance=instance, repository_def=repository, resources={"project": project_resource})
        with context:
            data = repository.get_sensor_def("backfill_summary").evaluate_tick(context)
        assert not data.run_requests
    assert data.skip_message == "every finished backfill has its page"
    return (project.home.reports / f"backfill-{name}.md").read_text()


@pytest.mark.filterwarnings("ignore:.*AssetSelection.sources:DeprecationWarning")  # Dagster's own, in making a backfill
@pytest.mark.filterwarnings("ignore:.*shutdown_asyncgens:RuntimeWarning")  # and in ending the process that has the definitions
def test_a_failed_partition_leaves_the_others_alone_and_is_redone_alone(
    project: Project, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    def nan(rid: Rid, states: np.ndarray) -> np.ndarray:
        return states * np.nan if (rid.partition, rid.row) == (KEYS[1], 1) else states

    with fake_server(project, nan) as server:
        build_definitions(project).resolve_job_def("record_layer_set").execute_in_process(instance=instance)
        runs = backfill(project, instance, "first", KEYS, tmp_path)
        outcomes = {run.tags["dagster/partition"]: run.status for run in runs}
        assert len(runs) == 3
        assert outcomes == {
            KEYS[0]: dg.DagsterRunStatus.SUCCESS,
            KEYS[1]: dg.DagsterRunStatus.FAILURE,
            KEYS[2]: dg.DagsterRunStatus.SUCCESS,
        }
        found = instance.get_backfill("first")
        assert found
        assert found.status == BulkActionStatus.COMPLETED_FAILED
        assert failed_and_missing(project, instance) == [KEYS[1]]
        page = summary(project, instance, "first")
        assert "- partitions: 3, of which 1 are not made" in page
        assert "- rows: 6 = 5 stored + 0 dropped + 1 failed + 0 pending" in page
        (failed,) = [run for run in runs if run.status == dg.DagsterRunStatus.FAILURE]
        assert f"| {KEYS[1]} | {failed.run_id} | finite 1 |" in page
        assert sorted(server.rows) == [0, 0, 0, 1, 1, 1]

        server.rows.clear()  # the row fails the same rule again: it is rejected, and the partition is complete
        (run,) = backfill(project, instance, "second", failed_and_missing(project, instance), tmp_path)
        assert (run.status, run.tags["dagster/partition"]) == (dg.DagsterRunStatus.SUCCESS, KEYS[1])
        assert server.rows == [1]
    assert failed_and_missing(project, instance) == []
    config = project.home.config  # a page is on what was made, also where another layer set is configured by then
    config.write_text(config.read_text().replace("layers = [2, 4]", "layers = [2, 5]"))
    page = summary(project, instance, "second")
    assert "- rows: 2 = 1 stored + 1 dropped + 0 failed + 0 pending" in page
    assert "of layer set r2-4-8" in page
    assert "- partitions: 1, of which 0 are not made" in page
    assert "| rejected(finite) | 1 |" in page
    assert "1 are not made" in (project.home.reports / "backfill-first.md").read_text()  # as it was then
    ledgers = {m.partition: m.ledger.as_json() for m in open_store(project.store_path).manifests("r2-4-8")}
    whole = {"in": 2, "stored": 2, "dropped": {}, "failed": {}}
    assert ledgers == {
        KEYS[0]: whole,
        KEYS[1]: {"in": 2, "stored": 1, "dropped": {"rejected(finite)": 1}, "failed": {}},
        KEYS[2]: whole,
    }


@pytest.mark.filterwarnings("ignore:.*AssetSelection.sources:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*shutdown_asyncgens:RuntimeWarning")
def test_a_server_that_cannot_start_is_tried_once_and_is_the_reason_in_the_page_and_the_status(
    project: Project, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    sglang = BrokenSglang.make(tmp_path)
    config = project.home.config
    config.write_text(config.read_text().replace("[server]", f'[server]\npython = "{sglang.python}"'))
    project = load_project(project.home.root)

    def shown() -> tuple[int, dict[str, str | None], str]:
        words = ["status", "--home", str(project.home.root)]
        as_json, table = CliRunner().invoke(main, [*words, "--json"]), CliRunner().invoke(main, words)
        found = {one["partition"]: one["last_failure"] for one in json.loads(as_json.stdout)["partitions"]}
        assert as_json.exit_code == table.exit_code
        return table.exit_code, {key: failure and failure["error"] for key, failure in found.items()}, table.stdout

    build_definitions(project).resolve_job_def("record_layer_set").execute_in_process(instance=instance)
    runs = backfill(project, instance, "night", KEYS[:2], tmp_path)
    assert [run.status for run in runs] == [dg.DagsterRunStatus.FAILURE] * 2
    assert len(sglang.pids) == 1
    by_key = {run.tags["dagster/partition"]: run for run in runs}
    page = summary(project, instance, "night")
    code, errors, printed = shown()
    for key, run in by_key.items():
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {key} | {run.run_id} | none | 20")]
        error = errors[key]
        assert error
        assert line.endswith(f": {error} |"), "page and status say different things"
        assert error.startswith("ServerStartError: the server did not come up")
        assert "(got: SGLang ended while it started)" in error
        assert f"the last run of {key} failed" in printed
        assert f"run {run.run_id}: ServerStartError" in printed
    assert (code, errors[KEYS[2]]) == (1, None)
    assert sum("nothing was tried again" in str(error) for error in errors.values()) == 1

    assert {path.stat().st_mode & 0o777 for path in project.home.locks.glob("*.failed.json")} == {0o600}
    job = build_definitions(project).resolve_job_def("reextract")
    with fake_server(project):
        assert all(job.execute_in_process(instance=instance, partition_key=key).success for key in KEYS[:2])
    code, errors, printed = shown()
    assert (code, set(errors.values()), "the last run" in printed) == (0, {None}, False)


@pytest.mark.filterwarnings("ignore:.*AssetSelection.sources:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*shutdown_asyncgens:RuntimeWarning")
def test_a_backfill_that_cannot_fit_is_refused_before_the_first_request_though_each_partition_would(
    project: Project, instance: dg.DagsterInstance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_prompts(project)
    tokens = [sum(map(len, pq.read_table(project.home.prompts / f"{key}.parquet")["input_ids"].to_pylist())) for key in KEYS]
    hidden = json.loads((project.settings.model.path / "config.json").read_text())["hidden_size"]
    needed = [count * 3 * hidden * 2 for count in tokens]  # two layers and the final state, in bf16
    free = sum(needed) - 1
    assert max(needed) < free / 2
    real = shutil.disk_usage

    def usage(path: Path) -> object:
        return real(path) if str(path).startswith("/dev/shm") else SimpleNamespace(free=free)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with fake_server(project) as server:
        build_definitions(project).resolve_job_def("record_layer_set").execute_in_process(instance=instance)
        runs = backfill(project, instance, "too-large", KEYS, tmp_path)
        assert [run.status for run in runs] == [dg.DagsterRunStatus.FAILURE] * 3
        assert server.rows == []
        said = [
            str(entry.dagster_event.step_failure_data)
            for run in runs
            for entry in instance.all_logs(run.run_id)
            if entry.is_dagster_event and entry.dagster_event.is_step_failure
        ]
        assert len(said) == 3
        assert all(f"{sum(needed):,} bytes are needed, {free:,} are free" in one for one in said)

        (run,) = backfill(project, instance, "one-of-them", KEYS[:1], tmp_path)
        assert (run.status, sorted(server.rows)) == (dg.DagsterRunStatus.SUCCESS, [0, 1])
        free = needed[1] + needed[2]  # that one is stored: the other two need no more than this
        runs = backfill(project, instance, "the-rest", KEYS, tmp_path)
        assert [run.status for run in runs] == [dg.DagsterRunStatus.SUCCESS] * 3
        assert sorted(server.rows) == [0, 0, 0, 1, 1, 1]


def test_room_that_is_made_is_enough_and_what_fits_is_looked_at_once(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    make_prompts(project)
    target, looked = resolve(project), list[str]()
    free = 1

    def wanted() -> Wanted:
        looked.append("once")
        return Wanted(KEYS, kept=False)

    monkeypatch.setattr(preflight, "free_bytes", lambda _root: free)
    for _ in range(2):
        with pytest.raises(ExtractionError, match=r"cannot fit(.|\n)*3 partitions(.|\n)*1 are free"):
            require_room(project, target, "b", wanted, say)
    free = 1 << 40
    require_room(project, target, "b", wanted, say)
    free = 1  # it was begun: from now on each partition looks after itself
    require_room(project, target, "b", wanted, say)
    assert looked == ["once"]


@pytest.mark.parametrize("left", ["", '{"partitions": 3, "samp', '{"of": "another version"}', "[]"])
def test_half_of_a_need_is_looked_at_anew(project: Project, left: str) -> None:
    make_prompts(project)
    path = project.home.reports / "backfill-b.need.json"
    path.parent.mkdir()
    path.write_text(left)
    require_room(project, resolve(project), "b", lambda: Wanted(KEYS, kept=False), say)
    assert json.loads(path.read_text())["partitions"] == 3


def test_dumps_of_others_leave_no_room_however_often_it_is_asked(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    make_prompts(project)
    monkeypatch.setattr(preflight, "_bytes_of_others", lambda _project, keys: 200_000_000 if keys else 0)
    for _ in range(2):
        with pytest.raises(ExtractionError, match=r"there are 0 left"):
            require_room(project, resolve(project), "b", lambda: Wanted(KEYS, kept=True), say)


def test_every_partition_has_a_run_of_its_own(project: Project) -> None:
    """A backfill policy, even of one partition a run, would put ranges of partitions into a run."""
    graph = build_definitions(project).resolve_asset_graph()
    partitioned = [graph.get(key) for key in graph.get_all_asset_keys() if graph.get(key).is_partitioned]
    assert {node.key for node in partitioned} >= {PROMPTS, RAW_DUMPS, SAMPLES}
    assert [node.key for node in partitioned if node.backfill_policy is not None] == []


@pytest.mark.parametrize("restarts", [True, False])
def test_a_server_that_died_is_worth_another_try_at_once(
    project: Project, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    monkeypatch.setattr(retry, "SECONDS_TO_WAIT", 3)
    folder, died = ServerFolder(project.home.server), threading.Event()
    restarted: list[threading.Timer] = []
    make_prompts(project)

    def dies(rid: Rid, states: np.ndarray) -> np.ndarray:
        state = folder.read_state()
        if rid.row == 1 and state is not None and not (died.is_set() and restarts):
            died.set()
            dataclasses.replace(state, phase=FAILED).write(folder.state)
            restarted.append(threading.Timer(1.5, lambda: state.write(folder.state)))  # somebody starts it again
            restarted[-1].start()
            raise ConnectionAbortedError
        return states

    with fake_server(project, dies) as server:
        defs = build_definitions(project)
        defs.resolve_job_def("record_layer_set").execute_in_process(instance=instance)
        job = defs.resolve_job_def("reextract")
        result = job.execute_in_process(instance=instance, partition_key=KEYS[0], raise_on_error=False)
        for timer in restarted:  # one that came later would say that this very process is a server, which is stopped then
            timer.join()
        retried = len([event for event in result.all_events if event.is_step_up_for_retry])
        assert (result.success, retried) == ((True, 1) if restarts else (False, 2))
        assert server.rows.count(0) == 1
    (manifest,) = open_store(project.store_path).manifests("r2-4-8")
    assert manifest.ledger.failed == ({} if restarts else {"server_died": 1})


def test_bad_data_is_not_tried_again_by_itself(project: Project, instance: dg.DagsterInstance) -> None:
    make_prompts(project)
    with fake_server(project, lambda _rid, states: states * np.nan) as server:
        defs = build_definitions(project)
        defs.resolve_job_def("record_layer_set").execute_in_process(instance=instance)
        job = defs.resolve_job_def("reextract")
        result = job.execute_in_process(instance=instance, partition_key=KEYS[0], raise_on_error=False)
        assert (result.success, sorted(server.rows)) == (False, [0, 1])
