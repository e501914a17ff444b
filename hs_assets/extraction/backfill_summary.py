"""A readable page on a finished backfill: what became of its partitions and rows, and why."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hs_assets.extraction.last_failure import LastFailure
from hs_assets.extraction.status import PartitionStatus

SHOWN = 200
"""Partitions that are not made and are listed, at most."""


@dataclass(frozen=True, slots=True)
class FinishedBackfill:
    """A backfill as its instance knows it; times in seconds since the epoch, ``runs``: partition → the id of its last run;
    ``failures``: partition → why that run failed, of those that are not made."""

    backfill_id: str
    outcome: str
    began: str
    seconds: float
    partitions: Sequence[str]
    made: frozenset[str]
    runs: dict[str, str]
    failures: dict[str, LastFailure]


def summarize(backfill: FinishedBackfill, statuses: Sequence[PartitionStatus]) -> str:
    """Markdown. `statuses`: of the backfill's partitions, as the store has them now."""
    not_made = [key for key in backfill.partitions if key not in backfill.made]
    rows, stored, tokens, size = (sum(getattr(one, name) for one in statuses) for name in ("rows", "stored", "tokens", "bytes"))
    pending = sum(one.pending for one in statuses)
    dropped, failed = Counter[str](), Counter[str]()
    for one in statuses:
        dropped.update(one.dropped)
        failed.update(one.failed)
    lines = [
        f"# Backfill {backfill.backfill_id}: {backfill.outcome}",
        "",
        f"Began {backfill.began}, took {backfill.seconds:,.0f} s.",
        "",
        f"- partitions: {len(backfill.partitions)}, of which {len(not_made)} are not made",
        f"- rows: {rows:,} = {stored:,} stored + {dropped.total():,} dropped + {failed.total():,} failed + {pending:,} pending",
        f"- states: {tokens:,} tokens, {size:,} bytes, of layer set {', '.join({one.layer_set for one in statuses}) or 'none'}",
    ]
    for title, reasons in (("Dropped", dropped), ("Failed", failed)):
        if reasons:
            lines += ["", f"## {title}", "", "| reason | rows |", "|---|---|"]
            lines += [f"| {reason} | {count:,} |" for reason, count in reasons.most_common()]
    if damaged := [one for one in statuses if one.problem is not None]:
        lines += ["", "## Partitions that cannot be read", "", "Their rows count as pending.", ""]
        lines += ["| partition | why |", "|---|---|"]
        lines += [f"| {one.partition} | {_escaped(' '.join((one.problem or '').split()))} |" for one in damaged[:SHOWN]]
        if len(damaged) > SHOWN:
            lines.append(f"| and {len(damaged) - SHOWN} more | |")
    if not_made:
        by_key = {one.partition: one for one in statuses}
        lines += ["", "## Partitions that are not made", "", "| partition | run | rows that failed | the run failed |"]
        lines.append("|---|---|---|---|")
        for key in not_made[:SHOWN]:
            reasons_of = ", ".join(f"{reason} {count}" for reason, count in by_key[key].failed.items()) if key in by_key else ""
            why = _cell(backfill.failures[key]) if key in backfill.failures else ""
            lines.append(f"| {key} | {backfill.runs.get(key, 'none')} | {reasons_of or 'none'} | {why or 'see the run'} |")
        if len(not_made) > SHOWN:
            lines.append(f"| and {len(not_made) - SHOWN} more | | | |")
        lines += ["", 'Redo them: `eagle3_samples`, Materialize, "failed and missing". What is stored is not asked for again.']
    return "\n".join(lines) + "\n"


def _cell(failure: LastFailure) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(failure.at))
    return _escaped(f"{when}: {failure.error}")


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
