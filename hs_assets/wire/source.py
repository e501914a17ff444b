"""The hash of the plugin's own source, by which pipeline and server know that they run the same code."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

_PARTS = ("errors.py", "wire/*.py", "capture/*.py")


@functools.cache
def source_hash() -> str:
    """Hex sha256 of the names and bytes of every Python file that runs inside SGLang's processes, as this process found them."""
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for pattern in _PARTS:
        for path in sorted(package.glob(pattern)):
            digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
