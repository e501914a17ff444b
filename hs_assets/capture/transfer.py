"""From the device to the memory that is shared with the writer processes, beside the forward pass.

One thread does it. On CUDA it copies on a stream of its own: the forward stream is never waited for by the scheduler's
thread, and never made to wait.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from hs_assets.capture.batch import Segment
from hs_assets.capture.messages import BlockLayout, Filled, Lost, Part
from hs_assets.capture.ring import Ring


@dataclass(frozen=True, slots=True)
class StatesBatch:
    """The states of one forward pass.

    ``segments`` of ours in it; ``token_ids`` int32 [T]; ``states`` [T, K+1, H], contiguous; their ``checksums`` int32 [T],
    made on the forward stream: later than that nothing may change a row unseen. ``probe``: what the canary's independent
    hooks saw, [T, K, H].
    """

    segments: list[Segment]
    token_ids: torch.Tensor
    states: torch.Tensor
    checksums: torch.Tensor
    probe: bool = False


class Transfer:
    """Takes batches from the scheduler's thread and copies their rows into the ring.

    Arguments:
        backlog_bytes: device memory that states waiting for their copy may hold; beyond it samples fail, not the server.
    """

    def __init__(self, device: torch.device, backlog_bytes: int, ring: Ring) -> None:
        self._device = device
        self._limit = backlog_bytes
        self._ring = ring
        self._backlog = 0
        self._lock = threading.Lock()
        self.high_water_bytes = 0
        self._jobs: queue.SimpleQueue[tuple[StatesBatch, torch.cuda.Event | None] | list[Lost] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hs-assets-transfer", daemon=True)
        self._thread.start()

    @property
    def backlog_bytes(self) -> int:
        """Of states that wait for their copy."""
        return self._backlog

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, batch: StatesBatch) -> None:
        """Hand over one forward pass; called on the scheduler's thread, never blocks."""
        size = batch.states.nbytes
        with self._lock:
            fits = self._backlog + size <= self._limit
            self._backlog += size if fits else 0
            self.high_water_bytes = max(self.high_water_bytes, self._backlog)
        if not fits:
            detail = f"{size} bytes of states would make more than {self._limit} wait on the device"
            self.fail((segment.rid for segment in batch.segments), "capture_backlog", detail)
            return
        ready = None
        if self._device.type == "cuda":
            ready = torch.cuda.Event(blocking=True)
            ready.record()
        self._jobs.put((batch, ready))

    def fail(self, rids: Iterable[object], reason: str, detail: str) -> None:
        """Have failure records written for all requests of a batch; never blocks."""
        self._jobs.put([Lost(str(rid), reason, detail) for rid in rids])

    def drain(self, seconds: float) -> None:
        """Return when everything that was submitted is written, or after so many seconds; takes no more."""
        self._jobs.put(None)
        self._thread.join(seconds)
        self._ring.close(seconds)

    def _run(self) -> None:
        """Runs until `drain`, or until a writer process is gone: then the monitor says that the thread ended."""
        on_stream: AbstractContextManager[object] = nullcontext()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            on_stream = torch.cuda.stream(torch.cuda.Stream())
        with on_stream:
            while (job := self._jobs.get()) is not None:
                if isinstance(job, list):
                    for lost in job:
                        self._ring.tell(lost)
                    continue
                batch, ready = job
                try:
                    if ready is not None:
                        ready.synchronize()
                    self._copy(batch)
                except ConnectionError:
                    raise
                except Exception as error:  # the clients learn of it by their samples' failure records
                    self.fail((segment.rid for segment in batch.segments), "capture_error", repr(error))
                size = batch.states.nbytes
                del batch, job
                with self._lock:
                    self._backlog -= size

    def _copy(self, batch: StatesBatch) -> None:
        """Copy a batch block by block, from the first row of ours through the last."""
        layout = BlockLayout(self._ring.task.block_bytes, batch.states[0].nbytes)
        first, end = batch.segments[0].start, max(segment.start + segment.rows for segment in batch.segments)
        for start in range(first, end, layout.rows):
            stop = min(start + layout.rows, end)
            parts = _parts(batch.segments, start, stop)
            if not parts:  # rows of others alone: nobody would hand such a block back
                continue
            number = self._ring.take()
            try:
                block, rows = self._ring.block(number), (0, stop - start)
                for where, tensor in (
                    (layout.states(*rows), batch.states),
                    (layout.token_ids(*rows), batch.token_ids),
                    (layout.checksums(*rows), batch.checksums),
                ):
                    block[where].copy_(tensor[start:stop].view(torch.uint8).flatten(), non_blocking=True)
                if self._device.type == "cuda":
                    copied = torch.cuda.Event(blocking=True)
                    copied.record()
                    copied.synchronize()
            except Exception:  # whatever it is, the ring keeps all its blocks
                self._ring.put_back(number)
                raise
            self._ring.send(Filled(number, batch.probe, parts), (stop - start) * layout.row_bytes)


def _parts(segments: list[Segment], start: int, stop: int) -> tuple[Part, ...]:
    """What lies in a block that holds the rows start .. stop of a batch."""
    found = []
    for segment in segments:
        begin, end = max(start, segment.start), min(stop, segment.start + segment.rows)
        if begin < end:
            prefix = segment.prefix + begin - segment.start
            found.append(Part(str(segment.rid), prefix, begin - start, end - begin, begin == segment.start))
    return tuple(found)
