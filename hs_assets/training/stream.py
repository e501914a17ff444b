"""Batches one after the other, sharded over ranks and workers, resumed where they stopped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hs_assets.training.collate import Collator
from hs_assets.training.dataset import StateDataset
from hs_assets.training.order import BatchOrder


class BatchStream(IterableDataset[dict[str, Any]]):
    """The rest of an epoch, batch by batch: those of this rank, and in a DataLoader's worker every n-th of them.

    For ``DataLoader(stream, batch_size=None)``, which gives the same batches in the same order with any number of workers.
    Each batch has what resumes after it, ``batch["resume"]``: give it to `load_state_dict` before a DataLoader is iterated.
    `StateLoader` does that by itself.
    """

    def __init__(self, dataset: StateDataset, order: BatchOrder, collator: Collator) -> None:
        self.dataset, self.order, self.collator = dataset, order, collator
        self._fingerprint = order.fingerprint
        self._epoch, self._first = 0, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        epoch, batches = self._epoch, self.order.batches(self._epoch)
        for place in range(self._first + number, len(batches), workers):
            batch = self.collator([self.dataset[i] for i in batches[place]])
            done = place + 1 == len(batches)
            self._epoch, self._first = (epoch + 1, 0) if done else (epoch, place + 1)
            batch["resume"] = self.state_dict()
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch is; ``batches`` counts those of all ranks together, so that their number may change."""
        return {"epoch": self._epoch, "batches": self._first * self.order.ranks, "order": self._fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. With another number of ranks, up to that many batches less one come again.

        Raises:
            ValueError: it is the state of another order: other samples, batches or seed.
        """
        if state["order"] != self._fingerprint:
            raise ValueError(f"the state is of another order of batches, {state['order']}, not {self._fingerprint}")
        self._epoch, self._first = state["epoch"], state["batches"] // self.order.ranks


class StateLoader:
    """A DataLoader over a stream that knows which batch was given last, whatever its workers have read ahead.

    Iterating gives the rest of the epoch, and the next time the next epoch. The memory of a batch is used again: it is valid
    until the next but one is asked for (of the same worker), so clone or move to a device what is to live longer. A copy that
    does not block (``non_blocking=True``) must have ended by then, too.

    Arguments:
        num_workers: processes that read; 0 reads in this one.
        prefetch: batches that a worker reads ahead.
        pin_memory: copy batches of workers to pinned memory (they are in it already without workers, where there is CUDA).
        context: how workers start: ``fork``, ``forkserver``, ``spawn``; torch's default where None.
    """

    def __init__(
        self, stream: BatchStream, num_workers: int = 0, prefetch: int = 2, pin_memory: bool = False, context: str | None = None
    ) -> None:
        self._stream = stream
        stream.collator.reuse = prefetch + 2 if num_workers else 2
        self._options: dict[str, Any] = {"num_workers": num_workers, "pin_memory": pin_memory}
        if num_workers:
            self._options |= {"prefetch_factor": prefetch, "multiprocessing_context": context}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in DataLoader(self._stream, batch_size=None, **self._options):
            self._stream.load_state_dict(batch["resume"])
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Where the batch after the last given one is."""
        return self._stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; see `BatchStream.load_state_dict`."""
        self._stream.load_state_dict(state)
