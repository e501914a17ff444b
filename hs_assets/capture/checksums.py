"""The checksum of each row, made where the row lies: what is copied and written later can be held against it."""

from __future__ import annotations

from functools import lru_cache

import torch

_PIECE_BYTES = 64 << 20


def row_checksums(states: torch.Tensor) -> torch.Tensor:
    """The checksum (`hs_assets.wire.dump`) of each row of `states` [T, …], contiguous; int32 [T] on the same device."""
    words = states.flatten(1).view(torch.int32)
    weights = _weights(words.shape[1], states.device)
    rows = max(1, _PIECE_BYTES // max(1, words[:1].nbytes))  # the products take as much memory as the words
    return torch.cat([(piece * weights).sum(1, dtype=torch.int32) for piece in words.split(rows)])


@lru_cache(maxsize=4)
def _weights(words: int, device: torch.device) -> torch.Tensor:
    return torch.arange(words, dtype=torch.int32, device=device) * 2 + 1
