"""Samples to a batch: padded or packed, shifted for EAGLE-3, states read straight to where they belong.

The shift. The drafter that runs after the target has sampled token t + 1 sees the target's aux states of token t and the
embedding of token t + 1, and is to give the target's next state, that of token t + 1, from which the target predicts token
t + 2. So row t of a batch (t = 0 .. L - 2; a sample of L tokens gives L - 1 rows) holds

    aux states     of token t       do not move
    input_ids      of token t + 1   move by one
    final state    of token t + 1   moves by one
    loss_mask      of token t + 1   moves by one (`mask_shift`)
    position_ids   t + 1, the place of its input id in the whole sample

which is what speculators' ``shift_batch`` gives. SpecForge moves ids and final state, but leaves the mask where it was:
``mask_shift=0``. ``mask_shift=2`` asks whether the token that is predicted, t + 2, is supervised. Each sample is shifted by
itself: nothing crosses from one to the next where they are packed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.utils.data import get_worker_info

from hs_assets.training.dataset import Sample


class Collator:
    """Makes a batch of samples, a dict. N rows are ``[B, T]`` where padded, ``[1, T]`` where packed.

    ``input_ids`` int64 [·, T]; ``loss_mask`` bool [·, T]; ``position_ids`` int64 [·, T]; ``document_ids`` int32 [·, T], the
    number of the sample in the batch, -1 for padding; ``states``: residual id → [·, T, H], the largest being the final state,
    before the norm; ``sample_ids``: list of str. Padding is `pad_id`, and 0 or False elsewhere.

    Arguments:
        mode: ``pad``: a row of the batch for each sample; ``pack``: all in one row, one after the other.
        shift: make the EAGLE-3 shift (see the module); else all stays in token coordinates.
        mask_shift: the row of token t is supervised where token ``t + mask_shift`` is; without `shift` it stays 0.
        multiple: T is rounded up to a multiple of it.
        reuse: the memory of a batch is used again for the `reuse`-th batch after it; 0: each batch has its own. The memory is
            pinned where there is CUDA, shared in a DataLoader's worker. With workers, at least their ``prefetch_factor + 2``.
    """

    def __init__(
        self,
        mode: Literal["pad", "pack"] = "pad",
        *,
        shift: bool = True,
        mask_shift: int = 1,
        pad_id: int = 0,
        multiple: int = 1,
        reuse: int = 0,
    ) -> None:
        if mode not in ("pad", "pack") or mask_shift not in (0, 1, 2) or multiple < 1 or reuse < 0:
            raise ValueError(f"mode {mode!r}, mask_shift {mask_shift}, multiple {multiple}, reuse {reuse}")
        self.reuse = reuse
        self._packs, self._shift, self._pad_id, self._multiple = mode == "pack", int(shift), pad_id, multiple
        self._mask_shift = mask_shift if shift else 0
        self._memory: dict[object, torch.Tensor] = {}
        self._slot = 0

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        counts = [max(0, len(sample) - self._shift) for sample in samples]
        longest = sum(counts) if self._packs else max(counts, default=0)
        height, width = (1 if self._packs else len(samples)), math.ceil(longest / self._multiple) * self._multiple
        batch: dict[str, Any] = {
            "input_ids": torch.full((height, width), self._pad_id, dtype=torch.int64),
            "loss_mask": torch.zeros((height, width), dtype=torch.bool),
            "position_ids": torch.zeros((height, width), dtype=torch.int64),
            "document_ids": torch.full((height, width), -1, dtype=torch.int32),
            "states": {},
            "sample_ids": [sample.sample_id for sample in samples],
        }
        first = samples[0]
        final = max(first.residual_ids)
        self._slot = (self._slot + 1) % self.reuse if self.reuse else 0
        for residual_id in first.residual_ids:
            shape = height, width, first.hidden_size
            batch["states"][residual_id] = self._room(residual_id, shape, first.dtype)
        begin = 0
        for number, (sample, count) in enumerate(zip(samples, counts, strict=True)):
            row, columns = (0, slice(begin, begin + count)) if self._packs else (number, slice(0, count))
            begin += count
            moved = self._shift
            batch["input_ids"][row, columns] = sample.input_ids[moved : moved + count]
            mask = sample.loss_mask[self._mask_shift : self._mask_shift + count]
            batch["loss_mask"][row, columns][: len(mask)] = mask
            batch["position_ids"][row, columns] = torch.arange(count) + sample.start + moved
            batch["document_ids"][row, columns] = number
            for residual_id, states in batch["states"].items():
                tokens = slice(moved, moved + count) if residual_id == final else slice(0, count)
                sample.states(residual_id, tokens, states[row, columns])
                if not self._packs:
                    states[row, count:] = 0
        if self._packs:
            for states in batch["states"].values():
                states[0, begin:] = 0
        return batch

    def _room(self, name: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory for the states of one residual id; what is in it is of no meaning."""
        size, key = math.prod(shape), (self._slot, name)
        held = self._memory.get(key) if self.reuse else None
        if held is None or held.numel() < size or held.dtype != dtype:
            held = _memory(max(size, held.numel() * 3 // 2 if held is not None else 0), dtype)
            if self.reuse:
                self._memory[key] = held
        return held[:size].view(shape)


def _memory(size: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor; in a DataLoader's worker in shared memory, so that it goes to the main process without a copy."""
    if get_worker_info() is None:
        return torch.empty(size, dtype=dtype, pin_memory=torch.cuda.is_available())
    storage = torch.UntypedStorage._new_shared(size * dtype.itemsize, device="cpu")
    return torch.empty(0, dtype=dtype).set_(storage, 0, (size,))
