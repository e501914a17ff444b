"""The benchmark of capture still runs, on the CPU engine: what it measures there is nothing to go by."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from hs_assets_tests.dagster_dev import CHECKOUT


def test_capture_and_the_whole_pipeline(checkpoint: Callable[[str], Path], engine_python: Path, tmp_path: Path) -> None:
    words = "--variants D,V,P --in-flight 4 --lengths equal --tokens 64 --seconds 1 --guess 2000 --rows 2000 --runs 2"
    words += " --partition-rows 8 --layers 2 --dtype float32 --spool-gib 0.2"
    command = [sys.executable, "-m", "hs_assets_tests.benchmarks.capture", "--model", str(checkpoint("llama")), *words.split()]
    done = subprocess.run([*command, "--json", str(tmp_path / "measured.json")], cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    measured = {line["variant"]: line for line in json.loads((tmp_path / "measured.json").read_text())}
    assert measured.keys() == {"D", "V", "P"}
    assert all(line["seconds"] > 0 for line in measured.values())
    row_bytes = 2 * 128 * 4  # two states of the tiny model
    assert measured["P"]["bytes"] == measured["P"]["tokens"] * row_bytes
    assert "are what their checksums say" in done.stderr
