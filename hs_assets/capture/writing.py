"""The writer process of a scheduler: reads blocks of shared memory, and writes dumps into the spool.

It ends when the scheduler closes its line or dies, after everything that it was sent is written.
"""

from __future__ import annotations

import mmap
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from hs_assets.capture.assembly import Assembly, Chunk
from hs_assets.capture.messages import BlockLayout, Filled, WritingStats, WritingTask, decode, encode
from hs_assets.capture.room import Room
from hs_assets.capture.writers import Failed, Rows, Writers
from hs_assets.errors import WireError
from hs_assets.wire.dump import DumpLayout
from hs_assets.wire.rid import Kind, Rid, parse_rid
from hs_assets.wire.spool import DumpFiles, Spool

_STATS_SECONDS = 1.0
_POLL_SECONDS = 0.01


class Writing:
    """Hands what the scheduler says to the writers, and each block back when they have written all of it."""

    def __init__(self, task: WritingTask, memory: memoryview, lines: socket.socket) -> None:
        self._rank = task.rank
        self._spool = Spool(Path(task.spool))
        self._memory = memory
        self._block_bytes = task.block_bytes
        self._lines = lines
        self._unwritten = [0] * task.blocks
        self._lock = threading.Lock()
        self.room = Room(self._spool, task.spool_bytes)
        self.writers = Writers(task.threads, lambda: Assembly(task.facts, self.room))
        self._probe_writers = Writers(1, lambda: Assembly(task.probe_facts, self.room))
        one = (DumpLayout(1, f.residual_ids, f.hidden_size, f.dtype) for f in (task.facts, task.probe_facts))
        self._layout, self._probe_layout = (BlockLayout(task.block_bytes, row.row_bytes) for row in one)

    @property
    def idle(self) -> bool:
        """Whether everything is written."""
        return self.writers.idle and self._probe_writers.idle

    def serve(self, lines: Iterable[bytes]) -> None:
        """Take one line after another until there are no more."""
        for line in lines:
            message = decode(line)
            if isinstance(message, Filled):
                self._hand_over(message)
            else:
                rid, files = self._find(message.rid)
                self.writers.put(Failed(files, rid, message.reason, message.detail))

    def _hand_over(self, filled: Filled) -> None:
        writers, layout = (self._probe_writers, self._probe_layout) if filled.probe else (self.writers, self._layout)
        begin = filled.block * self._block_bytes
        block = self._memory[begin : begin + self._block_bytes]
        self._unwritten[filled.block] = len(filled.parts)
        release = partial(self._release, filled.block)
        for part in filled.parts:
            rid, files = self._find(part.rid, probe=filled.probe)
            rows = part.start, part.start + part.rows
            chunk = Chunk(
                block[layout.token_ids(*rows)], block[layout.checksums(*rows)], block[layout.states(*rows)], part.begins
            )
            writers.put(Rows(files, rid, part.prefix, chunk, release))

    def _find(self, text: str, *, probe: bool = False) -> tuple[Rid, DumpFiles]:
        rid = parse_rid(text)
        if rid is None:
            raise WireError("a request id is not one of ours", got=text)
        if rid.kind is not Kind.CANARY:
            return rid, self._spool.dump(text)
        return rid, self._spool.canary_dump(self._rank, f"{text}.probe" if probe else text)

    def _release(self, block: int) -> None:
        with self._lock:
            self._unwritten[block] -= 1
            done = self._unwritten[block] == 0
        if done:
            with suppress(OSError):  # the scheduler is gone; the next dump still counts
                self._lines.sendall(bytes([block]))

    def stats(self) -> WritingStats:
        """The numbers now."""
        self.room.look()
        assemblies = self.writers.assemblies
        return WritingStats(
            dumps=sum(one.dumps for one in assemblies),
            failures=dict(sum((Counter(dict(one.failures)) for one in assemblies), Counter())),
            tokens=sum(one.tokens for one in assemblies),
            bytes=sum(one.bytes for one in assemblies),
            pending_bytes=self.writers.pending_bytes,
            pending_high_water_bytes=self.writers.pending_high_water_bytes,
            spool_high_water_bytes=self.room.high_water_bytes,
            writer_seconds=time.process_time(),
            threads_alive=self.writers.alive,
        )


def main(memory: int, line: int, stats: int, task: WritingTask) -> None:
    """Run as the writer process, with the descriptors of the shared memory and of both lines."""
    for number in (signal.SIGTERM, signal.SIGINT):  # sent to the whole group; the scheduler says when to end
        signal.signal(number, signal.SIG_IGN)
    mapped = mmap.mmap(memory, task.blocks * task.block_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    with socket.socket(fileno=line) as messages, socket.socket(fileno=stats) as counters:
        writing = Writing(task, memoryview(mapped), messages)
        threading.Thread(target=_report, args=(writing, counters), name="hs-assets-stats", daemon=True).start()
        with messages.makefile("rb") as lines:
            writing.serve(lines)
        while not writing.idle:
            time.sleep(_POLL_SECONDS)
        with suppress(OSError):
            counters.sendall(encode(writing.stats()))


def _report(writing: Writing, stats: socket.socket) -> None:
    with suppress(OSError):  # the scheduler is gone
        while True:
            stats.sendall(encode(writing.stats()))
            time.sleep(_STATS_SECONDS)


def run(words: list[str]) -> None:
    """Run with the words of a command line."""
    memory, line, stats, task = words
    main(int(memory), int(line), int(stats), WritingTask.from_json(task))


if __name__ == "__main__":
    run(sys.argv[1:])
