"""A changed layer set: what becomes stale, as Dagster itself says it, and what the schedule asks for."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pytest
from dagster._core.definitions.data_version import CachingStaleStatusResolver, StaleStatus
from dagster._core.execution.backfill import PartitionBackfill
from dagster._core.loader import LoadingContextForTest
from dagster._core.test_utils import create_run_for_test

from hs_assets.config import Project, load_project
from hs_assets.defs.build import build_definitions
from hs_assets.defs.layer_set import LAYER_SET
from hs_assets.defs.project import ProjectResource
from hs_assets.defs.recorded import RAW_DUMPS, SAMPLES, SPEC_CURRENT, stored_versions
from hs_assets.defs.reextract import REEXTRACT_JOB, REEXTRACT_STALE, TARGET_TAG, build_reextract
from hs_assets.errors import ConfigError
from hs_assets.settings import AutomationSettings
from hs_assets.store import open_store
from hs_assets.wire.rid import Rid
from hs_assets_tests.conftest import write_project
from hs_assets_tests.fake_server import fake_server, healthy
from hs_assets_tests.test_extract import make_prompts, write_rows

KEYS = [f"rows-{number:05d}" for number in range(4)]


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    folder = tmp_path / "dagster"
    folder.mkdir()
    with dg.DagsterInstance.local_temp(str(folder), overrides={"telemetry": {"enabled": False}}) as made:
        yield made


@pytest.fixture
def make(home: Path, checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[..., Project]:
    """Writes the configuration of four partitions of two rows each; `automation` are lines of its section."""

    def build(layers: str = "[2, 4]", automation: str = "", server: str = "") -> Project:
        source = write_rows(tmp_path / "rows.jsonl", 8)
        project = write_project(
            home,
            checkpoint("llama"),
            source,
            top=f"layers = {layers}",
            prompts="rows_per_partition = 2",
            server="spool_bytes = 200_000_000\n" + server,
        )
        project.home.config.write_text(project.home.config.read_text() + f"\n[automation]\n{automation}\n")
        return load_project(home)

    return build


class Deployment:
    """Definitions that stay loaded, their instance, and what its daemon would do."""

    def __init__(self, project: Project, instance: dg.DagsterInstance) -> None:
        self.instance = instance
        self.defs = build_definitions(project)
        self._project = ProjectResource(home=str(project.home.root), config=project.origin)
        make_prompts(project)

    def record(self) -> dg.ExecuteInProcessResult:
        return self.defs.resolve_job_def("record_layer_set").execute_in_process(instance=self.instance)

    def extract(self, *partitions: str, **tags: str) -> list[bool]:
        job = self.defs.resolve_job_def(REEXTRACT_JOB)
        return [
            job.execute_in_process(instance=self.instance, partition_key=key, tags=tags, raise_on_error=False).success
            for key in partitions
        ]

    def tick(self) -> list[dg.RunRequest]:
        """The runs that the schedule asks for now."""
        repository = self.defs.get_repository_def()
        with dg.build_schedule_context(
            instance=self.instance,
            repository_def=repository,
            resources={"project": self._project},
            scheduled_execution_time=datetime.datetime.now(datetime.UTC),
        ) as context:
            asked = repository.get_schedule_def(REEXTRACT_STALE).evaluate_tick(context).run_requests or []
        assert len({request.run_key for request in asked}) == len(asked)
        return list(asked)

    def asked(self) -> list[str | None]:
        return [request.partition_key for request in self.tick()]

    def run(self, requests: list[dg.RunRequest]) -> list[bool]:
        """What the daemon makes of requests, with the default launcher's processes left out."""
        return [self.extract(str(request.partition_key), **request.tags)[0] for request in requests]

    def stale(self, key: dg.AssetKey) -> dict[str, StaleStatus]:
        """What Dagster's own resolver, which the UI shows, says of each partition."""
        resolver = CachingStaleStatusResolver(
            self.instance, self.defs.resolve_asset_graph(), LoadingContextForTest(self.instance)
        )
        return {partition: resolver.get_status(key, partition) for partition in KEYS}


def says_current(instance: dg.DagsterInstance) -> dict[str, tuple[bool, str]]:
    """Partition → passed and severity of the latest evaluation of `spec_current`."""
    records = instance.event_log_storage.get_asset_check_execution_history(dg.AssetCheckKey(SAMPLES, SPEC_CURRENT), limit=100)
    latest: dict[str, tuple[bool, str]] = {}
    for record in records:
        if record.event is not None:
            data: Any = record.event.dagster_event.asset_check_evaluation_data
            latest.setdefault(record.partition, (data.passed, data.severity.value))
    return latest


FRESH, STALE, MISSING = StaleStatus.FRESH, StaleStatus.STALE, StaleStatus.MISSING


@pytest.mark.parametrize("by_hand", [True, False], ids=["layer_set materialised", "recorded by the tick"])
def test_a_changed_layer_set_makes_exactly_what_is_stored_stale_and_the_schedule_makes_it_fresh(
    make: Callable[..., Project], instance: dg.DagsterInstance, by_hand: bool
) -> None:
    project = make()
    deployment = Deployment(project, instance)
    with fake_server(project):
        deployment.record()
        assert deployment.asked() == []
        assert deployment.extract(*KEYS[:2]) == [True, True]
    before = [FRESH, FRESH, MISSING, MISSING]
    assert list(deployment.stale(SAMPLES).values()) == before
    assert deployment.asked() == []

    project = make("[2, 5]")  # the file is edited under the loaded definitions
    if by_hand:
        deployment.record()
    requests = deployment.tick()
    assert [request.partition_key for request in requests] == KEYS[:2]
    assert list(deployment.stale(SAMPLES).values()) == [STALE, STALE, MISSING, MISSING]
    assert list(deployment.stale(RAW_DUMPS).values()) == [STALE, STALE, MISSING, MISSING]
    with fake_server(project) as server:
        assert deployment.run(requests) == [True, True]
        assert sorted(server.rows) == [0, 0, 1, 1]
    assert list(deployment.stale(SAMPLES).values()) == before
    assert list(deployment.stale(RAW_DUMPS).values()) == before
    assert deployment.asked() == []
    store = open_store(project.store_path)
    assert {name: len(store.layer_set(name)) for name in store.layer_sets()} == {"r2-4-8": 4, "r2-5-8": 4}

    for layers in ("[2, 4]", "[5]"):  # a stored one, and a subset of one: there is no server that could be asked
        make(layers)
        requests = deployment.tick()
        assert [request.partition_key for request in requests] == KEYS[:2]
        assert deployment.run(requests) == [True, True]
        assert list(deployment.stale(SAMPLES).values()) == before
        assert deployment.asked() == []


@pytest.mark.filterwarnings("ignore:.*AssetSelection.sources:DeprecationWarning")  # Dagster's own, in making a backfill
def test_the_schedule_asks_for_a_few_at_a_time_never_twice_at_once_and_again_what_failed(
    make: Callable[..., Project], instance: dg.DagsterInstance
) -> None:
    project = make()
    deployment = Deployment(project, instance)
    with fake_server(project):
        deployment.record()
        assert all(deployment.extract(*KEYS))
    project = make("[2, 5]", "partitions_per_tick = 3\nmax_attempts = 2")
    requests = deployment.tick()
    assert [request.partition_key for request in requests] == KEYS[:3]

    job = deployment.defs.resolve_job_def(REEXTRACT_JOB)
    create_run_for_test(instance, job.name, tags={"dagster/partition": KEYS[0]}, status=dg.DagsterRunStatus.STARTED)
    assert deployment.asked() == KEYS[1:4]

    backfill = PartitionBackfill.from_asset_partitions(
        backfill_id="asked-for",
        asset_graph=deployment.defs.resolve_asset_graph(),
        partition_names=[KEYS[1]],
        asset_selection=[RAW_DUMPS, SAMPLES],
        backfill_timestamp=datetime.datetime.now().timestamp(),
        tags={},
        dynamic_partitions_store=instance,
        all_partitions=False,
        title=None,
        description=None,
        run_config=None,
    )
    instance.add_backfill(backfill)
    assert deployment.asked() == KEYS[2:4]

    def broken(rid: Rid, states: np.ndarray) -> int:
        return 500

    with fake_server(project, broken) as server:
        assert deployment.run([request for request in requests if request.partition_key == KEYS[2]]) == [False]
        assert deployment.asked() == KEYS[2:4]
        again = [request for request in deployment.tick() if request.partition_key == KEYS[2]]
        assert again[0].run_key not in {request.run_key for request in requests}
        assert deployment.run(again) == [False]
        assert deployment.asked() == KEYS[3:4]  # two attempts are enough; a person's run heals it
        server.fault = healthy
        assert deployment.extract(KEYS[2], KEYS[3]) == [True, True]
    assert deployment.asked() == []


def test_another_state_spec_is_a_warning_and_waits_for_a_flag(make: Callable[..., Project], instance: dg.DagsterInstance) -> None:
    project = make()
    deployment = Deployment(project, instance)
    with fake_server(project):
        deployment.record()
        deployment.extract(*KEYS[:3])
    good = dict.fromkeys(KEYS[:3], (True, "WARN"))
    assert says_current(instance) == good

    flag = 'args = ["--attention-backend", "torch_native"]'
    project = make("[2, 5]", server=flag)
    assert deployment.asked() == []
    assert says_current(instance) == dict.fromkeys(KEYS[:3], (False, "WARN"))
    assert deployment.asked() == []
    make("[2, 4]")  # back again
    assert deployment.asked() == []
    assert says_current(instance) == good

    project = make(server=flag)
    deployment.record()
    assert says_current(instance) == dict.fromkeys(KEYS[:3], (False, "WARN"))
    make(automation="reextract_other_specs = true", server=flag)
    with fake_server(project):
        requests = deployment.tick()
        assert [request.partition_key for request in requests] == KEYS[:3]
        assert all(deployment.run(requests[:1]))
    assert says_current(instance) == {KEYS[0]: (True, "WARN"), **dict.fromkeys(KEYS[1:3], (False, "WARN"))}


def test_the_checks_of_a_partition_are_left_to_the_run_that_is_at_it(
    make: Callable[..., Project], instance: dg.DagsterInstance
) -> None:
    project = make()
    deployment = Deployment(project, instance)
    with fake_server(project):
        deployment.record()
        deployment.extract(KEYS[0])
    job = deployment.defs.resolve_job_def(REEXTRACT_JOB)
    run = instance.create_run_for_job(job, tags={"dagster/partition": KEYS[0]}, status=dg.DagsterRunStatus.STARTED)

    def said() -> list[tuple[str | None, str]]:
        known = instance.event_log_storage.get_asset_check_partition_info([dg.AssetCheckKey(SAMPLES, SPEC_CURRENT)])
        return [(info.partition_key, info.latest_execution_status.value) for info in known]

    assert said() == [(KEYS[0], "PLANNED")]
    runs = instance.get_runs_count()
    assert deployment.asked() == []
    assert (instance.get_runs_count(), said()) == (runs, [(KEYS[0], "PLANNED")])
    instance.report_run_failed(run)  # it was cut off: the check still says nothing, and the tick sees to it
    assert deployment.asked() == []
    assert said() == [(KEYS[0], "SUCCEEDED")]


def test_a_configuration_that_is_edited_while_a_partition_runs_fails_it_and_the_tick_redoes_it(
    make: Callable[..., Project], instance: dg.DagsterInstance
) -> None:
    project = make()
    deployment = Deployment(project, instance)

    def edited(rid: Rid, states: np.ndarray) -> np.ndarray:
        make("[2, 5]")
        return states

    with fake_server(project, edited):
        deployment.record()
        assert deployment.extract(KEYS[0]) == [False]
    (run,) = instance.get_runs(dg.RunsFilter(job_name=REEXTRACT_JOB))
    failures = [
        str(entry.dagster_event.step_failure_data)
        for entry in instance.all_logs(run.run_id)
        if entry.is_dagster_event and entry.dagster_event.is_step_failure
    ]
    assert "materialise layer_set" in failures[0]
    assert instance.get_materialized_partitions(SAMPLES) == set()
    with fake_server(load_project(project.home.root)):
        assert deployment.extract(KEYS[1]) == [False]  # nothing was recorded yet
        requests = deployment.tick()
        assert [request.partition_key for request in requests] == KEYS[:2]
        assert deployment.run(requests) == [True, True]
    for path in (project.store_path / "views").glob("*/*.json"):
        manifest = json.loads(path.read_text())
        ids = {tuple(i for part in sample["parts"] for i in part["residual_ids"]) for sample in manifest["samples"]}
        wanted = {int(i) for i in path.parent.name.removeprefix("r").split("-")}
        assert [set(found) for found in ids] == [wanted]
    versions = {key: version.layer_set for key, version in stored_versions(instance).items()}
    assert versions == dict.fromkeys(KEYS[:2], "r2-5-8")


def test_the_preset_for_eight_gpus_has_the_schedule_on_and_the_demo_off(make: Callable[..., Project]) -> None:
    for automation, status in (("", "STOPPED"), ("reextract_stale = true", "RUNNING")):
        schedule = build_definitions(make(automation=automation)).get_repository_def().get_schedule_def(REEXTRACT_STALE)
        assert schedule.default_status.value == status
    presets = {name: load_project(None, f"preset:{name}").settings.automation for name in ("demo", "kimi-k2.5")}
    assert {name: automation.reextract_stale for name, automation in presets.items()} == {"demo": False, "kimi-k2.5": True}


def test_the_schedule_names_its_target_on_the_runs(make: Callable[..., Project], instance: dg.DagsterInstance) -> None:
    project = make()
    deployment = Deployment(project, instance)
    with fake_server(project):
        deployment.record()
        deployment.extract(KEYS[0])
    make("[2, 5]")
    (request,) = deployment.tick()
    event = instance.get_latest_materialization_event(LAYER_SET)
    assert event
    assert event.asset_materialization
    assert request.tags[TARGET_TAG] == event.asset_materialization.tags["dagster/data_version"]


def test_a_version_that_somebody_reported_is_none_of_ours(make: Callable[..., Project], instance: dg.DagsterInstance) -> None:
    deployment = Deployment(make(), instance)
    deployment.record()
    for key, tags in zip(KEYS, ({}, {"dagster/data_version": "by hand"}), strict=False):
        instance.report_runless_asset_event(dg.AssetMaterialization(SAMPLES, partition=key, tags=tags))
    assert deployment.asked() == []


@pytest.mark.parametrize("cron", ["* * * *", "61 * * * *", "nonsense", "", "0 0 31 2 *"])
def test_a_schedule_without_a_time_is_an_error_of_the_configuration(tmp_path: Path, cron: str) -> None:
    automation = AutomationSettings(cron=cron)
    project = load_project(tmp_path, "preset:demo")
    project = dataclasses.replace(project, settings=project.settings.model_copy(update={"automation": automation}))
    with pytest.raises(ConfigError, match=r"where: preset:demo: automation\.cron\n  expected: a cron(.|\n)*got: (.|\n)*remedy:"):
        build_reextract(dg.StaticPartitionsDefinition(["a"]), project)
