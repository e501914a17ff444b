"""The checks of a partition of `eagle3_samples`: evaluated by the step that makes it, which fails if one of them does.

Not blocking ones: a partition whose blocking check fails after it was materialised counts as made.
"""

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence

import dagster as dg

from hs_assets.config import Project
from hs_assets.defs.recorded import SAMPLES, SPEC_CURRENT
from hs_assets.defs.report_metadata import manifest_of, unstored_table
from hs_assets.extraction.extract import Report
from hs_assets.samples.rules import NOT_APPLICABLE
from hs_assets.store import open_store
from hs_assets.store.verify import spot_check

LEDGER, RULES, DROP_SHARE, STORE = "ledger", "rules", "drop_share", "store"

_DESCRIPTIONS = {
    LEDGER: "in = stored + dropped + failed; none failed.",
    RULES: "Every rule held for every sample of the run.",
    DROP_SHARE: "No more rows are dropped than prompts.max_dropped_share allows.",
    STORE: "What the manifest names is in the store; some samples are read whole, with their checksums (hs-assets verify: all).",
    SPEC_CURRENT: "The states were made under the state spec that layer_set recorded last.",
}
_SAMPLES_READ = 4


def check_specs(partitions: dg.PartitionsDefinition[str]) -> list[dg.AssetCheckSpec]:
    """All of them, each over the partitions."""
    with warnings.catch_warnings():  # partitioned checks are in preview; Dagster's version is pinned
        warnings.simplefilter("ignore", dg.PreviewWarning)
        return [
            dg.AssetCheckSpec(name, asset=SAMPLES, partitions_def=partitions, description=description)
            for name, description in _DESCRIPTIONS.items()
        ]


def check_results(project: Project, report: Report) -> list[dg.AssetCheckResult]:
    """Evaluate them for what a run made."""
    manifest, intake = manifest_of(report), report.intake
    ledger = manifest.ledger
    counts = intake.validator.counts if intake else {}
    broken = ", ".join(f"{rule} ({count['failed']} samples)" for rule, count in counts.items() if count["failed"])
    dropped, allowed = sum(ledger.dropped.values()), project.settings.prompts.max_dropped_share
    share = dropped / max(1, ledger.rows)
    damaged = [f"{found.where}: {found.detail}" for found in spot_check(open_store(project.store_path), manifest, _SAMPLES_READ)]
    return [
        _result(
            LEDGER,
            ledger.balances and not ledger.failed,
            f"{ledger.rows} rows = {ledger.stored} stored + {dropped} dropped + {sum(ledger.failed.values())} failed",
            {
                "stored": dg.IntMetadataValue(ledger.stored),
                "dropped": dg.IntMetadataValue(dropped),
                "failed": dg.IntMetadataValue(sum(ledger.failed.values())),
                "rows without states": unstored_table(manifest),
            },
        ),
        _result(
            RULES,
            not broken,
            f"did not hold: {broken}" if broken else "the samples that this run captured; what was stored before held then",
            {"rules": _rules_table(counts)},
        ),
        _result(
            DROP_SHARE,
            share <= allowed,
            f"{dropped} of {ledger.rows} rows are dropped; {allowed:.0%} may be (prompts.max_dropped_share)",
            {"dropped share": dg.FloatMetadataValue(round(share, 4)), "dropped": dg.JsonMetadataValue(ledger.dropped)},
        ),
        _result(
            STORE,
            not damaged,
            "; ".join(damaged) or f"the arrays of {len(manifest.samples)} samples are there, {_SAMPLES_READ} at most were read",
            {"problems": dg.JsonMetadataValue(damaged)},
        ),
        dg.AssetCheckResult(
            check_name=SPEC_CURRENT,
            asset_key=SAMPLES,
            passed=True,
            severity=dg.AssetCheckSeverity.WARN,
            metadata={"stored": manifest.state_fingerprint},
        ),
    ]


def failed_checks(results: Sequence[dg.AssetCheckResult]) -> list[str]:
    """What failed, as far as the report does not name it itself."""
    return [
        f"check {result.check_name}: {result.description}"
        for result in results
        if not result.passed and result.check_name in (DROP_SHARE, STORE)
    ]


def _rules_table(counts: Mapping[str, Counter[str]]) -> dg.TableMetadataValue:
    columns = {"held": "passed", "did not hold": "failed", "not applicable": NOT_APPLICABLE}
    records = [
        dg.TableRecord({"rule": rule, **{name: counted[key] for name, key in columns.items()}})
        for rule, counted in counts.items()
    ]
    schema = dg.TableSchema([dg.TableColumn("rule"), *(dg.TableColumn(name, "int") for name in columns)])
    return dg.TableMetadataValue(records, schema=schema)


def _result(name: str, passed: bool, description: str, metadata: dict[str, dg.MetadataValue]) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(check_name=name, asset_key=SAMPLES, passed=passed, description=description, metadata=metadata)
