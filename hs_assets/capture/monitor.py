"""A rank's counters, written to the spool every second: what people watch, and by what the watchdog knows a dead writer."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hs_assets.capture.ring import Ring
from hs_assets.capture.transfer import Transfer
from hs_assets.wire.records import CountersRecord

_SECONDS = 1.0
_RATE_OVER = 10
"""Records that a rate looks back."""
_SHORTEST_SECONDS = 0.02


class Monitor:
    """Counts what one rank's capture does, in a thread of its own: what the writers say, and what is seen here."""

    def __init__(self, path: Path, server: str, rank: int, transfer: Transfer, ring: Ring) -> None:
        self._path = path
        self._server = server
        self._rank = rank
        self._transfer = transfer
        self._ring = ring
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

    def _write_all(self) -> None:
        while True:
            with suppress(Exception):  # a full spool, say: the next one may fit
                self._record().write(self._path)
            time.sleep(_SECONDS)

    def _record(self) -> CountersRecord:
        stats = self._ring.stats()
        before, tokens_before, bytes_before = self._history[0]
        now = time.monotonic()
        self._history.append((now, stats.tokens, stats.bytes))
        elapsed = max(now - before, _SHORTEST_SECONDS)
        return CountersRecord(
            server=self._server,
            rank=self._rank,
            at=time.time(),
            dumps=stats.dumps,
            failures=stats.failures,
            tokens=stats.tokens,
            bytes=stats.bytes,
            tokens_per_second=(stats.tokens - tokens_before) / elapsed,
            bytes_per_second=(stats.bytes - bytes_before) / elapsed,
            pending_bytes=self._transfer.backlog_bytes + self._ring.pending_bytes,
            pending_high_water_bytes=self._ring.pending_high_water_bytes,
            device_high_water_bytes=self._transfer.high_water_bytes,
            spool_high_water_bytes=stats.spool_high_water_bytes,
            writer_seconds=stats.writer_seconds,
            scheduler_seconds=self._scheduler_seconds,
            workers=self._ring.task.writers + 1,
            workers_alive=self._ring.alive + self._transfer.alive,
        )
