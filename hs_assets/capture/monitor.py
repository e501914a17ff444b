"""A rank's counters, written to the spool every second: what people watch, and by what the watchdog knows a dead thread."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hs_assets.capture.room import Room
from hs_assets.capture.transfer import Transfer
from hs_assets.capture.writers import Writers
from hs_assets.wire.records import CountersRecord

_SECONDS = 1.0
_RATE_OVER = 10
"""Records that a rate looks back."""
_POLL_SECONDS = 0.02


class Monitor:
    """Counts what one rank's capture does, in a thread of its own."""

    def __init__(self, path: Path, server: str, rank: int, writers: Writers, transfer: Transfer, room: Room) -> None:
        self._path = path
        self._server = server
        self._rank = rank
        self._writers = writers
        self._transfer = transfer
        self._room = room
        self._scheduler_seconds = 0.0
        self._history: deque[tuple[float, int, int]] = deque([(time.monotonic(), 0, 0)], maxlen=_RATE_OVER + 1)
        threading.Thread(target=self._write_all, name="hs-assets-monitor", daemon=True).start()

    @contextmanager
    def on_scheduler(self) -> Iterator[None]:
        """Count the time of what is done on the scheduler's thread."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._scheduler_seconds += time.perf_counter() - began

    def drain(self, seconds: float) -> None:
        """Return when everything that was captured is written, or after so many seconds."""
        deadline = time.monotonic() + seconds
        while not (self._transfer.idle and self._writers.idle) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        with suppress(OSError):
            self.record().write(self._path)

    def record(self) -> CountersRecord:
        """The counters now."""
        self._room.look()
        assemblies, writers = self._writers.assemblies, self._writers
        tokens, size = sum(one.tokens for one in assemblies), sum(one.bytes for one in assemblies)
        before, tokens_before, size_before = self._history[0]
        now = time.monotonic()
        self._history.append((now, tokens, size))
        elapsed = max(now - before, _POLL_SECONDS)
        return CountersRecord(
            server=self._server,
            rank=self._rank,
            at=time.time(),
            dumps=sum(one.dumps for one in assemblies),
            failures=dict(sum((Counter(dict(one.failures)) for one in assemblies), Counter())),
            tokens=tokens,
            bytes=size,
            tokens_per_second=(tokens - tokens_before) / elapsed,
            bytes_per_second=(size - size_before) / elapsed,
            pending_bytes=writers.pending_bytes + self._transfer.backlog_bytes,
            pending_high_water_bytes=writers.pending_high_water_bytes,
            device_high_water_bytes=self._transfer.high_water_bytes,
            spool_high_water_bytes=self._room.high_water_bytes,
            writer_seconds=writers.cpu_seconds,
            scheduler_seconds=self._scheduler_seconds,
            threads=writers.count + 1,
            threads_alive=writers.alive + self._transfer.alive,
        )

    def _write_all(self) -> None:
        while True:
            with suppress(Exception):  # a full spool, say: the next one may fit
                self.record().write(self._path)
            time.sleep(_SECONDS)
