"""From the device to host memory, beside the forward pass.

On CUDA one thread copies on a stream of its own into a ring of pinned blocks; the forward stream is never waited for
and never made to wait. Elsewhere the tensors are in host memory already and go to the writers as they are.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from functools import partial

import torch

from hs_assets.capture.assembly import Chunk
from hs_assets.capture.batch import Segment
from hs_assets.capture.writers import Rows, Writers
from hs_assets.wire.spool import DumpFiles

_BLOCK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class StatesBatch:
    """The states of one forward pass.

    ``segments`` and where each one's dump lies; ``token_ids`` int32 [T]; ``states`` [T, K+1, H], contiguous; their
    ``checksums`` int32 [T], made on the forward stream: later than that nothing may change a row unseen. ``writers`` are
    those that shall write them.
    """

    writers: Writers
    segments: list[tuple[Segment, DumpFiles]]
    token_ids: torch.Tensor
    states: torch.Tensor
    checksums: torch.Tensor


class Transfer:
    """Takes batches from the scheduler's thread and hands their rows to the writers.

    Arguments:
        backlog_bytes: device memory that states waiting for their copy may hold; beyond it samples fail, not the server.
        blocks: of pinned memory, 64 MiB each, that are filled and written in turn.
    """

    def __init__(self, device: torch.device, backlog_bytes: int, blocks: int) -> None:
        self._device = device
        self._limit = backlog_bytes
        self._backlog = 0
        self._lock = threading.Lock()
        self.high_water_bytes = 0
        self._thread: threading.Thread | None = None
        if device.type == "cuda":
            self._jobs: queue.SimpleQueue[tuple[StatesBatch, torch.cuda.Event]] = queue.SimpleQueue()
            self._blocks: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
            for _ in range(blocks):
                self._blocks.put(torch.empty(_BLOCK_BYTES, dtype=torch.uint8, pin_memory=True))
            self._thread = threading.Thread(target=self._copy_all, name="hs-assets-transfer", daemon=True)
            self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether everything that was submitted is with the writers."""
        return self._backlog == 0

    @property
    def backlog_bytes(self) -> int:
        """Of states that wait for their copy."""
        return self._backlog

    @property
    def alive(self) -> bool:
        """Whether the thread that copies runs; always on the CPU, which needs none."""
        return self._thread is None or self._thread.is_alive()

    def submit(self, batch: StatesBatch) -> None:
        """Hand over one forward pass; called on the scheduler's thread, never blocks."""
        if self._device.type == "cuda":
            self._enqueue(batch)
            return
        for segment, files in batch.segments:
            end = segment.start + segment.rows
            ids, sums, states = (part[segment.start : end] for part in (batch.token_ids, batch.checksums, batch.states))
            chunk = partial(Chunk, _bytes(ids), _bytes(sums), _bytes(states))
            batch.writers.put(Rows(files, segment.rid, segment.prefix, states.nbytes, chunk, _keep))

    def _enqueue(self, batch: StatesBatch) -> None:
        size = batch.states.nbytes
        with self._lock:
            fits = self._backlog + size <= self._limit
            self._backlog += size if fits else 0
            self.high_water_bytes = max(self.high_water_bytes, self._backlog)
        if fits:
            ready = torch.cuda.Event(blocking=True)
            ready.record()
            self._jobs.put((batch, ready))
            return
        detail = f"{size} bytes of states would make more than {self._limit} wait on the device"
        batch.writers.fail(batch.segments, "capture_backlog", detail)

    def _copy_all(self) -> None:
        torch.cuda.set_device(self._device)
        stream = torch.cuda.Stream()
        while True:
            batch, ready = self._jobs.get()
            try:
                ready.synchronize()
                with torch.cuda.stream(stream):
                    _copy(batch, self._blocks)
            except Exception as error:  # the clients learn of it by their samples' failure records
                batch.writers.fail(batch.segments, "capture_error", repr(error))
            stream.synchronize()  # the batch's device memory is let go of only now
            size = batch.states.nbytes
            del batch
            with self._lock:
                self._backlog -= size


def _copy(batch: StatesBatch, blocks: queue.SimpleQueue[torch.Tensor]) -> None:
    """Copy a batch's rows block by block, and hand each block to the writers.

    Never more than two blocks are on their way: SGLang's own small copies to the host share the engine with them.
    """
    before: torch.cuda.Event | None = None
    token_ids, checksums = batch.token_ids.cpu(), batch.checksums.cpu()
    row_bytes = batch.states[0].nbytes
    rows_per_block = _BLOCK_BYTES // row_bytes
    for segment, files in batch.segments:
        for first in range(0, segment.rows, rows_per_block):
            start = segment.start + first
            end = min(start + rows_per_block, segment.start + segment.rows)
            block = blocks.get()
            pinned, copied = block[: (end - start) * row_bytes], torch.cuda.Event(blocking=True)
            try:
                pinned.copy_(batch.states[start:end].view(torch.uint8).flatten(), non_blocking=True)
                copied.record()
                if before is not None:
                    before.synchronize()
            except Exception:  # whatever it is, the ring keeps all its blocks
                blocks.put(block)
                raise
            before = copied
            chunk = partial(_once_copied, copied, token_ids[start:end], checksums[start:end], pinned, first == 0)
            batch.writers.put(Rows(files, segment.rid, segment.prefix + first, pinned.nbytes, chunk, partial(blocks.put, block)))


def _once_copied(
    copied: torch.cuda.Event, token_ids: torch.Tensor, checksums: torch.Tensor, pinned: torch.Tensor, begins: bool
) -> Chunk:
    """A chunk once its copy is done; called on a writer thread."""
    copied.synchronize()
    return Chunk(_bytes(token_ids), _bytes(checksums), _bytes(pinned), begins)


def _keep() -> None:
    """Nothing to hand back: the tensors go with their last reference."""


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, without a copy; they keep the tensor alive."""
    return memoryview(tensor.view(torch.uint8).flatten().numpy())
