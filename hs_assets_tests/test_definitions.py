"""The Dagster assets in a real instance: order, checks, failures, and what each selection does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import dagster as dg
import numpy as np
import pytest

from hs_assets.config import Project, load_project
from hs_assets.defs.build import build_definitions
from hs_assets.defs.layer_set import LAYER_SET
from hs_assets.defs.recorded import RAW_DUMPS, SAMPLES
from hs_assets.store import open_store
from hs_assets.wire.rid import Rid
from hs_assets_tests.conftest import write_project
from hs_assets_tests.fake_server import fake_server, healthy
from hs_assets_tests.test_extract import write_rows

PROMPTS = dg.AssetKey("prompts")
LEDGER, RULES = dg.AssetCheckKey(SAMPLES, "ledger"), dg.AssetCheckKey(SAMPLES, "rules")


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    folder = tmp_path / "dagster"
    folder.mkdir()
    with dg.DagsterInstance.local_temp(str(folder)) as made:
        yield made


@pytest.fixture
def make(home: Path, checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[..., Project]:
    def build(layers: str = "[2, 4]", rows: int = 20) -> Project:
        source = write_rows(tmp_path / "rows.jsonl", rows)
        server = "spool_bytes = 200_000_000"
        return write_project(
            home, checkpoint("llama"), source, top=f"layers = {layers}", prompts="rows_per_partition = 8", server=server
        )

    return build


class Runs:
    """Runs parts of a project's definitions, as the UI would."""

    def __init__(self, project: Project, instance: dg.DagsterInstance) -> None:
        self.instance = instance
        self._defs = build_definitions(project)

    def record(self) -> dg.ExecuteInProcessResult:
        return self._defs.resolve_job_def("record_layer_set").execute_in_process(instance=self.instance)

    def extract(self, partition: str, *selection: dg.AssetKey) -> dg.ExecuteInProcessResult:
        job = self._defs.resolve_job_def("extract")
        keys = list(selection) or None
        return job.execute_in_process(instance=self.instance, partition_key=partition, asset_selection=keys, raise_on_error=False)

    def filled(self, key: dg.AssetKey) -> set[str]:
        return set(self.instance.get_materialized_partitions(key))


def check_of(runs: Runs, check: dg.AssetCheckKey, partition: str) -> bool:
    """Whether the latest evaluation of a check on a partition passed."""
    records = runs.instance.event_log_storage.get_asset_check_execution_history(check, limit=50)
    latest = next(record for record in records if record.partition == partition)
    return latest.event.dagster_event.asset_check_evaluation_data.passed


def failure_of(result: dg.ExecuteInProcessResult) -> str:
    (event,) = [event for event in result.all_events if event.is_step_failure]
    data = event.step_failure_data
    return (
        f"{data.error.to_string() if data.error else ''}\n{data.user_failure_data.description if data.user_failure_data else ''}"
    )


def test_definitions_load_with_a_partition_for_every_shard(make: Callable[..., Project]) -> None:
    defs = build_definitions(make())
    dg.Definitions.validate_loadable(defs)
    graph = defs.resolve_asset_graph()
    assert graph.get(SAMPLES).parent_keys == {RAW_DUMPS, PROMPTS, LAYER_SET}
    assert graph.get(RAW_DUMPS).parent_keys == {PROMPTS, LAYER_SET}
    keys = graph.get(SAMPLES).partitions_def.get_partition_keys()
    assert list(keys) == ["rows-00000", "rows-00001", "rows-00002"]


def test_a_partition_goes_from_rows_to_samples_and_again_for_nothing(
    make: Callable[..., Project], instance: dg.DagsterInstance
) -> None:
    project = make()
    runs = Runs(project, instance)
    with fake_server(project) as server:
        assert runs.record().success
        result = runs.extract("rows-00001")
        assert result.success
        raw, samples = result.asset_materializations_for_node("extraction")
        assert (raw.asset_key, samples.asset_key) == (RAW_DUMPS, SAMPLES)
        assert (raw.metadata["state"].value, raw.metadata["requests"].value) == ("consumed", 8)
        assert raw.metadata["captured tokens"].value == samples.metadata["tokens"].value > 0
        assert samples.metadata["bytes"].value == samples.metadata["tokens"].value * 3 * 128 * 2
        assert {name for name in samples.metadata if name.startswith("norm of")} == {f"norm of residual {i}" for i in (2, 4, 8)}
        assert (check_of(runs, LEDGER, "rows-00001"), check_of(runs, RULES, "rows-00001")) == (True, True)
        assert {runs.filled(key) == {"rows-00001"} for key in (PROMPTS, RAW_DUMPS, SAMPLES)} == {True}

        server.rows.clear()
        names = {spec.name for spec in build_definitions(project).resolve_asset_graph().get(SAMPLES).check_keys}
        assert names == {"ledger", "rules", "drop_share", "store", "spec_current"}
        assert {check_of(runs, dg.AssetCheckKey(SAMPLES, name), "rows-00001") for name in names} == {True}

        again = runs.extract("rows-00001")
        assert again.success
        assert server.rows == []
        raw, samples = again.asset_materializations_for_node("extraction")
        assert (raw.metadata["requests"].value, samples.metadata["manifest changed"].value) == (0, False)
    lineage = open_store(project.store_path).layer_set("r2-4-8")[0].lineage
    assert (lineage.partition, lineage.source_row, lineage.parts[0].run_id) == ("rows-00001", 8, result.run_id)


def test_a_failure_fails_both_assets_keeps_its_checks_and_is_healed_by_the_samples_alone(
    make: Callable[..., Project], instance: dg.DagsterInstance
) -> None:
    project = make()
    runs = Runs(project, instance)

    def nan(rid: Rid, states: np.ndarray) -> np.ndarray:
        return states * np.nan if rid.row == 3 else states

    with fake_server(project, nan) as server:
        runs.record()
        result = runs.extract("rows-00000")
        assert not result.success
        assert "1 rows failed: finite" in failure_of(result)
        assert (check_of(runs, LEDGER, "rows-00000"), check_of(runs, RULES, "rows-00000")) == (False, False)
        assert (runs.filled(RAW_DUMPS), runs.filled(SAMPLES)) == (set(), set())

        server.fault, server.rows = healthy, []
        assert runs.extract("rows-00000", SAMPLES).success
        assert server.rows == [3]
        assert (check_of(runs, LEDGER, "rows-00000"), check_of(runs, RULES, "rows-00000")) == (True, True)
        assert (runs.filled(RAW_DUMPS), runs.filled(SAMPLES)) == (set(), {"rows-00000"})


def test_dumps_alone_stay_in_the_spool_until_the_samples_take_them(
    make: Callable[..., Project], instance: dg.DagsterInstance
) -> None:
    project = make()
    runs = Runs(project, instance)
    with fake_server(project) as server:
        runs.record()
        assert runs.extract("rows-00000", PROMPTS).success
        result = runs.extract("rows-00000", RAW_DUMPS)
        (raw,) = result.asset_materializations_for_node("extraction")
        assert raw.metadata["state"].value == "in the spool"
        assert len(list((project.spool_path / "dumps").glob("*.safetensors"))) == 8
        server.rows.clear()
        assert runs.extract("rows-00000", SAMPLES).success
        assert server.rows == []
    assert list((project.spool_path / "dumps").iterdir()) == []


def test_nothing_is_extracted_that_layer_set_did_not_record(make: Callable[..., Project], instance: dg.DagsterInstance) -> None:
    project = make()
    runs = Runs(project, instance)
    with fake_server(project) as server:
        assert "remedy: materialise layer_set" in failure_of(runs.extract("rows-00000"))
        runs.record()
        make("[2, 5]")  # the file is edited under the loaded definitions
        assert "remedy: materialise layer_set" in failure_of(runs.extract("rows-00000"))
        assert server.rows == []
    changed = make("[2, 5]")
    with fake_server(changed):
        runs.record()
        assert runs.extract("rows-00000").success
    assert open_store(changed.store_path).layer_sets() == ["r2-5-8"]


def test_a_partition_that_drops_too_much_fails_before_anything_is_sent(
    make: Callable[..., Project], instance: dg.DagsterInstance
) -> None:
    project = make()
    source = project.settings.prompts.sources[0].path
    rows = source.read_text().splitlines()
    source.write_text("\n".join([*(["{}"] * 5), *rows[5:]]) + "\n")
    runs = Runs(project, instance)
    with fake_server(project) as server:
        runs.record()
        result = runs.extract("rows-00000")
        assert "5 of 8 rows are dropped, more than the share of 0.5" in failure_of(result)
        assert server.rows == []


def test_damage_in_the_store_fails_the_step_and_its_check_and_is_not_recorded_as_made(
    make: Callable[..., Project], instance: dg.DagsterInstance
) -> None:
    project = make()
    runs = Runs(project, instance)
    with fake_server(project):
        runs.record()
        assert runs.extract("rows-00000").success
        before = instance.get_latest_materialization_event(SAMPLES)
        shard = next((project.store_path / "data").glob("*/rows-00000/*/residual_002/c/0/0"))
        damaged = bytearray(shard.read_bytes())
        damaged[100] ^= 1
        shard.write_bytes(damaged)
        result = runs.extract("rows-00000")
    assert "check store: rows-00000/" in failure_of(result)
    store, ledger = (dg.AssetCheckKey(SAMPLES, name) for name in ("store", "ledger"))
    assert (check_of(runs, store, "rows-00000"), check_of(runs, ledger, "rows-00000")) == (False, True)
    after = instance.get_latest_materialization_event(SAMPLES)
    assert before
    assert after
    assert after.timestamp == before.timestamp


def test_rows_that_are_dropped_after_their_prompts_were_made_count_too(
    make: Callable[..., Project], instance: dg.DagsterInstance
) -> None:
    """Four of eight rows are dropped as prompts, as many as may be; one more is rejected by a rule."""
    project = make()
    source = project.settings.prompts.sources[0].path
    rows = source.read_text().splitlines()
    source.write_text("\n".join([*(["{}"] * 4), *rows[4:]]) + "\n")
    config = project.home.config.read_text().replace("[rules]", "[rules]\nmax_rejected_share = 1.0")
    project.home.config.write_text(config)
    project = load_project(project.home.root)
    runs = Runs(project, instance)

    def nan(rid: Rid, states: np.ndarray) -> np.ndarray:
        return states * np.nan if rid.row == 7 else states

    with fake_server(project, nan):
        runs.record()
        assert "1 rows failed: finite" in failure_of(runs.extract("rows-00000"))
        result = runs.extract("rows-00000")
    assert "check drop_share: 5 of 8 rows are dropped; 50% may be" in failure_of(result)
    assert not check_of(runs, dg.AssetCheckKey(SAMPLES, "drop_share"), "rows-00000")
    assert runs.filled(SAMPLES) == set()
