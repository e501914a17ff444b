"""How something leaves a store: it loses its name first, so that nobody ever finds half of it under it.

What was begun and not ended is found by the names that it has then, and goes with the next time that garbage is removed.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hs_assets.store.generation import record_freed
from hs_assets.store.layout import StorePaths, remove_tree, sync

DOOMED = ".garbage-"

Kind = Literal["manifest", "generation", "array", "masks", "leftover", "prompts", "responses"]


@dataclass(frozen=True, slots=True)
class Garbage:
    """A file or folder that can go. ``bytes`` as they lie on disk; those that become free.

    ``kind``: an array is one of states of a generation of which others stay; a leftover was begun and not ended.
    """

    kind: Kind
    partition: str
    path: Path
    reason: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Kept:
    """A partition, or something of it, that is left alone, and why."""

    partition: str
    where: Path
    reason: str


def dispose(found: Garbage) -> None:
    """Remove it; of a manifest only the name, until what it names is gone (`doomed_manifests`)."""
    path = found.path
    if found.kind == "manifest":
        path.rename(path.with_name(DOOMED + path.stem))
        sync(path.parent)
    elif not path.is_dir():
        path.unlink()
    elif path.name.startswith(DOOMED):
        remove_tree(path)
    elif found.kind == "array":
        record_freed(path)
        _remove(path, path.parent.with_name(f"{DOOMED}{path.parent.name}-{path.name}"))
    else:
        _remove(path, path.with_name(DOOMED + path.name))


def doomed_manifests(paths: StorePaths, partition: str) -> list[Path]:
    """Manifests of a partition that lost their name, and are there still because what they name is not gone yet."""
    return sorted(paths.views.glob(f"*/{DOOMED}{partition}"))


def _remove(folder: Path, doomed: Path) -> None:
    folder.rename(doomed)
    sync(doomed.parent)
    if folder.parent != doomed.parent:
        sync(folder.parent)
    remove_tree(doomed)


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


@contextmanager
def partition_lock(path: Path) -> Iterator[bool]:
    """Hold a partition's lock; False where somebody else does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def is_held(folder: Path) -> bool:
    """Whether a writer holds a staging folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
