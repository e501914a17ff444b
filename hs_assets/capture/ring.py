"""The memory that a scheduler shares with its writer processes, in blocks.

SGLang's scheduler needs its interpreter's lock at every step; threads that write files would take it hundreds of times a
batch. So a thread copies the rows into a block, a line says what lies there, and other processes write it. Processes also
fill a tmpfs faster than threads of one do.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import socket
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path

import torch

import hs_assets
from hs_assets.capture.messages import Filled, Lost, Part, WritingStats, WritingTask, encode
from hs_assets.capture.room import forget
from hs_assets.wire.rid import parse_rid
from hs_assets.wire.spool import Spool

WRITER = ("-P", "-m", "hs_assets.capture.writing")
"""What the interpreter is asked to run as a writer process."""


class Ring:
    """The scheduler's side: blocks of memory, and the writer processes that read them. A request goes to one of them.

    What asks the writers for something raises ConnectionError when one of them is gone.
    """

    def __init__(self, device: torch.device, task: WritingTask) -> None:
        self.task = task
        size = task.blocks * task.block_bytes
        memory = os.memfd_create("hs_assets")
        os.ftruncate(memory, size)
        mapped = mmap.mmap(memory, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._memory = torch.frombuffer(mapped, dtype=torch.uint8).view(task.blocks, task.block_bytes)
        if device.type == "cuda":  # copies into registered memory need no staging, and do not wait
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), size, 0))
        self._lock = threading.Lock()
        self._free = list(range(task.blocks))
        self._unwritten: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}
        self.pending_high_water_bytes = 0
        if task.rank == 0:
            forget(Spool(Path(task.spool)))
        self._writers = [_Writer(memory, task) for _ in range(task.writers)]
        os.close(memory)

    @property
    def alive(self) -> int:
        """How many writer processes run."""
        return sum(writer.process.poll() is None for writer in self._writers)

    @property
    def pending_bytes(self) -> int:
        """States in blocks that are not written yet."""
        with self._lock:
            with suppress(ConnectionError):
                self._collect()
            return sum(self._sizes.values())

    def take(self) -> int:
        """The number of a block that nobody uses; waits for the writers to hand one back."""
        while True:
            with self._lock:
                self._collect()
                if self._free:
                    return self._free.pop()
            select.select([writer.line for writer in self._writers], [], [])

    def put_back(self, block: int) -> None:
        """A block that was taken and is not sent."""
        with self._lock:
            self._free.append(block)

    def block(self, number: int) -> torch.Tensor:
        """Its memory, uint8 [block_bytes]."""
        return self._memory[number]

    def send(self, filled: Filled, size: int) -> None:
        """Tell the writers of a block with `size` bytes of states; it is theirs until all of them are done with it."""
        shares: defaultdict[int, list[Part]] = defaultdict(list)
        for part in filled.parts:
            shares[self._writer_of(part.rid)].append(part)
        with self._lock:
            self._unwritten[filled.block] = len(shares)
            self._sizes[filled.block] = size
            self.pending_high_water_bytes = max(self.pending_high_water_bytes, sum(self._sizes.values()))
        for number, parts in shares.items():
            self._writers[number].line.sendall(encode(Filled(filled.block, filled.probe, tuple(parts))))

    def tell(self, lost: Lost) -> None:
        """Have a request's failure record written."""
        self._writers[self._writer_of(lost.rid)].line.sendall(encode(lost))

    def stats(self) -> WritingStats:
        """What the writers said of themselves last, added up."""
        all_failures: Counter[str] = Counter()
        said = [writer.said() for writer in self._writers]
        for one in said:
            all_failures.update(one.failures)
        return WritingStats(
            dumps=sum(one.dumps for one in said),
            failures=dict(all_failures),
            tokens=sum(one.tokens for one in said),
            bytes=sum(one.bytes for one in said),
            spool_high_water_bytes=max(one.spool_high_water_bytes for one in said),
            writer_seconds=sum(one.writer_seconds for one in said),
        )

    def close(self, seconds: float) -> None:
        """Let the writers write what they were sent, and end; wait so long at most for each."""
        for writer in self._writers:
            with suppress(OSError):
                writer.line.shutdown(socket.SHUT_WR)
        for writer in self._writers:
            writer.process.wait(seconds)

    def _writer_of(self, text: str) -> int:
        rid = parse_rid(text)
        return rid.row % len(self._writers) if rid else 0  # rows come in order: neighbours go to different ones

    def _collect(self) -> None:
        """Note the blocks that the writers are done with: a byte each on their lines."""
        for writer in self._writers:
            with suppress(BlockingIOError):
                done = writer.line.recv(4096, socket.MSG_DONTWAIT)
                if not done:
                    raise ConnectionError("a writer process ended")
                for block in done:
                    self._unwritten[block] -= 1
                    if not self._unwritten[block]:
                        self._free.append(block)
                        del self._sizes[block]


class _Writer:
    """One writer process, the line to it, and what it said of itself."""

    def __init__(self, memory: int, task: WritingTask) -> None:
        self.line, line = socket.socketpair()
        self._stats, stats = socket.socketpair()
        self._said, self._unread = WritingStats(), b""
        taken = memory, line.fileno(), stats.fileno()
        source = os.pathsep.join(filter(None, [str(Path(hs_assets.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, *WRITER, *map(str, taken), task.as_json()],
            env={**os.environ, "PYTHONPATH": source},
            pass_fds=taken,
            stdin=subprocess.DEVNULL,
        )
        line.close()
        stats.close()

    def said(self) -> WritingStats:
        with suppress(BlockingIOError):
            while data := self._stats.recv(1 << 16, socket.MSG_DONTWAIT):
                *lines, self._unread = (self._unread + data).split(b"\n")
                self._said = WritingStats(**json.loads(lines[-1])) if lines else self._said
        return self._said
