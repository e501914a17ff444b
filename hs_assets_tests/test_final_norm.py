"""The final state after the norm, against the server's own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np

from hs_assets.exports.final_norm import FinalNorm
from hs_assets_tests.bfloat16_bits import ulps

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SCRIPT = Path(__file__).with_name("server_norm.py")
ULPS = 2


SHAPES = {"narrow": (300, 576, 1e-5), "wide": (40, 7168, 1e-6)}


def test_it_is_within_two_ulps_of_sglang(engine_python: Path, engine_env: dict[str, str], tmp_path: Path) -> None:
    """SGLang adds the last residual and normalises the sum unrounded; what is captured, and normed here, is the rounded sum."""
    weights, files = {}, []
    for name, (rows, width, eps) in SHAPES.items():
        random = np.random.default_rng(width)
        scale = np.exp(random.normal(0, 2, (rows, 1))) * random.uniform(0.2, 20, width)
        given = {side: (random.normal(size=(rows, width)) * scale).astype(BFLOAT16) for side in ("hidden", "residual")}
        weights[name] = random.normal(1, 0.5, width).astype(BFLOAT16).astype(np.float32)
        bits = {side: states.view(np.uint16) for side, states in given.items()}
        np.savez(tmp_path / f"{name}.npz", **bits, weight=weights[name], eps=eps)
        files += [tmp_path / f"{name}.npz", tmp_path / f"{name}-out.npz"]
    subprocess.run([engine_python, SCRIPT, *files], env=engine_env, check=True)
    for name, (_, _, eps) in SHAPES.items():
        with np.load(tmp_path / f"{name}-out.npz") as server:
            before = server["before"].view(BFLOAT16)
            assert ulps(FinalNorm(weights[name], eps)(before).view(np.uint16), server["after"]) <= ULPS
            other = FinalNorm(np.roll(weights[name], 1), eps)
            assert ulps(other(before).view(np.uint16), server["after"]) > 100, "another norm would pass"
