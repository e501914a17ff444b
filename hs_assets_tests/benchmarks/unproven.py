"""A plugin that lets the benchmark capture from a model class that has not passed parity on this SGLang yet."""

from __future__ import annotations

import importlib.metadata
import os


def register() -> None:
    """Entry point: `BENCHMARK_UNPROVEN` names the class."""
    from hs_assets.capture.supported import PROVEN

    version = importlib.metadata.version("sglang")
    PROVEN[version] = PROVEN.get(version, frozenset()) | {os.environ["BENCHMARK_UNPROVEN"]}
