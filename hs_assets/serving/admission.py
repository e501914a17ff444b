"""Bytes in flight, over all processes of a home, never exceed the spool's budget: a full spool slows the pipeline.

A claim file is made before the request is sent and removed with the dump; what it says is counted, from that moment on.
Dumps that are not written yet have a smaller budget of their own: their states may still lie in device memory.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hs_assets.errors import SpoolError, WireError
from hs_assets.serving.state import lives, started
from hs_assets.wire.records import ClaimRecord
from hs_assets.wire.spool import COMMIT, DumpFiles, Spool

KEPT = 0
"""Owner of dumps that a run left on purpose (`raw_dumps` alone)."""

_POLL_SECONDS = 0.05
_SAY_SECONDS = 10.0


class Admission:
    """Claims room in a spool; safe to use from many threads and processes.

    Arguments:
        budget: most bytes of all dumps.
        backlog: most bytes of those that are not written yet; a larger one is let in alone.
        say: is told when requests wait for room.
        patience: seconds without any change after which a wait for room is given up.
    """

    def __init__(self, spool: Spool, budget: int, backlog: int, say: Callable[[str], None], patience: float = 600.0) -> None:
        self._spool = spool
        self._budget = budget
        self._backlog = backlog
        self._say = say
        self._patience = patience
        self._created = started(os.getpid())
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._waiting = 0
        self._use_seen = (0, 0)
        self._changed = 0.0
        self._stuck: tuple[int, int] | None = None
        self.waited_seconds = 0.0
        self.high_water_bytes = 0

    @property
    def blocked(self) -> bool:
        """Whether somebody in this process waits for room."""
        return self._waiting > 0

    def claim(self, files: DumpFiles, size: int, give_up: threading.Event) -> None:
        """Wait until `size` bytes are free, and claim them.

        Raises:
            SpoolError: the dump is larger than the whole budget, nobody makes room, or `give_up` was set meanwhile.
        """
        if size > self._budget:
            raise SpoolError(
                "the dump is larger than the spool",
                where=files.rid,
                expected=f"at most {self._budget:,} bytes",
                got=f"{size:,} bytes",
            )
        if self._try_claim(files, size):
            return
        began = said = time.monotonic()
        with self._counted():
            while not self._try_claim(files, size):
                if give_up.is_set():
                    raise SpoolError("the run ended while a request waited for room", where=files.rid)
                stuck = self._use_seen == self._stuck  # as it was when the last wait was given up: this one need not begin
                if stuck or time.monotonic() - max(self._changed, began) > self._patience:
                    self._stuck = self._use_seen
                    raise SpoolError(
                        "nobody makes room in the spool",
                        where=self._spool.root,
                        expected=f"{size:,} bytes within {self._patience:.0f} s",
                        got=self._taken,
                        remedy="materialise eagle3_samples of the partitions whose dumps lie there (hs-assets server status)",
                    )
                if time.monotonic() - said > _SAY_SECONDS:
                    said = time.monotonic()
                    sweep(self._spool)  # of runs that died meanwhile
                    self._say(f"the spool is full: a request has waited {said - began:.0f} s for {size:,} bytes; {self._taken}")
                time.sleep(_POLL_SECONDS)
        with self._lock:
            self.waited_seconds += time.monotonic() - began

    def _try_claim(self, files: DumpFiles, size: int) -> bool:
        with self._lock, _locked(self._spool):
            used, unwritten = self._use()
            if (used, unwritten) != self._use_seen:
                self._use_seen, self._changed = (used, unwritten), time.monotonic()
            if used + size > self._budget or (unwritten and unwritten + size > self._backlog):
                return False
            ClaimRecord(files.rid, size, os.getpid(), self._created).write(files.claim)
        self.high_water_bytes = max(self.high_water_bytes, used + size)
        return True

    @property
    def _taken(self) -> str:
        used, unwritten = self._use_seen
        return f"{used:,} of {self._budget:,} are taken, {unwritten:,} of {self._backlog:,} not written yet"

    def _use(self) -> tuple[int, int]:
        """Bytes of all dumps, and of those that are not written yet."""
        listing = self._spool.listing()
        known, self._sizes = self._sizes, {}
        for rid in listing:
            self._sizes[rid] = known[rid] if rid in known else bytes_of(self._spool.dump(rid))
        unwritten = sum(size for rid, size in self._sizes.items() if COMMIT not in listing[rid])
        return sum(self._sizes.values()), unwritten

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._lock:
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1


@contextmanager
def _locked(spool: Spool) -> Iterator[None]:
    """Nobody else claims or takes over anything in a spool while this is entered."""
    with (spool.root / "admission.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def adopt(spool: Spool, files: DumpFiles, owner: int | None = None) -> bool:
    """Take over a dump whose owner is gone or left it on purpose; returns whether it is ours now.

    Arguments:
        owner: the new owner: this process, or `KEPT`.
    """
    with _locked(spool):
        try:
            claim = ClaimRecord.read(files.claim)
        except WireError:  # freed at this very moment, or of another version
            return False
        if claim.pid not in (KEPT, os.getpid()) and lives(claim.pid, claim.created):
            return False
        pid = os.getpid() if owner is None else owner
        ClaimRecord(claim.rid, claim.bytes, pid, started(os.getpid())).write(files.claim)
        return True


def sweep(spool: Spool) -> int:
    """Free the dumps of processes that are gone, unless they are whole and can still be used; returns how many."""
    freed = 0
    for rid in spool.rids():
        files = spool.dump(rid)
        with suppress(FileNotFoundError):
            if not files.whole and _abandoned(files):
                files.free()
                freed += 1
    return freed


def _abandoned(files: DumpFiles) -> bool:
    try:
        claim = ClaimRecord.read(files.claim)
    except WireError:  # there is none, or one of another version
        return True
    return claim.pid != KEPT and not lives(claim.pid, claim.created)


def bytes_of(files: DumpFiles) -> int:
    """What the claim of a dump says, or the size of a dump that nobody claims any more."""
    with suppress(WireError):
        return ClaimRecord.read(files.claim).bytes
    with suppress(FileNotFoundError):
        return files.data.stat().st_size
    return 0


def spool_use(path: Path) -> tuple[int, int]:
    """Number of dumps in a spool, and their bytes."""
    spool = Spool(path)
    rids = spool.rids() if spool.dumps.is_dir() else []
    return len(rids), sum(bytes_of(spool.dump(rid)) for rid in rids)
