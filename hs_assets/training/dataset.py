"""A layer set as a torch data set: random access by sample and token window; states are read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from hs_assets.errors import StoreError
from hs_assets.store.arrays import BFLOAT16
from hs_assets.store.manifest import Manifest, StoredSample
from hs_assets.store.reader import Lineage, Store, lineage, open_store

_DTYPES = {BFLOAT16: torch.bfloat16, np.dtype(np.float16): torch.float16, np.dtype(np.float32): torch.float32}


@dataclass(frozen=True, slots=True)
class Sample:
    """A window of T tokens of a sample: ids and mask are read, states are not yet.

    ``input_ids`` int32 [T]; ``loss_mask`` bool [T], True where ``input_ids`` is supervised (no shift); ``start``: the place of
    the first token in the whole sample; ``residual_ids``: those that `states` gives, the last one being the final state.
    """

    sample_id: str
    start: int
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    residual_ids: tuple[int, ...]
    hidden_size: int
    dtype: torch.dtype
    _store: Store
    _entry: tuple[Manifest, StoredSample]

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def lineage(self) -> Lineage:
        """Where it came from."""
        return lineage(*self._entry)

    def states(self, residual_id: int, tokens: slice = slice(None), out: torch.Tensor | None = None) -> torch.Tensor:
        """The states of one residual id, [tokens, H], checked against their checksums.

        Arguments:
            tokens: a slice with step 1, in tokens of this window.
            out: a contiguous CPU tensor that they are read straight into.

        Raises:
            StoreError: they are missing or damaged.
        """
        start, stop, step = tokens.indices(len(self))
        stop = max(start, stop)
        if out is None:
            out = torch.empty((stop - start, self.hidden_size), dtype=self.dtype)
        where = slice(self.start + start, self.start + stop, step)
        self._store.states(*self._entry, (residual_id,), where, {residual_id: _as_numpy(out)})
        return out


class StateDataset(Dataset[Sample]):
    """The samples of a layer set, in the order of their ids; item ``i`` is a `Sample`.

    Holds manifests and no states, file or thread: it can be forked and pickled.

    Arguments:
        store: the folder of a store.
        layer_set: such as ``r3-31-59-61``.
        layers: some of its residual ids; by default all.
        window: longer samples become several items of so many tokens, the last one shorter; by default items are whole.
        overlap: tokens that a window shares with the next one. 1 loses no row to the EAGLE-3 shift.

    Raises:
        StoreError: no such store or layer set, or residual ids that it has not.
    """

    def __init__(
        self, store: str | Path, layer_set: str, layers: Iterable[int] | None = None, window: int | None = None, overlap: int = 1
    ) -> None:
        if window is not None and not 0 <= overlap < window:
            raise ValueError(f"an overlap of {overlap} tokens, with windows of {window}")
        self.store = open_store(store)
        self._entries = self.store.layer_set(layer_set).entries
        stored = tuple(int(i) for i in layer_set.removeprefix("r").split("-"))
        self.residual_ids = stored if layers is None else tuple(sorted(set(layers)))
        if not set(self.residual_ids) <= set(stored):
            raise StoreError("no such residual ids in the layer set", where=layer_set, expected=stored, got=self.residual_ids)
        numbers = {name: i for i, name in enumerate(dict.fromkeys(manifest.partition for manifest, _ in self._entries))}
        items = [
            (i, start, stop, numbers[manifest.partition])
            for i, (manifest, sample) in enumerate(self._entries)
            for start, stop in _windows(sample.tokens, window, overlap)
        ]
        self._items = np.array(items, np.int64).reshape(-1, 4)
        self._hidden = self.store.state_layout(*self._entries[0]) if self._entries else (0, BFLOAT16)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each item."""
        lengths: list[int] = (self._items[:, 2] - self._items[:, 1]).tolist()
        return lengths

    @property
    def partitions(self) -> list[int]:
        """The number of each item's partition."""
        partitions: list[int] = self._items[:, 3].tolist()
        return partitions

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Sample:
        entry, start, stop, _ = self._items[index].tolist()
        return self._sample(self._entries[entry], start, stop)

    def find(self, sample_id: str, tokens: slice = slice(None)) -> Sample:
        """A sample by its id, or some of its tokens (a slice with step 1).

        Raises:
            StoreError: no such sample.
        """
        number = self._numbers.get(sample_id)
        if number is None:
            raise StoreError("no such sample in the layer set", where=self.store.paths.root, got=sample_id)
        entry = self._entries[number]
        start, stop, step = tokens.indices(entry[1].tokens)
        if step != 1:
            raise StoreError("tokens are read in steps of 1", where=sample_id, got=tokens)
        return self._sample(entry, start, max(start, stop))

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {sample.sample_id: number for number, (_, sample) in enumerate(self._entries)}

    def _sample(self, entry: tuple[Manifest, StoredSample], start: int, stop: int) -> Sample:
        ids, mask = self.store.ids_and_mask(*entry)
        hidden_size, dtype = self._hidden
        return Sample(
            entry[1].sample_id,
            start,
            torch.from_numpy(ids[start:stop]),
            torch.from_numpy(mask[start:stop].copy()),
            self.residual_ids,
            hidden_size,
            _DTYPES[dtype],
            self.store,
            entry,
        )


def _windows(tokens: int, window: int | None, overlap: int) -> list[tuple[int, int]]:
    """(start, stop) of each window; a rest that the window before holds already is none."""
    if window is None or tokens <= window:
        return [(0, tokens)]
    starts = range(0, tokens - overlap, window - overlap)
    return [(start, min(start + window, tokens)) for start in starts]


def _as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The same memory as an array; numpy of torch has no bfloat16."""
    if tensor.dtype == torch.bfloat16:
        bits: np.ndarray = tensor.view(torch.int16).numpy()
        return bits.view(BFLOAT16)
    array: np.ndarray = tensor.numpy()
    return array
