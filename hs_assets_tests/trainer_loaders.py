"""The trainers' own loaders, from their published packages: installed once beside the CPU engine, whose torch they use.

They lie in ``trainer-loaders`` beside the engine (340 MB, most of it pyarrow and pandas) and are stamped with the hash of
their requirements and of the engine's: made once, and again when either changes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from hs_assets.serving import engine

_REQUIREMENTS = Path(__file__).with_name("trainer_loaders.txt")
_LEGACY = "speculators==0.6.0.2"
"""The last that reads the files of the first versions."""


def install(engine_python: Path, say: Callable[[str], None]) -> Path:
    """Make the folder of the loaders, unless it is there; its subfolder ``legacy`` has the older speculators."""
    folder = engine.engine_folder().with_name("trainer-loaders")
    stamp = hashlib.sha256(_REQUIREMENTS.read_bytes() + _LEGACY.encode() + engine.stamp().encode()).hexdigest()
    with folder.with_name(folder.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp_file = folder / "hs-assets-stamp"
        if stamp_file.exists() and stamp_file.read_text() == stamp:
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        say(f"installing the trainers' loaders in {folder}")
        pip = [str(engine_python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        for target, what in ((folder, ["-r", str(_REQUIREMENTS)]), (folder / "legacy", [_LEGACY])):
            subprocess.run([*pip, "--target", str(target), *what], check=True)
        stamp_file.write_text(stamp)
    return folder


def read_exports(engine_python: Path, loaders: Path, *arguments: str | Path, legacy: bool = False) -> None:
    """Run `read_exports.py` where torch and the loaders are."""
    path = [loaders / "legacy", loaders] if legacy else [loaders]
    env = {**os.environ, **engine.ENVIRONMENT, "PYTHONPATH": ":".join(str(p) for p in (*path, engine.SHIMS))}
    script = Path(__file__).with_name("read_exports.py")
    command = [str(engine_python), "-W", "ignore", str(script), *map(str, arguments)]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    print(result.stdout, result.stderr[-4000:], file=sys.stderr)
    result.check_returncode()
