"""Assets `raw_dumps` and `eagle3_samples`: one step that can make either or both.

Together (the default) each dump is validated, stored and freed as it comes. The step does all its work first, then
gives its checks, then fails if anything is incomplete, and only at the end gives both materialisations: so a failure
fails both assets, its checks are stored, and running it again asks the server for what is missing.
"""

import dataclasses
import hashlib
import math
import warnings
from collections.abc import Iterator

import dagster as dg

from hs_assets.defs.layer_set import LAYER_SET, require_recorded
from hs_assets.defs.project import ProjectResource
from hs_assets.defs.recorded import RAW_DUMPS, SAMPLES, SPEC_CURRENT, SamplesVersion
from hs_assets.defs.reextract import SPEC_CHANGED_TAG
from hs_assets.errors import SpecChangedError
from hs_assets.extraction.extract import Report, capture_only, extract
from hs_assets.serving.launch import Target, resolve
from hs_assets.store.manifest import Manifest

PROMPTS = dg.AssetKey("prompts")
POOL = "sglang"
OWN_LOGPROB, OTHER_LOGPROB = "largest logprob difference", "smallest logprob difference of another sample"
"""Metadata of `eagle3_samples`: how far the `logprob` rule was from failing, and from passing a mix-up."""

_LEDGER, _RULES = "ledger", "rules"

_RAW_DESCRIPTION = """Hidden states as the patched SGLang server wrote them to its spool in /dev/shm, one file a sample.

Materialised together with `eagle3_samples` they are consumed: each is freed once it is stored, and what stays is this
record of counts, checksums and speed. Materialised alone they stay in the spool, if they fit."""

_SAMPLES_DESCRIPTION = """Validated EAGLE-3 samples: bf16 states in chunked zarr arrays, with token ids, loss mask and lineage.

Materialise it again to redo what failed: samples that are stored are never asked for twice."""


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
        check_specs=_check_specs(partitions),
        can_subset=True,
        pool=POOL,
    )
    def extraction(
        context: dg.AssetExecutionContext, project: ProjectResource
    ) -> Iterator[dg.MaterializeResult[None] | dg.AssetCheckResult]:
        loaded, key = project.load(), context.partition_key
        target = resolve(loaded)
        _require_unchanged(context, project, target)
        selected = context.selected_asset_keys
        if SAMPLES not in selected:
            report = capture_only(loaded, target, key, context.log.info)
            _fail_if_incomplete(key, report)
            _require_unchanged(context, project, target)
            yield dg.MaterializeResult(RAW_DUMPS, metadata=_raw_metadata(report), data_version=_version(report, target))
            return
        report = extract(loaded, target, key, context.run.run_id, context.log.info)
        for result in _checks(report):
            if dg.AssetCheckKey(SAMPLES, str(result.check_name)) in context.selected_asset_check_keys:
                yield result
        _fail_if_incomplete(key, report)
        _require_unchanged(context, project, target)
        version = _version(report, target)
        if RAW_DUMPS in selected:
            yield dg.MaterializeResult(RAW_DUMPS, metadata=_raw_metadata(report), data_version=version)
        yield dg.MaterializeResult(SAMPLES, metadata=_sample_metadata(report, str(loaded.store_path)), data_version=version)

    return extraction


def _check_specs(partitions: dg.PartitionsDefinition[str]) -> list[dg.AssetCheckSpec]:
    with warnings.catch_warnings():  # partitioned checks are in preview; Dagster's version is pinned
        warnings.simplefilter("ignore", dg.PreviewWarning)
        return [
            dg.AssetCheckSpec(
                _LEDGER, asset=SAMPLES, partitions_def=partitions, description="in = stored + dropped + failed; none failed."
            ),
            dg.AssetCheckSpec(
                _RULES, asset=SAMPLES, partitions_def=partitions, description="Every rule held for every sample of the run."
            ),
            dg.AssetCheckSpec(
                SPEC_CURRENT,
                asset=SAMPLES,
                partitions_def=partitions,
                description="The states were made under the state spec that layer_set recorded last.",
            ),
        ]


def _require_unchanged(context: dg.AssetExecutionContext, project: ProjectResource, target: Target) -> None:
    """Raise SpecChangedError unless this target is what is configured and recorded now. What is stored of it stays."""
    try:
        require_recorded(context.instance, resolve(project.load()))
        require_recorded(context.instance, target)
    except SpecChangedError:
        context.instance.add_run_tags(context.run.run_id, {SPEC_CHANGED_TAG: "true"})
        raise


def _version(report: Report, target: Target) -> dg.DataVersion:
    return dg.DataVersion(str(SamplesVersion(target.spec.fingerprint, target.layer_set.id, report.plan.prompts.version)))


def _fail_if_incomplete(key: str, report: Report) -> None:
    if report.problems:
        metadata = {"server log": dg.MetadataValue.path(report.server.log)} if report.server else {}
        raise dg.Failure(f"{key} is not complete:\n" + "\n".join(report.problems), metadata=metadata, allow_retries=False)


def _checks(report: Report) -> list[dg.AssetCheckResult]:
    manifest = _manifest(report)
    ledger, intake = manifest.ledger, report.intake
    counts = {rule: dict(counter) for rule, counter in intake.validator.counts.items()} if intake else {}
    metadata = {"ledger": dg.JsonMetadataValue(ledger.as_json()), "rows without states": _unstored_table(manifest)}
    rules = {"rules": dg.JsonMetadataValue(counts)}
    return [
        dg.AssetCheckResult(
            check_name=_LEDGER, asset_key=SAMPLES, passed=ledger.balances and not ledger.failed, metadata=metadata
        ),
        dg.AssetCheckResult(
            check_name=_RULES, asset_key=SAMPLES, passed=not any(count.get("failed") for count in counts.values()), metadata=rules
        ),
        dg.AssetCheckResult(
            check_name=SPEC_CURRENT,
            asset_key=SAMPLES,
            passed=True,
            severity=dg.AssetCheckSeverity.WARN,
            metadata={"stored": manifest.state_fingerprint},
        ),
    ]


def _raw_metadata(report: Report) -> dict[str, dg.MetadataValue]:
    state = "in the spool" if report.kept else "consumed"
    metadata: dict[str, dg.MetadataValue] = {
        "state": dg.TextMetadataValue(state),
        "requests": dg.IntMetadataValue(report.requests),
        "dumps found in the spool": dg.IntMetadataValue(report.adopted),
        "captured tokens": dg.IntMetadataValue(report.captured_tokens),
        "dump bytes": dg.IntMetadataValue(report.dump_bytes),
        "tokens per second": dg.FloatMetadataValue(round(report.tokens_per_second, 1)),
        "seconds of capture": dg.FloatMetadataValue(round(report.seconds, 3)),
        "seconds waited for room in the spool": dg.FloatMetadataValue(round(report.waited_for_spool_seconds, 3)),
        "spool high water (bytes)": dg.IntMetadataValue(report.spool_high_water_bytes),
    }
    if report.counters is not None:
        metadata["capture since the server started"] = dg.JsonMetadataValue(dataclasses.asdict(report.counters))
    if report.server is not None:
        server = report.server
        metadata["server"] = dg.JsonMetadataValue(
            {"server": server.server, "sglang": server.sglang_version, "identity": server.identity}
        )
        metadata["server log"] = dg.MetadataValue.path(server.log)
    if report.manifest is not None:
        crcs = sorted({part.dump_crc32 for sample in report.manifest.samples for part in sample.parts})
        metadata["checksum of all dump checksums"] = dg.TextMetadataValue(hashlib.sha256(repr(crcs).encode()).hexdigest())
    return metadata


def _sample_metadata(report: Report, store: str) -> dict[str, dg.MetadataValue]:
    manifest, intake = _manifest(report), report.intake
    ledger, layer_set = manifest.ledger, report.plan.layer_set
    tokens = sum(sample.tokens for sample in manifest.samples)
    metadata: dict[str, dg.MetadataValue] = {
        "rows": dg.IntMetadataValue(ledger.rows),
        "stored": dg.IntMetadataValue(ledger.stored),
        "dropped": dg.JsonMetadataValue(ledger.dropped),
        "rows without states": _unstored_table(manifest),
        "tokens": dg.IntMetadataValue(tokens),
        "supervised tokens": dg.IntMetadataValue(sum(sample.supervised_tokens for sample in manifest.samples)),
        "bytes": dg.IntMetadataValue(tokens * report.plan.layout.row_bytes),
        "layer_set": dg.TextMetadataValue(layer_set.id),
        "state_fingerprint": dg.TextMetadataValue(manifest.state_fingerprint),
        "store": dg.PathMetadataValue(store),
        "view": dg.TextMetadataValue(f"views/{layer_set.id}/{manifest.partition}.json"),
        "manifest changed": dg.BoolMetadataValue(report.manifest_changed),
    }
    for residual_id, norm in _mean_norms(manifest).items():
        metadata[f"norm of residual {residual_id}"] = dg.FloatMetadataValue(norm)
    if intake is not None and intake.generations:
        metadata["new bytes"] = dg.IntMetadataValue(intake.stored_bytes)
        differences = {OWN_LOGPROB: intake.validator.worst_logprob, OTHER_LOGPROB: intake.validator.nearest_logprob}
        metadata |= {name: dg.FloatMetadataValue(round(value, 4)) for name, value in differences.items() if math.isfinite(value)}
        metadata["rows compared by shared prefix"] = dg.IntMetadataValue(intake.validator.shared_prefix.rows_compared)
    return metadata


def _mean_norms(manifest: Manifest) -> dict[int, float]:
    """Residual id → mean over the samples of the mean length of their states."""
    norms: dict[int, list[float]] = {}
    for sample in manifest.samples:
        for part in sample.parts:
            for residual_id, norm in zip(part.residual_ids, part.norms, strict=True):
                norms.setdefault(residual_id, []).append(norm)
    return {residual_id: round(sum(values) / len(values), 4) for residual_id, values in sorted(norms.items())}


def _unstored_table(manifest: Manifest) -> dg.TableMetadataValue:
    records = [
        dg.TableRecord(
            {
                "sample": row.sample_id,
                "source row": row.source_row,
                "outcome": row.outcome,
                "reason": row.reason,
                "detail": row.detail[:300],
            }
        )
        for row in manifest.unstored
    ]
    columns = [
        dg.TableColumn("sample"),
        dg.TableColumn("source row", "int"),
        *(dg.TableColumn(n) for n in ("outcome", "reason", "detail")),
    ]
    return dg.TableMetadataValue(records, schema=dg.TableSchema(columns))


def _manifest(report: Report) -> Manifest:
    if report.manifest is None:
        raise dg.DagsterInvariantViolationError("a report of stored samples has a manifest")
    return report.manifest
