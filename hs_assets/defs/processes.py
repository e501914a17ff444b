"""Which process a run is in, so that a run whose process was killed is not taken for one that goes on.

The default launcher does not watch its processes: such a run would keep its partition busy, and one of the places for runs.
"""

import os
import socket

import dagster as dg

from hs_assets.serving.state import lives, started

PROCESS_TAG = ".dagster/hs_assets/process"
"""Of a run that is at a step: ``<host>/<pid>/<when it started, in clock ticks since boot>``. The pages leave out tags that begin
with ``.dagster/``: in lists of runs it would take more room than the partition."""


def note_process(context: dg.AssetExecutionContext) -> None:
    """Note on the run that it is in this process."""
    pid = os.getpid()
    context.instance.add_run_tags(context.run.run_id, {PROCESS_TAG: f"{socket.gethostname()}/{pid}/{started(pid)}"})


def fail_dead_runs(instance: dg.DagsterInstance) -> list[str]:
    """Report as failed what is said to run in a process of this host that is gone; returns the runs' ids."""
    running = dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING])
    dead = [run for run in instance.get_runs(running) if PROCESS_TAG in run.tags and not _lives(run.tags[PROCESS_TAG])]
    for run in dead:
        instance.report_run_failed(run, "its process is gone: it was killed, or the machine was started anew")
    return [run.run_id for run in dead]


def _lives(process: str) -> bool:
    """Whether a process lives; one of another host is taken to."""
    host, pid, created = process.rsplit("/", 2)
    return host != socket.gethostname() or lives(int(pid), float(created))
