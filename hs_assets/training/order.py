"""Which items make which batch, and which rank gets it: a pure function of seed and epoch, the same in every process."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np


class Items(Protocol):
    """What an order is of: for each item its tokens and the number of its partition, in the order of the store."""

    @property
    def lengths(self) -> Sequence[int]: ...

    @property
    def partitions(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class BatchOrder:
    """Batches of item numbers, epoch by epoch.

    Partitions are shuffled; then the items of every `mix` partitions that follow each other are shuffled together, so that
    reading stays within a few partitions at a time. All ranks deal from one list of batches, in turn.

    Arguments:
        lengths, partitions: for each item its tokens and the number of its partition.
        batch_size: items of a batch.
        batch_tokens: instead, most tokens of a batch; a longer item is a batch of its own.
        mix: partitions whose items are shuffled together; 1 keeps each partition by itself.
        rank, ranks: which share of the batches is ours. Every rank gets as many: the first ones are dealt again at the end
            where they do not come out even (`repeated` counts them).
    """

    lengths: tuple[int, ...]
    partitions: tuple[int, ...]
    batch_size: int | None = None
    batch_tokens: int | None = None
    seed: int = 0
    shuffle: bool = True
    mix: int = 8
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        if (self.batch_size is None) == (self.batch_tokens is None) or (self.batch_size or self.batch_tokens or 0) < 1:
            raise ValueError(f"one of batch_size and batch_tokens, at least 1: got {self.batch_size}, {self.batch_tokens}")
        if not 0 <= self.rank < self.ranks or self.mix < 1 or len(self.lengths) != len(self.partitions):
            raise ValueError(f"rank {self.rank} of {self.ranks}, mix {self.mix}")

    @classmethod
    def of(
        cls,
        items: Items,
        *,
        batch_size: int | None = None,
        batch_tokens: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        mix: int = 8,
        rank: int = 0,
        ranks: int = 1,
    ) -> Self:
        """The order of a data set's items."""
        lengths, partitions = tuple(map(int, items.lengths)), tuple(map(int, items.partitions))
        return cls(lengths, partitions, batch_size, batch_tokens, seed, shuffle, mix, rank, ranks)

    def items(self, epoch: int) -> list[int]:
        """All items, in the order of an epoch."""
        if not self.shuffle:
            return list(range(len(self.lengths)))
        random = np.random.default_rng((self.seed, epoch))
        partitions = np.asarray(self.partitions, np.int64)
        names = random.permutation(np.unique(partitions))
        of = np.argsort(partitions, kind="stable")
        starts = np.searchsorted(partitions[of], names)
        ends = np.searchsorted(partitions[of], names, side="right")
        order: list[int] = []
        for first in range(0, len(names), self.mix):
            together = [of[a:b] for a, b in zip(starts[first : first + self.mix], ends[first : first + self.mix], strict=True)]
            order += random.permutation(np.concatenate(together)).tolist()
        return order

    def batches(self, epoch: int) -> list[list[int]]:
        """This rank's batches of an epoch."""
        batches = self._all_batches(epoch)
        short = -len(batches) % self.ranks
        batches += [batches[i % len(batches)] for i in range(short)] if batches else []
        return batches[self.rank :: self.ranks]

    def repeated(self, epoch: int) -> int:
        """How many batches are dealt twice in an epoch, so that all ranks get as many."""
        return -len(self._all_batches(epoch)) % self.ranks

    @property
    def fingerprint(self) -> str:
        """Equal for orders that deal from the same lists of batches, whatever the rank."""
        facts = (self.lengths, self.partitions, self.batch_size, self.batch_tokens, self.seed, self.shuffle, self.mix)
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def _all_batches(self, epoch: int) -> list[list[int]]:
        order = self.items(epoch)
        if self.batch_size is not None:
            return [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        batches: list[list[int]] = []
        room = 0
        for item in order:
            if not batches or self.lengths[item] > room:
                batches.append([])
                room = self.batch_tokens or 0
            batches[-1].append(item)
            room -= self.lengths[item]
        return batches
