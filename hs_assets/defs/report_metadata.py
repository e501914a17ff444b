"""What the UI shows of an extraction: the metadata of `raw_dumps` and `eagle3_samples`."""

import dataclasses
import hashlib
import math

import dagster as dg

from hs_assets.defs.plots import bar_chart, histogram
from hs_assets.extraction.extract import Report
from hs_assets.store.manifest import Manifest

OWN_LOGPROB, OTHER_LOGPROB = "largest logprob difference", "smallest logprob difference of another sample"
"""Metadata of `eagle3_samples`: how far the `logprob` rule was from failing, and from passing a mix-up."""


def raw_metadata(report: Report) -> dict[str, dg.MetadataValue]:
    """Of `raw_dumps`."""
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
    if report.server is not None:
        server = report.server
        metadata["server"] = dg.TextMetadataValue(f"{server.server}: SGLang {server.sglang_version}, identity {server.identity}")
        metadata["server log"] = dg.MetadataValue.path(server.log)
    if report.manifest is not None:
        crcs = sorted({part.dump_crc32 for sample in report.manifest.samples for part in sample.parts})
        metadata["checksum of all dump checksums"] = dg.TextMetadataValue(hashlib.sha256(repr(crcs).encode()).hexdigest())
    if report.counters is not None:
        metadata["capture since the server started"] = dg.JsonMetadataValue(dataclasses.asdict(report.counters))
    return metadata


def sample_metadata(report: Report, store: str) -> dict[str, dg.MetadataValue]:
    """Of `eagle3_samples`; `store` is its path."""
    manifest, intake = manifest_of(report), report.intake
    ledger, layer_set = manifest.ledger, report.plan.layer_set
    tokens = sum(sample.tokens for sample in manifest.samples)
    supervised = sum(sample.supervised_tokens for sample in manifest.samples)
    metadata: dict[str, dg.MetadataValue] = {
        "rows": dg.IntMetadataValue(ledger.rows),
        "stored": dg.IntMetadataValue(ledger.stored),
        "dropped share": dg.FloatMetadataValue(round(sum(ledger.dropped.values()) / max(1, ledger.rows), 4)),
        "dropped": dg.JsonMetadataValue(ledger.dropped),
        "rows without states": unstored_table(manifest),
        "tokens": dg.IntMetadataValue(tokens),
        "supervised tokens": dg.IntMetadataValue(supervised),
        "supervised share": dg.FloatMetadataValue(round(supervised / max(1, tokens), 4)),
        "histogram of lengths": histogram([sample.tokens for sample in manifest.samples], "tokens of a sample"),
        "bytes": dg.IntMetadataValue(tokens * report.plan.layout.row_bytes),
        "layer_set": dg.TextMetadataValue(layer_set.id),
        "state_fingerprint": dg.TextMetadataValue(manifest.state_fingerprint),
        "store": dg.PathMetadataValue(store),
        "view": dg.TextMetadataValue(f"views/{layer_set.id}/{manifest.partition}.json"),
        "manifest changed": dg.BoolMetadataValue(report.manifest_changed),
    }
    norms = _mean_norms(manifest)
    metadata |= {f"norm of residual {residual_id}": dg.FloatMetadataValue(norm) for residual_id, norm in norms.items()}
    profile = {str(i): round(norm, 2) for i, norm in norms.items()}
    metadata["norm profile"] = bar_chart(profile, "residual id", "mean norm of a state")
    if intake is not None and intake.generations:
        metadata["new bytes"] = dg.IntMetadataValue(intake.stored_bytes)
        differences = {OWN_LOGPROB: intake.validator.worst_logprob, OTHER_LOGPROB: intake.validator.nearest_logprob}
        metadata |= {name: dg.FloatMetadataValue(round(value, 4)) for name, value in differences.items() if math.isfinite(value)}
        if all(math.isfinite(value) for value in differences.values()):
            margin = intake.validator.nearest_logprob - intake.validator.worst_logprob
            metadata["logprob margin"] = dg.FloatMetadataValue(round(margin, 4))
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


def unstored_table(manifest: Manifest) -> dg.TableMetadataValue:
    """The rows without states, and why."""
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


def manifest_of(report: Report) -> Manifest:
    """The manifest that a report of stored samples has."""
    if report.manifest is None:
        raise dg.DagsterInvariantViolationError("a report of stored samples has a manifest")
    return report.manifest
