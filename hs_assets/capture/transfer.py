"""From the device to host memory, beside the forward pass.

On CUDA one thread copies on a stream of its own into a ring of pinned blocks; the forward stream is never waited for
and never made to wait. Elsewhere the tensors are in host memory already and go to the writers as they are.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from hs_assets.capture.batch import Segment
from hs_assets.capture.writers import Failed, Rows, Writers
from hs_assets.wire.spool import DumpFiles

T = TypeVar("T")

_BLOCK_BYTES = 64 << 20
_BLOCKS = 16
_BACKLOG_BYTES = 4 << 30
"""Device memory that states waiting for their copy may hold; beyond it samples fail instead of the server."""


@dataclass(frozen=True, slots=True)
class StatesBatch:
    """The states of one forward pass.

    ``segments`` and where each one's dump lies; ``token_ids`` int32 [T]; ``states`` [T, K+1, H], contiguous.
    """

    segments: list[tuple[Segment, DumpFiles]]
    token_ids: torch.Tensor
    states: torch.Tensor


class Transfer:
    """Takes batches from the scheduler's thread and hands their rows to the writers."""

    def __init__(self, writers: Writers, device: torch.device) -> None:
        self._writers = writers
        self._device = device
        self._backlog = 0
        self._lock = threading.Lock()
        if device.type == "cuda":
            self._jobs: queue.SimpleQueue[tuple[StatesBatch, torch.cuda.Event]] = queue.SimpleQueue()
            threading.Thread(target=self._copy_all, name="hs-assets-transfer", daemon=True).start()

    def submit(self, batch: StatesBatch) -> None:
        """Hand over one forward pass; called on the scheduler's thread, never blocks."""
        if self._device.type != "cuda":
            for segment, files in batch.segments:
                end = segment.start + segment.rows
                host = _bytes(batch.token_ids[segment.start : end]), _bytes(batch.states[segment.start : end])
                self._writers.put(Rows(files, segment.rid, segment.prefix, partial(_identity, host), partial(_identity, None)))
            return
        size = batch.states.nbytes
        with self._lock:
            fits = self._backlog + size <= _BACKLOG_BYTES
            self._backlog += size if fits else 0
        if fits:
            ready = torch.cuda.Event()
            ready.record()
            self._jobs.put((batch, ready))
            return
        for _, files in batch.segments:
            self._writers.put(Failed(files, "capture_backlog", f"more than {_BACKLOG_BYTES} bytes of states wait on the device"))

    def _copy_all(self) -> None:
        torch.cuda.set_device(self._device)
        stream = torch.cuda.Stream()
        blocks: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(_BLOCKS):
            blocks.put(torch.empty(_BLOCK_BYTES, dtype=torch.uint8, pin_memory=True))
        while True:
            batch, ready = self._jobs.get()
            try:
                with torch.cuda.stream(stream):
                    stream.wait_event(ready)
                    token_ids = batch.token_ids.cpu()
                    for segment, files in batch.segments:
                        self._copy(segment, files, token_ids, batch.states, blocks)
            except Exception as error:  # the clients learn of it by their samples' failure records
                for _, files in batch.segments:
                    self._writers.put(Failed(files, "capture_error", repr(error)))
            stream.synchronize()  # the batch's device memory is let go of only now
            with self._lock:
                self._backlog -= batch.states.nbytes

    def _copy(
        self,
        segment: Segment,
        files: DumpFiles,
        token_ids: torch.Tensor,
        states: torch.Tensor,
        blocks: queue.SimpleQueue[torch.Tensor],
    ) -> None:
        row_bytes = states[0].nbytes
        rows_per_block = _BLOCK_BYTES // row_bytes
        for first in range(0, segment.rows, rows_per_block):
            start = segment.start + first
            end = min(start + rows_per_block, segment.start + segment.rows)
            block = blocks.get()
            pinned = block[: (end - start) * row_bytes]
            pinned.copy_(states[start:end].view(torch.uint8).flatten(), non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            buffers = partial(_after, copied, _bytes(token_ids[start:end]), pinned)
            self._writers.put(Rows(files, segment.rid, segment.prefix + first, buffers, partial(blocks.put, block)))


def _identity(value: T) -> T:
    return value


def _after(copied: torch.cuda.Event, token_ids: memoryview, pinned: torch.Tensor) -> tuple[memoryview, memoryview]:
    """Token ids and states once their copy is done; called on a writer thread."""
    copied.synchronize()
    return token_ids, _bytes(pinned)


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, without a copy; they keep the tensor alive."""
    return memoryview(tensor.view(torch.uint8).flatten().numpy())
