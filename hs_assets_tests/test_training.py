"""The torch data sets, in an environment that has torch: SGLang's, with the packages of this one behind its own."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

CHECKS = Path(__file__).with_name("training_checks.py")
ROOT = CHECKS.parents[1]


def test_training_with_torch(engine_python: Path) -> None:
    count = CHECKS.read_text().count("\ndef test_")
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{sysconfig.get_paths()['purelib']}"}
    command = [engine_python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", "--durations=5", CHECKS]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    print(done.stdout[-20_000:], done.stderr[-5_000:])
    assert done.returncode == 0
    passed = int(done.stdout.strip().splitlines()[-1].split(" passed")[0].split()[-1])
    assert passed >= count
    assert "skipped" not in done.stdout
