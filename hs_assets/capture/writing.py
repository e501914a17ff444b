"""A writer process: reads blocks of the memory that it shares with a scheduler, and writes dumps into the spool.

It ends when the scheduler closes its line or dies, after everything that it was sent is written.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from hs_assets.capture.assembly import Assembly, Chunk, failure_reason
from hs_assets.capture.messages import BlockLayout, Filled, Lost, Part, WritingStats, WritingTask, decode, encode
from hs_assets.capture.room import Room
from hs_assets.errors import WireError
from hs_assets.wire.dump import DumpLayout
from hs_assets.wire.rid import Kind, Rid, parse_rid
from hs_assets.wire.spool import DumpFiles, Spool

_STATS_SECONDS = 0.5


class Writing:
    """Writes what the scheduler says, and hands each block back."""

    def __init__(self, task: WritingTask, memory: memoryview) -> None:
        self._task = task
        self._spool = Spool(Path(task.spool))
        self._memory = memory
        self._room = Room(self._spool, task.spool_bytes)
        self._assembly, self._probe_assembly = (Assembly(facts, self._room) for facts in (task.facts, task.probe_facts))
        one = (DumpLayout(1, f.residual_ids, f.hidden_size, f.dtype) for f in (task.facts, task.probe_facts))
        self._layout, self._probe_layout = (BlockLayout(task.block_bytes, row.row_bytes) for row in one)

    def do(self, message: Filled | Lost, hand_back: Callable[[int], None]) -> None:
        """Write the rows in a block, or tell a failure. Errors are those of single samples: their clients learn of them."""
        if isinstance(message, Lost):
            rid, files = self._find(message.rid)
            _fail(self._assembly, files, rid, message.reason, message.detail)
            return
        for part in message.parts:
            self._write(part, message)
        hand_back(message.block)

    def _write(self, part: Part, filled: Filled) -> None:
        assembly, layout = (self._probe_assembly, self._probe_layout) if filled.probe else (self._assembly, self._layout)
        begin = filled.block * self._task.block_bytes
        block, rows = self._memory[begin : begin + self._task.block_bytes], (part.start, part.start + part.rows)
        ids, sums, states = (block[where(*rows)] for where in (layout.token_ids, layout.checksums, layout.states))
        rid, files = self._find(part.rid, probe=filled.probe)
        try:
            assembly.add(files, rid, part.prefix, Chunk(ids, sums, states, part.begins))
        except Exception as error:  # whatever it is, it is this sample's failure
            _fail(assembly, files, rid, failure_reason(error), repr(error))

    def _find(self, text: str, *, probe: bool = False) -> tuple[Rid, DumpFiles]:
        rid = parse_rid(text)
        if rid is None:
            raise WireError("a request id is not one of ours", got=text)
        if rid.kind is not Kind.CANARY:
            return rid, self._spool.dump(text)
        return rid, self._spool.canary_dump(self._task.rank, f"{text}.probe" if probe else text)

    def stats(self) -> WritingStats:
        """The numbers now; closes the dumps whose clients gave up."""
        self._assembly.sweep()
        return WritingStats(
            dumps=self._assembly.dumps,
            failures=dict(self._assembly.failures),
            tokens=self._assembly.tokens,
            bytes=self._assembly.bytes,
            spool_high_water_bytes=self._room.high_water_bytes(),
            writer_seconds=time.process_time(),
        )


def _fail(assembly: Assembly, files: DumpFiles, rid: Rid, reason: str, detail: str) -> None:
    with suppress(OSError):  # no room even for a record: the client's own deadline fails the sample
        assembly.fail(files, rid, reason, detail)


def main(memory: int, line: int, stats: int, task: WritingTask) -> None:
    """Run as a writer process, with the descriptors of the shared memory and of both lines."""
    for number in (signal.SIGTERM, signal.SIGINT):  # sent to the whole group; the scheduler says when to end
        signal.signal(number, signal.SIG_IGN)
    mapped = mmap.mmap(memory, task.blocks * task.block_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    os.close(memory)
    writing, told = Writing(task, memoryview(mapped)), 0.0
    with socket.socket(fileno=line) as messages, socket.socket(fileno=stats) as counters:

        def hand_back(block: int) -> None:
            with suppress(OSError):  # the scheduler is gone; the next dump still counts
                messages.sendall(bytes([block]))

        def tell() -> None:
            with suppress(OSError):
                counters.sendall(encode(writing.stats()))

        for message in _messages(messages):
            if message is not None:
                writing.do(message, hand_back)
            if time.monotonic() - told > _STATS_SECONDS:
                tell()
                told = time.monotonic()
        tell()


def _messages(line: socket.socket) -> Iterator[Filled | Lost | None]:
    """What the scheduler says until it closes its end; None where it says nothing for a while."""
    line.settimeout(_STATS_SECONDS)
    unread = b""
    while True:
        try:
            data = line.recv(1 << 16)
        except TimeoutError:
            yield None
            continue
        except ConnectionError:  # it died with something unread
            return
        if not data:
            return
        *lines, unread = (unread + data).split(b"\n")
        yield from map(decode, lines)


def run(words: list[str]) -> None:
    """Run with the words of a command line."""
    memory, line, stats, task = words
    main(int(memory), int(line), int(stats), WritingTask.from_json(task))


if __name__ == "__main__":
    run(sys.argv[1:])
