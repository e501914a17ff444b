"""The spool's budget, held by the server too: whatever clients do, a dump that does not fit fails alone."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hs_assets.wire.spool import Spool

_COUNTS = struct.Struct("<qq")


@dataclass(slots=True)
class _Counts:
    """Bytes taken now, and the most there ever were."""

    taken: int
    high_water: int


class Room:
    """Gives room for dumps in a spool, up to a number of bytes; several processes share one budget.

    What they count, in a file of the spool, is an upper bound: clients remove dumps without saying so, so the spool is looked
    at again when the bound reaches the limit.
    """

    def __init__(self, spool: Spool, limit: int) -> None:
        self._spool = spool
        self._limit = limit

    def reserve(self, descriptor: int, size: int) -> None:
        """Give an empty file of the spool its size.

        Raises:
            OSError: EDQUOT, it does not fit.
        """
        with self._counts() as counts:
            if counts.taken + size > self._limit:
                counts.taken = self._lying()
            if counts.taken + size > self._limit:
                raise OSError(errno.EDQUOT, f"{size} bytes do not fit: {counts.taken} of {self._limit} are taken")
            os.ftruncate(descriptor, size)
            counts.taken += size
            counts.high_water = max(counts.high_water, counts.taken)

    def high_water_bytes(self) -> int:
        """The most that was ever counted; takes the count from the spool anew."""
        with self._counts() as counts:
            counts.taken = self._lying()
            return counts.high_water

    @contextmanager
    def _counts(self) -> Iterator[_Counts]:
        """The counts, nobody else's meanwhile; what is changed is kept."""
        descriptor = os.open(self._spool.room, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            kept = os.pread(descriptor, _COUNTS.size, 0)
            counts = _Counts(*_COUNTS.unpack(kept)) if kept else _Counts(self._lying(), 0)
            try:
                yield counts
            finally:
                os.pwrite(descriptor, _COUNTS.pack(counts.taken, counts.high_water), 0)
        finally:
            os.close(descriptor)

    def _lying(self) -> int:
        """Bytes of all dumps that lie in the spool."""
        return sum(found.st_size for found in self._spool.data_stats())


def forget(spool: Spool) -> None:
    """Begin to count anew: another server did before."""
    spool.room.unlink(missing_ok=True)
