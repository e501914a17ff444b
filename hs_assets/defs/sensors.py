"""Sensors: `janitor` removes what crashes left, `backfill_summary` writes a page on each finished backfill."""

import datetime

import dagster as dg
from dagster._core.definitions.assets.graph.asset_graph import AssetGraph
from dagster._core.definitions.assets.graph.asset_graph_subset import AssetGraphSubset
from dagster._core.errors import DagsterDefinitionChangedDeserializationError
from dagster._core.execution.backfill import BulkActionsFilter, BulkActionStatus, PartitionBackfill

from hs_assets.config import Project
from hs_assets.defs.failures import why_failed
from hs_assets.defs.processes import fail_dead_runs
from hs_assets.defs.project import ProjectResource
from hs_assets.defs.recorded import SAMPLES, stored_versions
from hs_assets.extraction.backfill_summary import SHOWN, FinishedBackfill, summarize
from hs_assets.extraction.status import status
from hs_assets.extraction.tidy import tidy
from hs_assets.wire.records import write_atomic

_LOOKED_AT = 20
_FINISHED = [
    BulkActionStatus.COMPLETED,
    BulkActionStatus.COMPLETED_SUCCESS,
    BulkActionStatus.COMPLETED_FAILED,
    BulkActionStatus.FAILED,
    BulkActionStatus.CANCELED,
]


@dg.sensor(
    minimum_interval_seconds=900,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description=(
        "Removes what crashes left: dumps half done in the spool, generations that were never published, leases of processes "
        "that are gone. Reports runs as failed whose process was killed. It leaves alone what a run is at and what is stored."
    ),
)
def janitor(context: dg.SensorEvaluationContext, project: ProjectResource) -> dg.SkipReason:
    """Never asks for a run; says what it removed."""
    dead = fail_dead_runs(context.instance)
    said = f"{tidy(project.load())}; {len(dead)} runs failed whose process is gone"
    context.log.info(said)
    return dg.SkipReason(said)


@dg.sensor(
    minimum_interval_seconds=60,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description=(
        "Writes <home>/reports/backfill-<id>.md for each of the latest backfills of eagle3_samples that is finished: its "
        "partitions, samples and reasons, and which partitions to redo."
    ),
)
def backfill_summary(context: dg.SensorEvaluationContext, project: ProjectResource) -> dg.SkipReason:
    """Never asks for a run; a backfill that has its page is left alone."""
    if context.repository_def is None:
        return dg.SkipReason("the definitions are not loaded")
    loaded, graph, written = project.load(), context.repository_def.asset_graph, []
    for backfill in context.instance.get_backfills(BulkActionsFilter(statuses=_FINISHED), limit=_LOOKED_AT):
        path = loaded.home.reports / f"backfill-{backfill.backfill_id}.md"
        if path.exists() or not backfill.is_asset_backfill or SAMPLES not in (backfill.asset_selection or ()):
            continue
        page = _page(loaded, context.instance, graph, backfill)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, page)
        context.log.info("%s\n%s", path, page)
        written.append(str(path))
    return dg.SkipReason(f"wrote {', '.join(written)}" if written else "every finished backfill has its page")


def _page(project: Project, instance: dg.DagsterInstance, graph: AssetGraph, backfill: PartitionBackfill) -> str:
    began = datetime.datetime.fromtimestamp(backfill.backfill_timestamp, datetime.UTC)
    ended = backfill.backfill_end_timestamp or backfill.backfill_timestamp
    try:
        data = backfill.get_asset_backfill_data(graph)
    except DagsterDefinitionChangedDeserializationError as error:
        return f"# Backfill {backfill.backfill_id}: {backfill.status.value}\n\nIts partitions are not known any more: {error}\n"
    partitions = sorted(_samples(data.target_subset))
    runs = instance.get_runs(dg.RunsFilter(tags={"dagster/backfill": backfill.backfill_id}))
    made, versions = frozenset(_samples(data.materialized_subset)), stored_versions(instance)
    layer_sets = {versions[key].layer_set for key in made if key in versions}
    last_runs = {run.tags["dagster/partition"]: run.run_id for run in reversed(runs) if "dagster/partition" in run.tags}
    not_made = [key for key in partitions if key not in made and key in last_runs]
    failures = {key: why_failed(instance, last_runs[key]) for key in not_made[:SHOWN]}
    finished = FinishedBackfill(
        backfill_id=backfill.backfill_id,
        outcome=backfill.status.value.lower().replace("_", ", "),
        began=began.isoformat(" ", "seconds"),
        seconds=max(0.0, ended - backfill.backfill_timestamp),
        partitions=partitions,
        made=made,
        runs=last_runs,
        failures={key: failure for key, failure in failures.items() if failure is not None},
    )
    # The configuration may have another layer set by now.
    return summarize(finished, status(project, layer_sets.pop() if len(layer_sets) == 1 else None, set(partitions)))


def _samples(subset: AssetGraphSubset) -> set[str]:
    """The partitions of `eagle3_samples` in it."""
    found = (one for one in subset.iterate_asset_partitions() if one.asset_key == SAMPLES)
    return {one.partition_key for one in found if one.partition_key}
