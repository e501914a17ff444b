"""What people do in Dagster's pages: a real browser, a real `dagster dev` with its daemon, and the real server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import dagster as dg
import pytest
from playwright.sync_api import expect

from hs_assets.config import Project, load_project
from hs_assets.defs.build import build_definitions
from hs_assets.defs.demo import open_instance
from hs_assets.defs.recorded import SAMPLES
from hs_assets.store import open_store
from hs_assets_tests import faulty_capture
from hs_assets_tests.conftest import temporary_home, write_project
from hs_assets_tests.dagster_dev import SECONDS, dagster_dev, pages
from hs_assets_tests.plugins import make_plugin
from hs_assets_tests.test_extract import write_rows

MADE = ("eagle3_samples", "raw_dumps", "prompts")


@pytest.fixture
def make(checkpoint: Callable[[str], Path], tmp_path: Path) -> Iterator[Callable[..., Project]]:
    """Writes the configuration of partitions of two rows, in a home whose server has the faults of `faulty_capture`."""
    path = make_plugin(tmp_path / "plugin", Path(faulty_capture.__file__))
    env = f'env = {{ PYTHONPATH = "{path}", {faulty_capture.FAULT_ENV} = "{tmp_path / "fault"}" }}'
    server = f"spool_bytes = 200_000_000\nwriters = 1\nchunk_tokens = 512\n{env}"
    with temporary_home(tmp_path / ".hs_assets") as home:

        def build(partitions: int, layers: str = "[2, 4]") -> Project:
            source = write_rows(tmp_path / "rows.jsonl", 2 * partitions)
            prompts = "rows_per_partition = 2"
            write_project(home, checkpoint("llama"), source, top=f"layers = {layers}", prompts=prompts, server=server)
            home_config = home / "hs_assets.toml"
            home_config.write_text(home_config.read_text() + '\n[automation]\ncron = "* * * * *"\n')
            return load_project(home)

        yield build


def keys(numbers: range | tuple[int, ...]) -> list[str]:
    return [f"rows-{number:05d}" for number in numbers]


def statuses(project: Project, instance: dg.DagsterInstance) -> dict[str, list[str]]:
    """What the instance says of the partitions of the samples: status → keys."""
    definition = build_definitions(project).resolve_asset_graph().get(SAMPLES).partitions_def
    assert definition
    known = instance.get_status_by_partition(SAMPLES, definition.get_partition_keys(), definition) or {}
    found: dict[str, list[str]] = {}
    for key in definition.get_partition_keys():
        status = known.get(key)
        found.setdefault(status.name if status else "MISSING", []).append(key)
    return found


def test_a_backfill_of_which_two_fail_and_failed_and_missing_redoes_the_two(make: Callable[..., Project], tmp_path: Path) -> None:
    project, everything, damaged = make(12), keys(range(12)), keys((3, 7))
    fault = tmp_path / "fault"
    with open_instance(project.home) as instance, dagster_dev(tmp_path) as dev, pages(dev, tmp_path / "page.png") as see:
        see.open_graph()
        see.materialize("layer_set")
        expect(see.node("layer_set")).to_contain_text("Materialized", timeout=SECONDS * 1000)
        see.open_graph()
        see.materialize(*MADE, partitions=everything[:1], launched="1 partition")
        see.see_partitions("eagle3_samples", Materialized=1, Failed=0, Missing=11)
        assert statuses(project, instance) == {"MATERIALIZED": everything[:1], "MISSING": everything[1:]}

        fault.write_text(f"flipped_byte {' '.join(damaged)}")
        see.open_graph()
        see.materialize(*MADE, partitions="All", launched="12 partitions")
        see.see_partitions("eagle3_samples", Materialized=10, Failed=2, Missing=0, Materializing=0)
        assert statuses(project, instance)["FAILED"] == damaged
        asked = {run.tags["dagster/partition"] for run in instance.get_runs() if "dagster/backfill" in run.tags}

        fault.write_text("")
        see.open_graph()
        see.materialize(*MADE, partitions="Failed and missing", launched="2 partitions")
        see.see_partitions("eagle3_samples", Materialized=12, Failed=0, Missing=0)
        assert statuses(project, instance) == {"MATERIALIZED": everything}
        again = instance.get_runs(limit=2)
        assert asked == set(everything)
        assert sorted(run.tags["dagster/partition"] for run in again) == damaged
        assert len(instance.get_runs(dg.RunsFilter(tags={"dagster/backfill": again[0].tags["dagster/backfill"]}))) == 2
    ledgers = [manifest.ledger.as_json() for manifest in open_store(project.store_path).manifests("r2-4-8")]
    assert ledgers == [{"in": 2, "stored": 2, "dropped": {}, "failed": {}}] * 12


def test_a_changed_layer_set_is_seen_as_unsynced_until_the_schedule_has_extracted_it(
    make: Callable[..., Project], tmp_path: Path
) -> None:
    project, stored, never = make(4), keys(range(3)), keys((3,))
    with open_instance(project.home) as instance:
        defs = build_definitions(project)
        assert defs.resolve_job_def("record_layer_set").execute_in_process(instance=instance).success
        extract = defs.resolve_job_def("extract")
        assert all(extract.execute_in_process(instance=instance, partition_key=key).success for key in stored)
    with open_instance(project.home) as instance, dagster_dev(tmp_path) as dev, pages(dev, tmp_path / "page.png") as see:
        see.see_partitions("eagle3_samples", Materialized=3, Missing=1)
        see.see_synced("eagle3_samples", stored, True)

        make(4, "[2, 5]")
        see.open_graph()
        see.materialize("layer_set")
        see.see_metadata("layer_set", {"layer_set": "r2-5-8", "stale partitions": "3"})
        see.see_synced("eagle3_samples", stored, False)
        assert dev.stale("eagle3_samples", stored + never) == ["STALE"] * 3 + ["MISSING"]

        see.start_schedule("reextract_stale")
        see.see_synced("eagle3_samples", stored, True)
        see.see_partitions("eagle3_samples", Materialized=3, Materializing=0, Failed=0, Missing=1)
        assert dev.stale("eagle3_samples", stored + never) == ["FRESH"] * 3 + ["MISSING"]
        asked = instance.get_runs(dg.RunsFilter(tags={"dagster/schedule_name": "reextract_stale"}))
        assert sorted(run.tags["dagster/partition"] for run in asked) == stored
    store = open_store(project.store_path)
    assert {name: len(store.layer_set(name)) for name in store.layer_sets()} == {"r2-4-8": 6, "r2-5-8": 6}
