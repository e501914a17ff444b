"""Assets `raw_dumps` and `eagle3_samples`: one step that can make either or both.

Together (the default) each dump is validated, stored and freed as it comes. The step does all its work first, then
gives its checks, then fails if anything is incomplete, and only at the end gives both materialisations: so a failure
fails both assets, its checks are stored, and running it again asks the server for what is missing.
"""

from collections.abc import Iterator

import dagster as dg

from hs_assets.defs.backfills import require_room_for_backfill
from hs_assets.defs.checks import check_results, check_specs, failed_checks
from hs_assets.defs.failures import keeping_failure
from hs_assets.defs.layer_set import LAYER_SET, data_version, require_recorded
from hs_assets.defs.lineage_metadata import lineage_metadata
from hs_assets.defs.processes import note_process
from hs_assets.defs.project import ProjectResource
from hs_assets.defs.recorded import RAW_DUMPS, SAMPLES, SamplesVersion
from hs_assets.defs.reextract import SPEC_CHANGED_TAG
from hs_assets.defs.report_metadata import manifest_of, raw_metadata, sample_metadata
from hs_assets.defs.retry import retry_if_died
from hs_assets.errors import SpecChangedError
from hs_assets.extraction.extract import Report, capture_only, extract
from hs_assets.serving.launch import Target, resolve

PROMPTS = dg.AssetKey("prompts")
POOL = "sglang"

_RAW_DESCRIPTION = """Hidden states as the patched SGLang server wrote them to its spool in /dev/shm, one file a sample.

Materialised together with `eagle3_samples` they are consumed: each is freed once it is stored, and what stays is this
record of counts, checksums and speed. Materialised alone they stay in the spool, if they fit.

Redo: there is no need to; `eagle3_samples` takes the dumps that are there and asks the server for the rest."""

_SAMPLES_DESCRIPTION = """Validated EAGLE-3 samples: bf16 states in chunked zarr arrays, with token ids, loss mask and lineage.

Where: `<home>/store.zarr`, the layer set's view of the partition; the checks say whether every row is accounted for.

Redo: materialise it again ("failed and missing" in a backfill). Samples that are stored are never asked for twice, and a
sample that fails the same rule twice is `rejected(rule)`. Stale after a change of `layers`: the schedule `reextract_stale`
does it, or materialise the stale partitions here."""


def build_extraction(partitions: dg.PartitionsDefinition[str]) -> dg.AssetsDefinition:
    """The step, over the partitions of all sources."""

    def spec(key: dg.AssetKey, deps: list[dg.AssetKey], kind: str, description: str) -> dg.AssetSpec:
        return dg.AssetSpec(
            key,
            deps=deps,
            description=description,
            kinds={kind},
            group_name="extraction",
            owners=["team:hs-assets"],
            partitions_def=partitions,
            skippable=True,
        )

    @dg.multi_asset(
        specs=[
            spec(RAW_DUMPS, [PROMPTS, LAYER_SET], "sglang", _RAW_DESCRIPTION),
            spec(SAMPLES, [RAW_DUMPS, PROMPTS, LAYER_SET], "zarr", _SAMPLES_DESCRIPTION),
        ],
        check_specs=check_specs(partitions),
        can_subset=True,
        pool=POOL,
    )
    def extraction(
        context: dg.AssetExecutionContext, project: ProjectResource
    ) -> Iterator[dg.MaterializeResult[None] | dg.AssetCheckResult]:
        if not context.selected_asset_keys:
            context.log.warning("nothing was checked: the checks of a partition are evaluated as it is materialised")
            return
        note_process(context)
        with keeping_failure(context, project, "extraction"):
            loaded, key = project.load(), context.partition_key
            target = resolve(loaded)
            _require_unchanged(context, project, target)
            require_room_for_backfill(context, loaded, target)
            selected = context.selected_asset_keys
            if SAMPLES not in selected:
                report = capture_only(loaded, target, key, context.log.info)
                retry_if_died(context, report.died)
                _fail_if_incomplete(context, report, report.problems)
                _require_unchanged(context, project, target)
                yield dg.MaterializeResult(RAW_DUMPS, metadata=raw_metadata(report), data_version=_version(report, target))
                return
            report = extract(loaded, target, key, context.run.run_id, context.log.info)
            retry_if_died(context, report.died)
            results = check_results(loaded, report)
            for result in results:
                if dg.AssetCheckKey(SAMPLES, str(result.check_name)) in context.selected_asset_check_keys:
                    yield result
            _fail_if_incomplete(context, report, [*report.problems, *failed_checks(results)])
            _require_unchanged(context, project, target)
            version = _version(report, target)
            if RAW_DUMPS in selected:
                yield dg.MaterializeResult(RAW_DUMPS, metadata=raw_metadata(report), data_version=version)
            metadata = sample_metadata(report, str(loaded.store_path))
            metadata |= lineage_metadata(manifest_of(report), loaded)
            yield dg.MaterializeResult(SAMPLES, metadata=metadata, data_version=version)

    return extraction


def _require_unchanged(context: dg.AssetExecutionContext, project: ProjectResource, target: Target) -> None:
    """Raise SpecChangedError unless this target is what is configured and recorded now. What is stored of it stays."""
    configured = resolve(project.load())
    try:
        for one in {data_version(each): each for each in (configured, target)}.values():
            require_recorded(context.instance, one)
    except SpecChangedError:
        context.instance.add_run_tags(context.run.run_id, {SPEC_CHANGED_TAG: "true"})
        raise


def _version(report: Report, target: Target) -> dg.DataVersion:
    return dg.DataVersion(str(SamplesVersion(target.spec.fingerprint, target.layer_set.id, report.plan.prompts.version)))


def _fail_if_incomplete(context: dg.AssetExecutionContext, report: Report, problems: list[str]) -> None:
    if problems:
        metadata = {"server log": dg.MetadataValue.path(report.server.log)} if report.server else {}
        described = f"{context.partition_key} is not complete:\n" + "\n".join(problems)
        raise dg.Failure(described, metadata=metadata, allow_retries=False)
