"""Stands in for an interpreter with an SGLang that does not come up: a shell script, and a count of its starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

NO_ROOM = "echo 'the GPU has no room'; exit 3"


@dataclass(frozen=True, slots=True)
class BrokenSglang:
    """``server.python`` may name `python`; a start does what `behave` says in sh."""

    python: Path

    @classmethod
    def make(cls, folder: Path, behaviour: str = NO_ROOM) -> BrokenSglang:
        made = cls(folder / "python")
        made.python.write_text(
            f'#!/bin/sh\nif [ "$1" = -c ]; then echo 0.5.23; exit; fi\necho "$$" >> "{made._pids}"\n. "{made._behaviour}"\n'
        )
        made.python.chmod(0o700)
        made.behave(behaviour)
        return made

    @property
    def _pids(self) -> Path:
        return self.python.with_name("pids")

    @property
    def _behaviour(self) -> Path:
        return self.python.with_name("behaviour")

    def behave(self, behaviour: str) -> None:
        self._behaviour.write_text(behaviour)

    @property
    def pids(self) -> list[int]:
        """The processes that were started as a server, in order."""
        return [int(line) for line in self._pids.read_text().split()] if self._pids.exists() else []
