"""Failures of runs in one line: kept beside the partition as a step fails, and read from the instance afterwards."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg

from hs_assets.config import Home
from hs_assets.defs.project import ProjectResource
from hs_assets.extraction.last_failure import LastFailure, first_line, forget_failure, note_failure

_MODULE = re.compile(r"^[\w.]+\.(?=\w+: )")
"""What Dagster puts before the name of an error's class."""


@contextmanager
def keeping_failure(context: dg.AssetExecutionContext, project: ProjectResource, step: str) -> Iterator[None]:
    """Keep why a step of the run's partition fails, or forget why it did when it succeeds. A retry is not yet either."""
    home, key = Home(Path(project.home)), context.partition_key
    try:
        yield
    except dg.RetryRequested:
        raise
    except Exception as error:
        told = error.description or "" if isinstance(error, dg.Failure) else f"{type(error).__name__}: {error}"
        note_failure(home, key, LastFailure(step, context.run.run_id, time.time(), first_line(told)))
        raise
    forget_failure(home, key, step)


def why_failed(instance: dg.DagsterInstance, run_id: str) -> LastFailure | None:
    """Why a run failed, as its events say: its first step that did, else the run itself, whose process may be gone."""
    kinds = {dg.DagsterEventType.STEP_FAILURE, dg.DagsterEventType.RUN_FAILURE}
    entries = [record.event_log_entry for record in instance.get_records_for_run(run_id, of_type=kinds).records]
    for entry in sorted(entries, key=lambda one: one.dagster_event_type != dg.DagsterEventType.STEP_FAILURE):
        event = entry.get_dagster_event()
        return LastFailure(event.step_key or "", run_id, entry.timestamp, first_line(_told(event) or event.message or ""))
    return None


def _told(event: dg.DagsterEvent) -> str | None:
    if not event.is_step_failure:
        return None
    data = event.step_failure_data
    if data.user_failure_data is not None:
        return data.user_failure_data.description
    error = data.error.cause or data.error if data.error else None
    return _MODULE.sub("", error.message) if error else None
