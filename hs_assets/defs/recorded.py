"""What the instance knows of the samples of every partition: their state spec and layer set, and the check `spec_current`."""

from collections.abc import Mapping
from dataclasses import dataclass

import dagster as dg
from dagster._core.events import DagsterEvent, DagsterEventType
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecordStatus

RAW_DUMPS, SAMPLES = dg.AssetKey("raw_dumps"), dg.AssetKey("eagle3_samples")
SPEC_CURRENT = "spec_current"
_DATA_VERSION = "dagster/data_version"


@dataclass(frozen=True, slots=True)
class SamplesVersion:
    """The data version of a partition's samples, ``<state fingerprint>/<layer set>/<prompts version>``."""

    fingerprint: str
    layer_set: str
    prompts: str

    def __str__(self) -> str:
        return f"{self.fingerprint}/{self.layer_set}/{self.prompts}"

    @property
    def target(self) -> str:
        """The data version of the `layer_set` that it was extracted for."""
        return f"{self.fingerprint}/{self.layer_set}"


def stored_versions(instance: dg.DagsterInstance) -> Mapping[str, SamplesVersion]:
    """Partition → the version that its latest materialisation has; partitions that have none are not in it. One query.

    Somebody may have reported a materialisation with a version of another form: it is none of ours, so nothing is known.
    """
    tags = instance.event_log_storage.get_latest_tags_by_partition(
        SAMPLES, DagsterEventType.ASSET_MATERIALIZATION, [_DATA_VERSION]
    )
    versions = {partition: found[_DATA_VERSION].split("/", 2) for partition, found in tags.items()}
    return {partition: SamplesVersion(*parts) for partition, parts in versions.items() if len(parts) == 3}


def spec_marks(instance: dg.DagsterInstance, fingerprint: str) -> dict[str, SamplesVersion]:
    """The stored partitions whose check `spec_current` does not say whether their state spec is this one."""
    known = instance.event_log_storage.get_asset_check_partition_info([dg.AssetCheckKey(SAMPLES, SPEC_CURRENT)])
    says = {info.partition_key: _SAID.get(info.latest_execution_status) for info in known}
    versions = stored_versions(instance)
    return {key: version for key, version in versions.items() if says.get(key) != (version.fingerprint == fingerprint)}


def mark_spec_current(
    instance: dg.DagsterInstance, fingerprint: str, run: dg.DagsterRun, marks: dict[str, SamplesVersion]
) -> None:
    """Make the check `spec_current` of partitions say whether their state spec is this one.

    Arguments:
        run: whose events they shall be; without a run, a check of a partition could be evaluated once only.
    """
    for key, version in marks.items():
        passed = version.fingerprint == fingerprint
        evaluation = dg.AssetCheckEvaluation(
            asset_key=SAMPLES,
            check_name=SPEC_CURRENT,
            passed=passed,
            severity=dg.AssetCheckSeverity.WARN,
            metadata={"stored": version.fingerprint, "recorded by layer_set": fingerprint},
            description=None if passed else _OTHER_SPEC,
            partition=key,
        )
        event = DagsterEvent(DagsterEventType.ASSET_CHECK_EVALUATION.value, job_name=run.job_name, event_specific_data=evaluation)
        instance.report_dagster_event(event, run_id=run.run_id)


_SAID = {AssetCheckExecutionRecordStatus.SUCCEEDED: True, AssetCheckExecutionRecordStatus.FAILED: False}
_OTHER_SPEC = (
    "The states were made under another state spec (weights, SGLang's version or flags) than the one that is recorded now. "
    "They stay readable. Materialise the partition again to replace them, or set automation.reextract_other_specs."
)
