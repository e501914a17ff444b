"""Schedule `reextract_stale`: partitions that are stored in another layer set are extracted again, a few at each tick.

It goes by the state of the instance, not by events: what failed is stale still, and is asked for again, up to a number of times.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice

import dagster as dg
from dagster._core.definitions.assets.graph.asset_graph import AssetGraph
from dagster._core.errors import DagsterDefinitionChangedDeserializationError
from dagster._core.execution.backfill import BulkActionsFilter, BulkActionStatus, PartitionBackfill
from dagster._core.storage.dagster_run import NOT_FINISHED_STATUSES
from dagster._core.utils import make_new_run_id
from dagster._utils.schedules import is_valid_cron_schedule

from hs_assets.config import Project
from hs_assets.defs.layer_set import RECORD_JOB, data_version, record
from hs_assets.defs.project import ProjectResource
from hs_assets.defs.recorded import SamplesVersion, mark_spec_current, spec_marks, stored_versions
from hs_assets.errors import ConfigError
from hs_assets.serving.launch import Target, resolve
from hs_assets.settings import AutomationSettings

REEXTRACT_JOB, REEXTRACT_STALE = "reextract", "reextract_stale"

TARGET_TAG = "hs_assets/target"
"""Of runs that the schedule asked for: the data version of the `layer_set` that they were to extract."""

SPEC_CHANGED_TAG = "hs_assets/spec_changed"
"""Of runs that failed because the configuration had changed."""

_PARTITION_TAG = "dagster/partition"
_MARKS_A_TICK = 200


@dataclass(frozen=True, slots=True)
class Stale:
    """The partitions that are not stored as `layer_set` says, each once.

    ``due``: partition → how many runs that the schedule asked for failed; ``busy``: a run or a backfill is at them;
    ``given_up``: they failed too often; ``other_spec``: they wait for a person, or a flag.
    """

    due: dict[str, int]
    busy: tuple[str, ...]
    given_up: tuple[str, ...]
    other_spec: tuple[str, ...]


def build_reextract(partitions: dg.PartitionsDefinition[str], project: Project) -> dg.ScheduleDefinition:
    """The schedule, over the partitions of all sources; it asks for runs of the job `REEXTRACT_JOB`.

    Raises:
        ConfigError: `automation.cron` is no cron expression.
    """
    automation = project.settings.automation
    if not is_valid_cron_schedule(automation.cron):
        raise ConfigError(
            "a value in the configuration cannot be used",
            where=f"{project.origin}: automation.cron",
            expected='a cron expression: minute, hour, day, month, weekday, such as "*/5 * * * *"; or @hourly, @daily',
            got=repr(automation.cron),
            remedy="crontab(5) has the form; the day must be one that there is",
        )
    status = dg.DefaultScheduleStatus.RUNNING if automation.reextract_stale else dg.DefaultScheduleStatus.STOPPED

    @dg.schedule(
        name=REEXTRACT_STALE,
        job_name=REEXTRACT_JOB,
        cron_schedule=automation.cron,
        default_status=status,
        description=(
            "Records a changed configuration as layer_set does, and extracts partitions again that are stored in another "
            "layer set: at most automation.partitions_per_tick of them, none that a run is at, failed ones again."
        ),
    )
    def reextract_stale(
        context: dg.ScheduleEvaluationContext, project: ProjectResource
    ) -> Iterator[dg.RunRequest | dg.SkipReason]:
        loaded = project.load()
        target, chosen, instance = resolve(loaded), loaded.settings.automation, context.instance
        if record(instance, target):
            context.log.info("layer_set recorded: %s", data_version(target))
        running = _in_runs(instance)
        _mark(instance, target.spec.fingerprint, running)
        asset_graph = context.repository_def.asset_graph if context.repository_def else None
        busy = running | (_in_backfills(instance, asset_graph) if asset_graph else set())
        stale = find_stale(instance, target, chosen, partitions.get_partition_keys(), busy)
        said = (
            f"{len(stale.due)} due, {len(stale.busy)} in a run or backfill, {len(stale.given_up)} failed "
            f"{chosen.max_attempts} times, {len(stale.other_spec)} of another state spec"
        )
        context.log.info("stale partitions: %s", said)
        if not stale.due:
            yield dg.SkipReason(f"no partition is asked for: {said}")
        for partition, attempt in list(stale.due.items())[: chosen.partitions_per_tick]:
            version = data_version(target)
            yield dg.RunRequest(run_key=f"{partition}:{version}:{attempt}", partition_key=partition, tags={TARGET_TAG: version})

    return reextract_stale


def _mark(instance: dg.DagsterInstance, fingerprint: str, running: Collection[str]) -> None:
    """Bring the check `spec_current` up to date, some partitions at a tick; where there is any, a finished run stands for it.

    Partitions that a run is at are left to it: it has announced the check and not evaluated it yet.
    """
    left = ((key, version) for key, version in spec_marks(instance, fingerprint).items() if key not in running)
    marks = dict(islice(left, _MARKS_A_TICK))
    if marks:
        tags = {"dagster/schedule_name": REEXTRACT_STALE}
        run = instance.add_run(
            dg.DagsterRun(job_name=RECORD_JOB, run_id=make_new_run_id(), status=dg.DagsterRunStatus.SUCCESS, tags=tags)
        )
        mark_spec_current(instance, fingerprint, run, marks)


def find_stale(
    instance: dg.DagsterInstance,
    target: Target,
    chosen: AutomationSettings,
    partitions: Collection[str],
    busy: Collection[str],
) -> Stale:
    """Compare what the instance says is stored of some partitions with a target.

    A partition that was never stored is none of them, unless all that its last run lacked was a recorded configuration.
    """
    versions, cut_off = stored_versions(instance), _failed(instance, {SPEC_CHANGED_TAG: "true"})
    failures = _failed(instance, {TARGET_TAG: data_version(target)})
    due: dict[str, int] = {}
    found: dict[str, list[str]] = {"busy": [], "given_up": [], "other_spec": []}
    for partition in partitions:
        version = versions.get(partition)
        if (version is None and partition not in cut_off) or (version and version.target == data_version(target)):
            continue
        if partition in busy:
            found["busy"].append(partition)
        elif version and not _allowed(version, target, chosen):
            found["other_spec"].append(partition)
        elif failures[partition] >= chosen.max_attempts:
            found["given_up"].append(partition)
        else:
            due[partition] = failures[partition]
    return Stale(due, tuple(found["busy"]), tuple(found["given_up"]), tuple(found["other_spec"]))


def _allowed(version: SamplesVersion, target: Target, chosen: AutomationSettings) -> bool:
    return version.fingerprint == target.spec.fingerprint or chosen.reextract_other_specs


def _failed(instance: dg.DagsterInstance, tags: dict[str, str]) -> Counter[str]:
    """Partition → its failed or cancelled runs that have these tags."""
    ended = dg.RunsFilter(statuses=[dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED], tags=tags)
    return Counter(run.tags[_PARTITION_TAG] for run in instance.get_runs(ended) if _PARTITION_TAG in run.tags)


def _in_runs(instance: dg.DagsterInstance) -> set[str]:
    """Partitions that an unfinished run is at."""
    unfinished = dg.RunsFilter(statuses=list(NOT_FINISHED_STATUSES))
    return {run.tags[_PARTITION_TAG] for run in instance.get_runs(unfinished) if _PARTITION_TAG in run.tags}


def _in_backfills(instance: dg.DagsterInstance, asset_graph: AssetGraph) -> set[str]:
    """Partitions that a backfill is yet to make; it may not have asked for their runs."""
    unfinished = BulkActionsFilter(statuses=[BulkActionStatus.REQUESTED])
    return set().union(*(_targets(backfill, asset_graph) for backfill in instance.get_backfills(unfinished)))


def _targets(backfill: PartitionBackfill, asset_graph: AssetGraph) -> set[str]:
    if not backfill.is_asset_backfill:
        return set(backfill.partition_names or ())
    try:
        data = backfill.get_asset_backfill_data(asset_graph)
    except DagsterDefinitionChangedDeserializationError:  # the daemon ends such a backfill
        return set()
    left = data.get_targeted_partitions_without_materialization_status()
    return {one.partition_key for one in left.iterate_asset_partitions() if one.partition_key}
