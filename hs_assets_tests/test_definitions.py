"""The Dagster assets in a real instance: order, checks, failures, and what each selection does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import dagster as dg
import numpy as np
import pytest

from hs_assets.config import Project, load_project
from hs_assets.defs.build import build_definitions
from hs_assets.defs.layer_set import LAYER_SET
from hs_assets.defs.processes import PROCESS_TAG
from hs_assets.defs.recorded import RAW_DUMPS, SAMPLES, stored_versions
from hs_assets.defs.report_metadata import OTHER_LOGPROB, OWN_LOGPROB
from hs_assets.errors import ConfigError, PromptError
from hs_assets.extraction.status import status
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

    def partitions(self) -> list[str]:
        definition = self._defs.resolve_asset_graph().get(SAMPLES).partitions_def
        assert definition
        return list(definition.get_partition_keys())

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
        recorded = instance.get_run_by_id(result.run_id)
        assert recorded
        assert recorded.tags[PROCESS_TAG].split("/")[1] == str(os.getpid())
        raw, samples = result.asset_materializations_for_node("extraction")
        assert (raw.asset_key, samples.asset_key) == (RAW_DUMPS, SAMPLES)
        assert (raw.metadata["state"].value, raw.metadata["requests"].value) == ("consumed", 8)
        assert raw.metadata["captured tokens"].value == samples.metadata["tokens"].value > 0
        assert samples.metadata["bytes"].value == samples.metadata["tokens"].value * 3 * 128 * 2
        assert samples.metadata["manifest changed"].value is True
        assert {name for name in samples.metadata if name.startswith("norm of")} == {f"norm of residual {i}" for i in (2, 4, 8)}
        assert (check_of(runs, LEDGER, "rows-00001"), check_of(runs, RULES, "rows-00001")) == (True, True)
        assert {runs.filled(key) == {"rows-00001"} for key in (PROMPTS, RAW_DUMPS, SAMPLES)} == {True}

        server.rows.clear()
        view = open_store(project.store_path).layer_set("r2-4-8")
        supervised, tokens = sum(int(sample.loss_mask.sum()) for sample in view), sum(len(sample.input_ids) for sample in view)
        assert samples.metadata["supervised share"].value == round(supervised / tokens, 4)
        bars = str(samples.metadata["histogram of lengths"].value).splitlines()[2:]
        assert sum(int(bar.split("|")[2]) for bar in bars) == len(view) == 8
        profile = str(samples.metadata["norm profile"].value).splitlines()[2:]
        assert [bar.split("|")[1].strip() for bar in profile] == ["2", "4", "8"]
        final = np.mean([np.linalg.norm(sample.states[8].astype(np.float32), axis=1).mean() for sample in view])
        assert abs(float(profile[-1].split("|")[2]) - final) < 0.01 * final
        own, other = (samples.metadata[name].value for name in (OWN_LOGPROB, OTHER_LOGPROB))
        assert samples.metadata["logprob margin"].value == pytest.approx(other - own, abs=2e-4)

        names = {spec.name for spec in build_definitions(project).resolve_asset_graph().get(SAMPLES).check_keys}
        assert names == {"ledger", "rules", "drop_share", "store", "spec_current"}
        assert {check_of(runs, dg.AssetCheckKey(SAMPLES, name), "rows-00001") for name in names} == {True}

        again = runs.extract("rows-00001")
        assert again.success
        assert server.rows == []
        raw, samples = again.asset_materializations_for_node("extraction")
        assert (raw.metadata["requests"].value, samples.metadata["manifest changed"].value) == (0, False)
        assert samples.metadata["lineage"].value["samples_by_run"] == {result.run_id: 8}
        shown = samples.metadata["lineage of the first rows"]
        assert isinstance(shown, dg.TableMetadataValue)
        assert [row.data["source row"] for row in shown.records] == list(range(8, 16))
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
        failure = failure_of(runs.extract("rows-00000"))
        assert "remedy: materialise layer_set" in failure
        assert "where: layer set\n  expected: layer set: r2-4-8\n  got: layer set: r2-5-8\n" in failure
        flag = "--enable-flashinfer-allreduce-fusion"
        config = project.home.config
        config.write_text(config.read_text().replace("[server]", f'[server]\ndtype = "float32"\nargs = ["{flag}"]'))
        assert (
            "where: layer set, dtype, flags\n"
            f"  expected: layer set: r2-4-8; dtype: bfloat16; flags: --dtype bfloat16\n"
            f"  got: layer set: r2-5-8; dtype: float32; flags: --dtype float32, {flag}\n"
        ) in failure_of(runs.extract("rows-00000"))
        assert server.rows == []
    changed = make("[2, 5]")
    with fake_server(changed):
        runs.record()
        assert runs.extract("rows-00000").success
    assert open_store(changed.store_path).layer_sets() == ["r2-5-8"]


def test_dumps_captured_while_the_configuration_was_edited_are_not_recorded(
    make: Callable[..., Project], instance: dg.DagsterInstance
) -> None:
    """Of `raw_dumps` alone, as of both: the next run, in the new layer set, takes none of them."""
    runs = Runs(project := make(), instance)

    def edited(rid: Rid, states: np.ndarray) -> np.ndarray:
        make("[2, 5]")
        return states

    with fake_server(project, edited) as server:
        runs.record()
        assert runs.extract("rows-00000", PROMPTS).success
        assert "remedy: materialise layer_set" in failure_of(runs.extract("rows-00000", RAW_DUMPS))
        assert len(server.rows) == 8
    assert runs.filled(RAW_DUMPS) == set()
    changed = load_project(project.home.root)
    with fake_server(changed) as server:
        runs.record()
        assert runs.extract("rows-00000", SAMPLES).success
        assert len(server.rows) == 8
    assert list((project.spool_path / "dumps").iterdir()) == []
    assert [list(sample.states) for sample in open_store(changed.store_path).layer_set("r2-5-8")] == [[2, 5, 8]] * 8


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


def test_prompts_that_failed_are_not_extracted(make: Callable[..., Project], instance: dg.DagsterInstance) -> None:
    """Not with `eagle3_samples` alone either, which finds their table."""
    project = make(rows=8)
    source = project.settings.prompts.sources[0].path
    source.write_text(source.read_text().splitlines()[0] + "\n" + "".join(f'{{"n": {n}}}\n' for n in range(7)))
    runs = Runs(project, instance)
    with fake_server(project) as server:
        assert runs.record().success
        assert "7 of 8 rows are dropped" in failure_of(runs.extract("rows-00000", PROMPTS))
        assert "too many rows are dropped" in failure_of(runs.extract("rows-00000", SAMPLES))
        assert (server.rows, runs.filled(SAMPLES)) == ([], set())


def test_prompts_of_other_settings_are_not_extracted(make: Callable[..., Project], instance: dg.DagsterInstance) -> None:
    project = make(rows=8)
    path = project.home.config
    with fake_server(project) as server:
        runs = Runs(project, instance)
        assert runs.record().success
        assert runs.extract("rows-00000", PROMPTS).success
        as_made = path.read_text()
        path.write_text(as_made.replace("rows_per_partition = 8", 'rows_per_partition = 8\nsupervise = "last"'))
        assert "the prompts were made with other settings" in failure_of(runs.extract("rows-00000", SAMPLES))
        assert server.rows == []
        path.write_text(as_made)
        assert runs.extract("rows-00000", SAMPLES).success


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


def test_new_rows_and_new_sources_are_new_partitions_and_old_ones_stay_fresh(
    make: Callable[..., Project], instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    project = make()  # partitions of 8, 8 and 4 rows
    keys = [f"rows-{number:05d}" for number in range(3)]
    runs = Runs(project, instance)
    with fake_server(project) as server:
        runs.record()
        assert all(runs.extract(key).success for key in keys)
        before = versions(instance)

        source = project.settings.prompts.sources[0].path
        lines = source.read_text().splitlines()
        assert write_rows(source, 30).read_text().splitlines()[:20] == lines  # rows 20 to 29 are appended
        other = tmp_path / "elsewhere" / "rows.jsonl"  # the same file name, and a name of its own
        other.parent.mkdir()
        other.write_text(source.read_text().replace("Question", "Riddle"))
        text = project.home.config.read_text()
        project.home.config.write_text(f'{text}\n[[prompts.sources]]\nname = "more"\npath = "{other}"\n')
        project = load_project(project.home.root)
        runs = Runs(project, instance)  # reloaded
        partitions = runs.partitions()
        assert partitions == [*keys, "rows-00003", *(f"more-{number:05d}" for number in range(4))]
        assert versions(instance) == before
        states = {one.partition: (one.state, one.pending) for one in status(project)}
        assert [states[key] for key in keys] == [("complete", 0), ("complete", 0), ("incomplete", 4)]
        assert {states[key][0] for key in partitions[3:]} == {"new"}

        server.rows.clear()
        assert all(runs.extract(key).success for key in keys)
        assert sorted(server.rows) == [4, 5, 6, 7]  # of the last one, what is new in it
        after = versions(instance)
        assert [key for key in keys if after[key] != before[key]] == [keys[2]]
        assert all(runs.extract(key).success for key in ("rows-00003", "more-00000"))


def test_two_sources_of_one_file_name_need_names_and_another_partition_size_is_refused(
    make: Callable[..., Project], tmp_path: Path
) -> None:
    project = make()
    build_definitions(project)
    text = project.home.config.read_text()
    project.home.config.write_text(f'{text}\n[[prompts.sources]]\npath = "{tmp_path / "elsewhere" / "rows.jsonl"}"\n')
    with pytest.raises(ConfigError, match="give one of them a name"):
        load_project(project.home.root)
    project.home.config.write_text(text.replace("rows_per_partition = 8", "rows_per_partition = 9"))
    with pytest.raises(PromptError, match="which would give old keys new rows"):
        build_definitions(load_project(project.home.root))
    project.home.config.write_text(text.replace("[[prompts.sources]]", '[[prompts.sources]]\nname = "with, a comma"'))
    with pytest.raises(ConfigError, match="cannot begin a partition key"):
        load_project(project.home.root)


@pytest.mark.parametrize("assets", [("raw_dumps", "eagle3_samples"), ("prompts",)], ids=["extraction", "prompts"])
def test_a_run_over_a_range_of_partitions_marks_none_as_done(
    make: Callable[..., Project], instance: dg.DagsterInstance, assets: tuple[str, ...]
) -> None:
    """What a backfill launched as a single run is: a step that made one of them must not count for all."""
    project = make()
    runs = Runs(project, instance)
    made = set(runs.partitions()) if "prompts" not in assets else set()
    with fake_server(project) as server:
        runs.record()
        assert all(runs.extract(key, PROMPTS).success for key in made)  # nothing else is in the way
        range_of = {"dagster/asset_partition_range_start": "rows-00000", "dagster/asset_partition_range_end": "rows-00002"}
        keys = [dg.AssetKey(name) for name in assets]
        job = build_definitions(project).resolve_job_def("extract")
        result = job.execute_in_process(instance=instance, tags=range_of, asset_selection=keys, raise_on_error=False)
        assert not result.success
        assert server.rows == []
    assert {key: runs.filled(key) for key in (PROMPTS, RAW_DUMPS, SAMPLES)} == {PROMPTS: made, RAW_DUMPS: set(), SAMPLES: set()}


def versions(instance: dg.DagsterInstance) -> dict[str, str]:
    """Partition → data version of its samples."""
    return {key: str(version) for key, version in stored_versions(instance).items()}
