"""What the model generated, turn by turn: a file that only grows, so that a run which is killed is asked for nothing twice.

``<home>/responses/<partition>.jsonl``: a line for every turn, on disk before the next one is asked for.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from hs_assets.errors import ExtractionError
from hs_assets.samples.answers import Generation


class GenerationLog:
    """The generations of a partition under one spec; use as a context manager, one process at a time. Threads may share it.

    ``added`` and ``added_tokens`` count what was added since it was opened.

    Raises:
        ExtractionError: a line, other than a last one that was cut, cannot be read.
    """

    def __init__(self, path: Path, spec_fingerprint: str) -> None:
        self._path = path
        self._spec = spec_fingerprint
        self._lock = threading.Lock()
        self.added = self.added_tokens = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab+")
        try:
            self._known = self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def find(self, source_sha256: str, turn: int, prompt_sha256: str) -> Generation | None:
        """What was generated for a turn of a row after just this prompt."""
        return self._known.get((source_sha256, turn, prompt_sha256))

    def add(self, source_sha256: str, turn: int, prompt_sha256: str, made: Generation) -> None:
        """Append a generation; it is on disk when this returns."""
        line = {
            "spec": self._spec,
            "source_sha256": source_sha256,
            "turn": turn,
            "prompt_sha256": prompt_sha256,
            "finish": made.finish,
            "server": made.server,
            "output_ids": made.output_ids,
        }
        with self._lock:
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
            self._known[source_sha256, turn, prompt_sha256] = made
            self.added += 1
            self.added_tokens += len(made.output_ids)

    def _read(self) -> dict[tuple[str, int, str], Generation]:
        self._file.seek(0)
        known, whole = {}, 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                entry = json.loads(line)
                key = entry["source_sha256"], entry["turn"], entry["prompt_sha256"]
                made = Generation(tuple(entry["output_ids"]), entry["finish"], entry["server"])
                mine = entry["spec"] == self._spec
            except (ValueError, KeyError, TypeError) as error:
                where, remedy = f"{self._path}, line {number}", "remove the line: what it held is asked for again"
                raise ExtractionError("a generation cannot be read", where=where, got=repr(error), remedy=remedy) from error
            whole += len(line)
            if mine:
                known[key] = made
        self._file.truncate(whole)  # a line that was cut as the last run was killed
        return known
