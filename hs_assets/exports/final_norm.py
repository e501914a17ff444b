"""The state after the final norm, from the stored one before it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from hs_assets.errors import ExportError
from hs_assets.store.layout import StorePaths
from hs_assets.store.manifest import Manifest
from hs_assets.store.masks import read_final_norm

_ROWS = 512


@dataclass(frozen=True, slots=True)
class FinalNorm:
    """x / rms(x) * weight (Zhang and Sennrich, 2019). ``weight`` float32 [H]."""

    weight: np.ndarray
    eps: float

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.weight.astype("<f4").tobytes() + repr(self.eps).encode()).hexdigest()

    def __call__(self, states: np.ndarray) -> np.ndarray:
        """States [L, H] after the norm, in their dtype.

        The order of roundings is that of Hugging Face's models: normalised in float32, rounded, times the rounded weight.
        """
        weight = self.weight.astype(states.dtype).astype(np.float32)
        normed: np.ndarray[Any, Any] = np.empty_like(states)
        for first in range(0, len(states), _ROWS):
            rows = states[first : first + _ROWS].astype(np.float32)
            rows *= 1 / np.sqrt(np.mean(rows * rows, axis=1, keepdims=True) + np.float32(self.eps))
            normed[first : first + _ROWS] = weight * rows.astype(states.dtype).astype(np.float32)
        return normed


def final_norm_of(paths: StorePaths, manifest: Manifest) -> FinalNorm:
    """The final norm of the model that a partition's states are of.

    Raises:
        ExportError: the store does not have it.
        StoreError: it is damaged.
    """
    found = read_final_norm(paths, str(manifest.state_spec.get("weight_fingerprint")))
    if found is None:
        raise ExportError(
            "the final norm of this model is not known, so there is no final state after it",
            where=f"{manifest.partition}: {manifest.state_spec.get('model_class')} {manifest.state_spec.get('model_path')}",
            remedy="export for speculators, whose trainer applies the norm itself",
        )
    return FinalNorm(*found)
