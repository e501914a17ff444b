"""Why the last run of a partition failed, kept until it succeeds: what failed before a row was asked for is in no ledger.

``<home>/locks/<partition>.failed.json``, beside the partition's lock; so it is known without Dagster's instance.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from hs_assets.config import Home
from hs_assets.errors import WireError
from hs_assets.wire.records import Record

_SUFFIX = ".failed.json"
_CHARS = 300


@dataclass(frozen=True, slots=True)
class LastFailure(Record):
    """A failure of one step of a partition. ``at`` in seconds since the epoch; ``error``: its first line (`first_line`)."""

    kind: ClassVar[str] = "last-failure"
    step: str
    run_id: str
    at: float
    error: str


def first_line(error: str) -> str:
    """An error in one line: its first, with what was got where that is said below (errors.py)."""
    lines = error.strip().splitlines() or [""]
    line = f"{lines[0]} {lines[1].strip()}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    got = next((below.strip() for below in lines[1:] if below.startswith("  got: ")), None)
    return (f"{line} ({got})" if got else line)[:_CHARS]


def note_failure(home: Home, partition: str, failure: LastFailure) -> None:
    """Keep a failure, in place of the last one."""
    home.locks.mkdir(parents=True, exist_ok=True)
    failure.write(home.locks / f"{partition}{_SUFFIX}")


def forget_failure(home: Home, partition: str, step: str) -> None:
    """Forget the last failure, if it was of this step, which succeeded."""
    path = home.locks / f"{partition}{_SUFFIX}"
    with suppress(WireError):  # there is none, or another version's
        if LastFailure.read(path).step == step:
            path.unlink(missing_ok=True)


def last_failures(home: Home) -> dict[str, LastFailure]:
    """Partition → why its last run failed, of those whose last run did."""
    found = {}
    for path in sorted(home.locks.glob(f"*{_SUFFIX}")):
        with suppress(WireError):  # forgotten meanwhile, or another version's
            found[path.name.removesuffix(_SUFFIX)] = LastFailure.read(path)
    return found
