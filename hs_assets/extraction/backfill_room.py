"""Room for all of a backfill, looked at once: by the first of its runs, before anything is asked for.

The need is kept in ``<home>/reports/backfill-<id>.need.json``. Where it fitted, the other runs go by that and look after their
own partition; where it did not, each compares it anew with the room there is, so that making room is enough.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hs_assets.config import Project
from hs_assets.errors import ExtractionError
from hs_assets.extraction.extract import Say, alone
from hs_assets.extraction.preflight import Need, judge, predict
from hs_assets.serving.launch import Target
from hs_assets.wire.records import write_atomic


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a backfill is to extract. ``kept``: the dumps are to stay in the spool (`raw_dumps` alone)."""

    partitions: Collection[str]
    kept: bool


def require_room(project: Project, target: Target, backfill: str, wanted: Callable[[], Wanted], say: Say) -> None:
    """Raise ExtractionError, with the numbers, unless what is missing of a backfill's partitions fits.

    Arguments:
        backfill: its id.
        wanted: what it is to extract; called by the first run, and until it fits where dumps stay.
    """
    path = project.home.reports / f"backfill-{backfill}.need.json"
    with alone(project, f"backfill-{backfill}", say):
        if (known := _read(path)) is not None:
            need = known
            if not need.problems:
                return
            judge(project, need, wanted().partitions if need.kept else None)  # beside dumps of others, where they stay
        else:
            whole = wanted()
            need = predict(project, target, whole.partitions, kept=whole.kept)
            guessed = f", {need.estimated} of them estimated" if need.estimated else ""
            guessed += f", {len(need.damaged)} that cannot be read not counted" if need.damaged else ""
            say(
                f"backfill {backfill}: {need.partitions} partitions{guessed} lack {need.samples:,} samples: {need.store_bytes:,} "
                f"bytes for the store, where {need.store_free_bytes:,} are free; the largest dump has {need.largest_dump_bytes:,}"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(need.as_json()))
    if need.problems:
        raise ExtractionError(
            "this backfill cannot fit, so nothing of it is begun",
            where=f"backfill {backfill}, {need.partitions} partitions",
            expected=f"{need.store_bytes:,} bytes of store for {need.samples:,} samples, {need.dump_bytes:,} bytes of dumps",
            got="\n".join(need.problems),
            remedy='make room, then launch "failed and missing"; or launch it for fewer partitions (hs-assets plan PARTITION …)',
        )


def _read(path: Path) -> Need | None:
    """The need that was kept; None where there is none, or another version's or half of one."""
    with suppress(FileNotFoundError, ValueError, TypeError):
        return Need(**json.loads(path.read_text()))
    return None
