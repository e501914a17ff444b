"""A start that failed, kept beside the server's state, so that the runs after it do not wait minutes each for the same end.

The watchdog notes it, whoever waits for the start or does not any more. What cuts a start off (a signal to the watchdog, or
one to SGLang that asks it to end) is no failure: it says nothing about the next try.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from hs_assets.errors import ServerStartError, WireError
from hs_assets.serving.state import LaunchPlan, ServerFolder
from hs_assets.wire.records import Record

REMEMBERED_SECONDS = 300.0
"""How long after a failure runs do not try the same again.

Long enough that a backfill's runs, seconds apart, share one try; short enough that what heals by itself (memory of a GPU that
somebody else gives back, a disk that is mounted late) costs a night's backfill minutes.
"""


@dataclass(frozen=True, slots=True)
class FailedStart(Record):
    """Why a server did not come up."""

    kind: ClassVar[str] = "failed-start"
    attempt: str
    """`LaunchPlan.attempt` of the plan that was tried."""
    at: float
    """When it failed, in seconds since the epoch."""
    where: str
    """SGLang's log, or the folder of the watchdog's."""
    error: str
    """What is wrong, and the end of that log."""


def note_failed_start(folder: ServerFolder, plan: LaunchPlan, where: object, error: str) -> None:
    """Keep a failure, in place of an earlier one."""
    FailedStart(plan.attempt, time.time(), str(where), error).write(folder.failed_start)


def forget_failed_start(folder: ServerFolder, plan: LaunchPlan) -> None:
    """Forget a failure of this plan, which is tried again; that of another one is still to be known."""
    if _read(folder, plan) is not None:
        folder.failed_start.unlink(missing_ok=True)


def raise_if_failed_just_now(folder: ServerFolder, plan: LaunchPlan) -> None:
    """Raise ServerStartError, with what was wrong, where a start of this plan failed within `REMEMBERED_SECONDS`."""
    failed = _read(folder, plan)
    if failed is None or not 0 <= time.time() - failed.at < REMEMBERED_SECONDS:  # of a time to come: the clock was set back
        return
    raise ServerStartError(
        f"the server did not come up when it was tried at {_clock(failed.at)}, so nothing was tried again",
        where=failed.where,
        got=failed.error,
        remedy="mend what it says, then hs-assets server start, which always tries. A run tries again from "
        f"{_clock(failed.at + REMEMBERED_SECONDS)} on, or at once where the configuration changed",
    )


def _read(folder: ServerFolder, plan: LaunchPlan) -> FailedStart | None:
    """What is kept of this plan; None where there is nothing, or another version's."""
    with suppress(WireError):
        failed = FailedStart.read(folder.failed_start)
        return failed if failed.attempt == plan.attempt else None
    return None


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
