"""Threads that write dumps. A request always goes to the same thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from hs_assets.capture.assembly import Assembly, Chunk, failure_reason
from hs_assets.wire.rid import Rid
from hs_assets.wire.spool import DumpFiles

_SWEEP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Rows:
    """A chunk of one request, for `Assembly.add`; ``release`` hands its memory back."""

    files: DumpFiles
    rid: Rid
    prefix: int
    chunk: Chunk
    release: Callable[[], None]

    @property
    def size(self) -> int:
        return len(self.chunk.states)


@dataclass(frozen=True, slots=True)
class Failed:
    """A request that could not be captured; its failure record is written in the order of its rows."""

    files: DumpFiles
    rid: Rid
    reason: str
    detail: str

    @property
    def size(self) -> int:
        return 0


class Writers:
    """A fixed number of writer threads, each with its own queue and its own `Assembly`.

    Arguments:
        assemblies: makes the `Assembly` of each thread.
    """

    def __init__(self, threads: int, assemblies: Callable[[], Assembly]) -> None:
        self._queues: list[queue.SimpleQueue[Rows | Failed]] = [queue.SimpleQueue() for _ in range(threads)]
        self._assemblies = [assemblies() for _ in range(threads)]
        self._lock = threading.Lock()
        self._pending_jobs = 0
        self._pending_bytes = 0
        self.pending_high_water_bytes = 0
        self._threads = [
            threading.Thread(target=self._write, args=(number,), name=f"hs-assets-writer-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def assemblies(self) -> list[Assembly]:
        """That of each thread; others may look at their counts only."""
        return self._assemblies

    @property
    def idle(self) -> bool:
        """Whether everything that was handed over is written."""
        return self._pending_jobs == 0

    @property
    def pending_bytes(self) -> int:
        """Handed over and not yet written."""
        return self._pending_bytes

    @property
    def alive(self) -> int:
        """How many threads run."""
        return sum(thread.is_alive() for thread in self._threads)

    def put(self, job: Rows | Failed) -> None:
        """Hand over a chunk or a failure; never blocks."""
        with self._lock:
            self._pending_jobs += 1
            self._pending_bytes += job.size
            self.pending_high_water_bytes = max(self.pending_high_water_bytes, self._pending_bytes)
        self._queues[job.rid.row % len(self._queues)].put(job)  # rows come in order: neighbours go to different threads

    def _write(self, number: int) -> None:
        jobs, assembly, swept = self._queues[number], self._assemblies[number], time.monotonic()
        while True:
            if time.monotonic() - swept > _SWEEP_SECONDS:
                assembly.sweep()
                swept = time.monotonic()
            try:
                job = jobs.get(timeout=_SWEEP_SECONDS)
            except queue.Empty:
                continue
            if isinstance(job, Failed):
                _fail(assembly, job)
            else:
                _add(assembly, job)
            with self._lock:
                self._pending_jobs -= 1
                self._pending_bytes -= job.size


def _add(assembly: Assembly, job: Rows) -> None:
    try:
        assembly.add(job.files, job.rid, job.prefix, job.chunk)
    except Exception as error:  # the client learns of it by this sample's failure record; the thread lives on
        _fail(assembly, Failed(job.files, job.rid, failure_reason(error), repr(error)))
    finally:
        job.release()


def _fail(assembly: Assembly, failed: Failed) -> None:
    with suppress(OSError):  # no room even for a record: the client's own deadline fails the sample
        assembly.fail(failed.files, failed.rid, failed.reason, failed.detail)
