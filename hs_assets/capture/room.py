"""The spool's budget, held by the server too: whatever clients do, a dump that does not fit fails alone."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path


class Room:
    """Gives room for dumps in a folder, up to a number of bytes; safe to use from many threads.

    What it counts is an upper bound: clients remove dumps without saying so, so the folder is looked at again when the
    bound reaches the limit. ``high_water_bytes`` is the most it ever counted.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._limit = limit
        self._taken = 0
        self._lock = threading.Lock()
        self.high_water_bytes = 0

    def reserve(self, descriptor: int, size: int) -> None:
        """Give an empty file of the folder its size.

        Raises:
            OSError: EDQUOT, it does not fit.
        """
        with self._lock:
            if self._taken + size > self._limit:
                self._taken = _bytes_in(self._folder)
            if self._taken + size > self._limit:
                raise OSError(errno.EDQUOT, f"{size} bytes do not fit: {self._taken} of {self._limit} are taken")
            os.ftruncate(descriptor, size)
            self._taken += size
            self.high_water_bytes = max(self.high_water_bytes, self._taken)

    def look(self) -> None:
        """Take the count from the folder."""
        with self._lock:
            self._taken = _bytes_in(self._folder)


def _bytes_in(folder: Path) -> int:
    total = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".safetensors"):
                try:
                    total += entry.stat().st_size
                except FileNotFoundError:
                    continue  # its client has just removed it
    return total
