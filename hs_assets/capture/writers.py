"""Threads that write dumps, so that the scheduler's thread never does. A request always goes to the same thread."""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from hs_assets.capture.assembly import Assembly, DumpFacts, failure_reason
from hs_assets.wire.rid import Rid
from hs_assets.wire.spool import DumpFiles

_SWEEP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Rows:
    """A chunk of one request in host memory: what `Assembly.add` takes.

    ``buffers`` gives (token ids, states) as bytes once they may be read; on CUDA it waits for the copy. ``release``
    hands the memory back.
    """

    files: DumpFiles
    rid: Rid
    prefix: int
    buffers: Callable[[], tuple[memoryview, memoryview]]
    release: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Failed:
    """A request that could not be captured; its failure record is written in the order of its rows."""

    files: DumpFiles
    reason: str
    detail: str


class Writers:
    """A fixed number of writer threads, each with its own queue and its own `Assembly`."""

    def __init__(self, threads: int, facts: DumpFacts) -> None:
        self._queues: list[queue.SimpleQueue[Rows | Failed]] = [queue.SimpleQueue() for _ in range(threads)]
        for number, jobs in enumerate(self._queues):
            threading.Thread(target=_write, args=(jobs, Assembly(facts)), name=f"hs-assets-writer-{number}", daemon=True).start()

    def put(self, job: Rows | Failed) -> None:
        """Hand over a chunk or a failure; never blocks."""
        self._queues[zlib.crc32(job.files.rid.encode()) % len(self._queues)].put(job)


def _write(jobs: queue.SimpleQueue[Rows | Failed], assembly: Assembly) -> None:
    while True:
        try:
            job = jobs.get(timeout=_SWEEP_SECONDS)
        except queue.Empty:
            assembly.sweep()
            continue
        if isinstance(job, Failed):
            _fail(assembly, job)
            continue
        try:
            assembly.add(job.files, job.rid, job.prefix, *job.buffers())
        except Exception as error:  # the client learns of it by this sample's failure record; the thread lives on
            _fail(assembly, Failed(job.files, failure_reason(error), repr(error)))
        finally:
            job.release()


def _fail(assembly: Assembly, failed: Failed) -> None:
    with suppress(OSError):  # no room even for a record: the client's own deadline fails the sample
        assembly.fail(failed.files, failed.reason, failed.detail)
