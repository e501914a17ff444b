"""Plugins of SGLang beside ours: what a benchmark compares with, and faults that are put into a real server."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def make_plugin(folder: Path, module: Path) -> str:
    """Make `folder` a place where SGLang finds a module's ``register()``; returns it for PYTHONPATH, before what is there."""
    info = folder / f"{module.stem}-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    shutil.copy(module, folder)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module.stem}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{module.stem} = {module.stem}:register\n")
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
