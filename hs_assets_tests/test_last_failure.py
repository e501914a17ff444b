"""Why the last run of a partition failed: one line of it, kept until the same step succeeds."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest

from hs_assets.config import Home
from hs_assets.defs.failures import why_failed
from hs_assets.errors import ServerStartError
from hs_assets.extraction.last_failure import LastFailure, first_line, forget_failure, last_failures, note_failure


@pytest.mark.parametrize(
    ("error", "line"),
    [
        ("one line", "one line"),
        ("", ""),
        (
            str(ServerStartError("it failed", where="/log", got="out of memory\n  got: more\ntail")),
            "it failed (got: out of memory)",
        ),
        ("x-00000 is not complete:\nchat-00000/0003 failed: finite", "x-00000 is not complete: chat-00000/0003 failed: finite"),
        ("x" * 1000, "x" * 300),
    ],
)
def test_an_error_in_one_line(error: str, line: str) -> None:
    assert first_line(error) == line


def test_a_failure_is_forgotten_by_the_step_that_failed_alone(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert last_failures(home) == {}
    first, second = LastFailure("prompts", "run-1", 1.0, "first"), LastFailure("extraction", "run-2", 2.0, "second")
    note_failure(home, "rows-00000", first)
    note_failure(home, "rows-00000", second)
    note_failure(home, "rows-00001", first)
    (home.locks / "rows-00002.failed.json").write_text("{")
    assert last_failures(home) == {"rows-00000": second, "rows-00001": first}
    for key in ("rows-00000", "rows-00001", "rows-00002", "rows-00003"):
        forget_failure(home, key, "prompts")
    assert last_failures(home) == {"rows-00000": second}


def test_of_a_run_that_was_killed_the_run_itself_says_why() -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        run = instance.add_run(dg.DagsterRun(job_name="extract", run_id=dg_run_id(), status=dg.DagsterRunStatus.STARTED))
        assert why_failed(instance, run.run_id) is None
        instance.report_run_failed(run, "its process is gone")
        failure = why_failed(instance, run.run_id)
    assert failure
    assert (failure.run_id, failure.error) == (run.run_id, "its process is gone")


def dg_run_id() -> str:
    return "00000000-0000-4000-8000-000000000000"
