"""How far bfloat16 numbers are apart."""

from __future__ import annotations

import numpy as np


def ulps(ours: np.ndarray, theirs: np.ndarray) -> int:
    """The largest distance of two arrays of bfloat16 bits, in steps between neighbouring numbers."""
    ordered = [np.where(b < 1 << 15, b.astype(np.int64), (1 << 15) - b.astype(np.int64)) for b in (ours, theirs)]
    return int(np.abs(ordered[0] - ordered[1]).max())
