"""The memory that a scheduler shares with its writer process, in blocks, and what the two tell each other.

SGLang's scheduler needs its interpreter's lock at every step; threads that write files would take it hundreds of times a
batch. So a thread copies the rows into a block, a line says what lies there, and another process writes it.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import hs_assets
from hs_assets.capture.messages import Filled, Lost, WritingStats, WritingTask, encode

WRITER = ("-P", "-m", "hs_assets.capture.writing")
"""What the interpreter is asked to run as the writer process."""


class Ring:
    """The scheduler's side: blocks of memory, and the writer process that reads them.

    All methods but `stats` and `close` are for one thread. They raise ConnectionError when the writer process is gone.
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
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(task.blocks):
            self._free.put(number)
        self._lines, lines = socket.socketpair()
        self._stats, stats = socket.socketpair()
        taken = memory, lines.fileno(), stats.fileno()
        source = os.pathsep.join(filter(None, [str(Path(hs_assets.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, *WRITER, *map(str, taken), task.as_json()],
            env={**os.environ, "PYTHONPATH": source},
            pass_fds=taken,
            stdin=subprocess.DEVNULL,
        )
        lines.close()
        stats.close()
        os.close(memory)

    def take(self) -> int:
        """The number of a block that nobody uses; waits for the writer process to hand one back."""
        while self._free.empty():
            handed_back = self._lines.recv(4096)  # a byte a block
            if not handed_back:
                raise BrokenPipeError("the writer process ended")
            for number in handed_back:
                self._free.put(number)
        return self._free.get()

    def put_back(self, block: int) -> None:
        """A block that was taken and is not sent."""
        self._free.put(block)

    def block(self, number: int) -> torch.Tensor:
        """Its memory, uint8 [block_bytes]."""
        return self._memory[number]

    def send(self, message: Filled | Lost) -> None:
        """Tell the writer process; a block that is sent is its own until it hands it back."""
        self._lines.sendall(encode(message))

    def stats(self) -> Iterator[WritingStats]:
        """What the writer process says of itself, until it ends."""
        with self._stats.makefile("rb") as lines:
            for line in lines:
                yield WritingStats(**json.loads(line))

    def close(self, seconds: float) -> None:
        """Let the writer process write what it was sent, and end; wait so long at most."""
        self._lines.shutdown(socket.SHUT_WR)
        self._process.wait(seconds)
