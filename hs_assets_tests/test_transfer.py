"""From tensors to dumps through the shared memory, in an environment that has torch: SGLang's."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

CHECKS = Path(__file__).with_name("transfer_checks.py")


def test_rows_of_others_between_ours_take_no_block(engine_python: Path, tmp_path: Path) -> None:
    command = [engine_python, CHECKS, tmp_path / "spool"]
    env = {**os.environ, "PYTHONPATH": str(CHECKS.parents[1])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "20 dumps are whole\n"
