"""What the pages ask for by GraphQL, and what the daemon's own code makes of it, counted from the instance."""

from __future__ import annotations

import datetime
import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pytest
from dagster._core.test_utils import create_test_daemon_workspace_context, freeze_time
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import PythonFileTarget
from dagster._daemon.backfill import execute_backfill_iteration
from dagster._scheduler.scheduler import launch_scheduled_runs
from dagster_graphql.test.utils import execute_dagster_graphql

from hs_assets.config import Project, load_project
from hs_assets.defs.layer_set import recorded
from hs_assets.defs.recorded import SAMPLES
from hs_assets.defs.reextract import REEXTRACT_STALE, TARGET_TAG
from hs_assets.wire.rid import Rid
from hs_assets_tests.conftest import write_project
from hs_assets_tests.fake_server import fake_server, healthy
from hs_assets_tests.test_backfills import instance
from hs_assets_tests.test_extract import write_rows

KEYS = [f"rows-{number:05d}" for number in range(6)]
FAILING = [KEYS[1], KEYS[4]]
CHECKS = [dg.AssetCheckKey(SAMPLES, name) for name in ("drop_share", "ledger", "rules", "spec_current", "store")]
REPOSITORY = {"repositoryLocationName": "code", "repositoryName": "__repository__"}

_STATUSES = """query ($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key) { ... on AssetNode {
    assetPartitionStatuses { ... on DefaultPartitionStatuses {
        materializedPartitions failedPartitions unmaterializedPartitions materializingPartitions } } } } }"""
_STALE = """query ($key: AssetKeyInput!, $partition: String!) { assetNodeOrError(assetKey: $key) { ... on AssetNode {
    staleStatus(partition: $partition) } } }"""
_BACKFILL = """mutation ($params: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $params) {
    __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message } } }"""
_RUN = """mutation ($params: ExecutionParams!) { launchPipelineExecution(executionParams: $params) {
    __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }"""
_START = """mutation ($schedule: ScheduleSelector!) { startSchedule(scheduleSelector: $schedule) {
    ... on ScheduleStateResult { scheduleState { status } } ... on PythonError { message } } }"""

__all__ = ["instance"]


class Deployment:
    """A webserver's and a daemon's view of a project, without their processes."""

    def __init__(self, workspace: WorkspaceProcessContext, instance: dg.DagsterInstance) -> None:
        self._workspace = workspace
        self._instance = instance
        self._ticks: dict[str, Any] = {}
        self._now = datetime.datetime.now(datetime.UTC).replace(second=30, microsecond=0)

    def ask(self, query: str, **variables: object) -> dict[str, Any]:
        answer = execute_dagster_graphql(self._workspace.create_request_context(), query, variables=variables)
        assert not answer.errors, answer.errors
        return dict(answer.data)

    def statuses(self, asset: str = "eagle3_samples") -> dict[str, list[str]]:
        """Status → partitions, as a page of partitions gets them."""
        found = self.ask(_STATUSES, key={"path": [asset]})["assetNodeOrError"]["assetPartitionStatuses"]
        return {status.removesuffix("Partitions"): keys for status, keys in found.items() if keys}

    def stale(self, asset: str = "eagle3_samples") -> list[str]:
        """What a page says of each partition, in their order."""
        asked = [self.ask(_STALE, key={"path": [asset]}, partition=key) for key in KEYS]
        return [answer["assetNodeOrError"]["staleStatus"] for answer in asked]

    def record(self) -> None:
        """Materialise `layer_set` as its button does."""
        self._run(assetSelection=[{"path": ["layer_set"]}], assetCheckSelection=[])

    def execute_all_checks(self) -> list[str]:
        """The button above the list of checks, which asks for them alone and for no partition; what the run logs."""
        checks = [{"assetKey": {"path": list(check.asset_key.path)}, "name": check.name} for check in CHECKS]
        run_id = self._run(assetSelection=[], assetCheckSelection=checks)
        run = self._instance.get_run_by_id(run_id)
        assert run is not None
        assert run.is_success
        return [entry.user_message for entry in self._instance.all_logs(run_id) if not entry.is_dagster_event]

    def checks(self) -> dict[tuple[str, str | None], str]:
        """Check and partition → what it last said."""
        known = self._instance.event_log_storage.get_asset_check_partition_info(CHECKS)
        return {(info.check_key.name, info.partition_key): info.latest_execution_status.value for info in known}

    def _run(self, **selection: object) -> str:
        selector = {**REPOSITORY, "pipelineName": "__ASSET_JOB", **selection}
        launched = self.ask(_RUN, params={"selector": selector, "mode": "default"})["launchPipelineExecution"]
        assert launched["__typename"] == "LaunchRunSuccess", launched
        return str(launched["run"]["runId"])

    def backfill(self, keys: list[str]) -> list[str]:
        """Launch a backfill as the dialog does, and have the daemon's iterations end it; the partitions of its runs."""
        selection = [{"path": [asset]} for asset in ("prompts", "raw_dumps", "eagle3_samples")]
        launched = self.ask(_BACKFILL, params={"assetSelection": selection, "partitionNames": keys})["launchPartitionBackfill"]
        assert launched["__typename"] == "LaunchBackfillSuccess", launched
        name = launched["backfillId"]
        for _ in range(10):
            assert not any(execute_backfill_iteration(self._workspace, logging.getLogger("backfill")))
            found = self._instance.get_backfill(name)
            assert found
            if found.status.value != "REQUESTED":
                break
        return self.partitions_of({"dagster/backfill": name})

    def start(self) -> str:
        """Switch the schedule on; its status."""
        with freeze_time(self._now):
            started = self.ask(_START, schedule={**REPOSITORY, "scheduleName": REEXTRACT_STALE})
        return str(started["startSchedule"]["scheduleState"]["status"])

    def tick(self) -> list[str]:
        """What the daemon's tick of the next minute asks for: the partitions of its new runs."""
        before = Counter(self.partitions_of({"dagster/schedule_name": REEXTRACT_STALE}))
        self._now += datetime.timedelta(minutes=1)
        with freeze_time(self._now):
            for error in launch_scheduled_runs(self._workspace, logging.getLogger("scheduler"), self._now, self._ticks):
                assert error is None
        return sorted((Counter(self.partitions_of({"dagster/schedule_name": REEXTRACT_STALE})) - before).elements())

    def partitions_of(self, tags: dict[str, str]) -> list[str]:
        """The partitions of all runs that have some tags, one for each run."""
        runs = self._instance.get_runs(dg.RunsFilter(tags=tags))
        return sorted(run.tags["dagster/partition"] for run in runs if "dagster/partition" in run.tags)


@contextmanager
def deployed(project: Project, instance: dg.DagsterInstance, folder: Path) -> Iterator[Deployment]:
    code = folder / "definitions.py"
    code.write_text(
        "from hs_assets.config import load_project\nfrom hs_assets.defs.build import build_definitions\n"
        f"defs = build_definitions(load_project({str(project.home.root)!r}))\n"
    )
    target = PythonFileTarget(python_file=str(code), attribute=None, working_directory=str(folder), location_name="code")
    with create_test_daemon_workspace_context(target, instance) as workspace:
        yield Deployment(workspace, instance)
    gc.collect()  # what Dagster left open is complained of here, not in another test


@pytest.fixture
def make(home: Path, checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Project]:
    def build(layers: str) -> Project:
        source, server = write_rows(tmp_path / "rows.jsonl", 2 * len(KEYS)), "spool_bytes = 200_000_000"
        top = f"layers = {layers}"
        project = write_project(home, checkpoint("llama"), source, top=top, prompts="rows_per_partition = 2", server=server)
        automation = '[automation]\ncron = "* * * * *"\npartitions_per_tick = 4\n'
        project.home.config.write_text(f"{project.home.config.read_text()}\n{automation}")
        return load_project(home)

    return build


@pytest.mark.filterwarnings("ignore:.*AssetSelection.sources:DeprecationWarning")  # Dagster's own, in making a backfill
@pytest.mark.filterwarnings("ignore:.*shutdown_asyncgens:RuntimeWarning")  # and in ending the process that has the definitions
def test_exactly_what_failed_and_what_another_layer_set_made_stale_is_requested(
    make: Callable[[str], Project], instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    def damaged(rid: Rid, states: np.ndarray) -> np.ndarray:
        return states * np.nan if rid.partition in FAILING else states

    project = make("[2, 4]")
    with deployed(project, instance, tmp_path) as deployment:
        with fake_server(project, damaged) as server:
            deployment.record()
            assert deployment.backfill(KEYS) == KEYS
            others = [key for key in KEYS if key not in FAILING]
            assert deployment.statuses() == {"materialized": others, "failed": FAILING, "unmaterialized": FAILING}
            assert deployment.statuses("prompts") == {"materialized": KEYS}
            server.fault = healthy
            server.rows.clear()
            assert deployment.backfill(deployment.statuses()["failed"]) == FAILING
            assert sorted(server.rows) == [0, 0, 1, 1]
        assert deployment.statuses() == {"materialized": KEYS}
        assert deployment.stale() == ["FRESH"] * 6
        said = dict.fromkeys(product([check.name for check in CHECKS], KEYS), "SUCCEEDED")
        assert deployment.checks() == said
        assert (
            "nothing was checked: the checks of a partition are evaluated as it is materialised"
            in deployment.execute_all_checks()
        )
        assert {of: status for of, status in deployment.checks().items() if of in said} == said

        project = make("[2, 5]")
        deployment.record()
        assert deployment.stale() == deployment.stale("raw_dumps") == ["STALE"] * 6
        assert deployment.stale("prompts") == ["FRESH"] * 6
        assert deployment.start() == "RUNNING"
        with fake_server(project) as server:
            assert deployment.tick() == KEYS[:4]
            assert deployment.stale() == ["FRESH"] * 4 + ["STALE"] * 2
            assert deployment.tick() == KEYS[4:]
            assert deployment.tick() == []
            assert len(server.rows) == 12
        assert deployment.stale() == deployment.stale("raw_dumps") == ["FRESH"] * 6
        assert deployment.statuses() == {"materialized": KEYS}
        assert deployment.partitions_of({TARGET_TAG: recorded(instance)}) == KEYS
