"""The spool's budget, held by the server too: whatever clients do, a dump that does not fit fails alone."""

from __future__ import annotations

import errno
import os
import threading

from hs_assets.wire.spool import Spool


class Room:
    """Gives room for dumps in a spool, up to a number of bytes; safe to use from many threads.

    What it counts is an upper bound: clients remove dumps without saying so, so the spool is looked at again when the
    bound reaches the limit. ``high_water_bytes`` is the most it ever counted.
    """

    def __init__(self, spool: Spool, limit: int) -> None:
        self._spool = spool
        self._limit = limit
        self._taken = 0
        self._lock = threading.Lock()
        self.high_water_bytes = 0

    def reserve(self, descriptor: int, size: int) -> None:
        """Give an empty file of the spool its size.

        Raises:
            OSError: EDQUOT, it does not fit.
        """
        with self._lock:
            if self._taken + size > self._limit:
                self._taken = self._lying()
            if self._taken + size > self._limit:
                raise OSError(errno.EDQUOT, f"{size} bytes do not fit: {self._taken} of {self._limit} are taken")
            os.ftruncate(descriptor, size)
            self._taken += size
            self.high_water_bytes = max(self.high_water_bytes, self._taken)

    def look(self) -> None:
        """Take the count from the spool."""
        with self._lock:
            self._taken = self._lying()

    def _lying(self) -> int:
        """Bytes of all dumps that lie in the spool."""
        return sum(found.st_size for found in self._spool.data_stats())
