"""What can go: layer sets that another one has replaced, and what no manifest names. Never what a running writer holds.

A run holds its partition's lock from before its first generation until its manifest is written, and a writer holds its
staging folder; both locks vanish with the process. Where a lock cannot be seen (a run on another host, of another home), the
age decides: what no manifest names is kept for a while.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hs_assets.errors import HsAssetsError
from hs_assets.store.layout import StorePaths, remove_tree, sync
from hs_assets.store.manifest import Manifest, manifests_of
from hs_assets.store.writer import STAGING_PREFIX

_DOOMED = ".garbage-"


@dataclass(frozen=True, slots=True)
class Garbage:
    """A file or folder that can go. ``bytes`` as they lie on disk."""

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


def collect(
    paths: StorePaths, locks: Path, *, current: str | None = None, min_age: float = 86_400.0, delete: bool = False
) -> Iterator[Garbage | Kept]:
    """Find what can go, partition by partition, and with `delete` remove it.

    Arguments:
        locks: folder of the partitions' locks, ``<partition>.lock``.
        current: a layer set; the others are old, and go where this one has every sample that they have. None keeps all.
        min_age: seconds for which what no manifest ever named is kept.
    """
    for partition in _partitions(paths):
        with partition_lock(locks / f"{partition}.lock") as ours:
            if not ours:
                yield Kept(partition, paths.root, "a run is at work on it")
                continue
            try:
                manifests = manifests_of(paths, partition)
            except HsAssetsError as error:
                yield Kept(partition, paths.views, f"a manifest cannot be read, so nobody knows what it names: {error.problem}")
                continue
            for found in _find(paths, partition, manifests, current, min_age):
                yield found
                if delete and isinstance(found, Garbage):
                    _remove(found.path)


def _find(
    paths: StorePaths, partition: str, manifests: list[Manifest], current: str | None, min_age: float
) -> Iterator[Garbage | Kept]:
    """In the order in which it may be removed: manifests before what they name."""
    old = [manifest for manifest in manifests if _is_replaced(manifest, manifests, current)]
    for manifest in manifests:
        path = paths.manifest(manifest.layer_set, partition)
        if manifest in old:
            yield Garbage(partition, path, f"layer set {manifest.layer_set} is replaced by {current}", path.stat().st_size)
        elif current not in (None, manifest.layer_set):
            yield Kept(partition, path, f"layer set {manifest.layer_set} has samples that {current} has not")
    staying = [manifest for manifest in manifests if manifest not in old]
    named, named_before = _named(paths, staying), _named(paths, manifests)
    folders = [*paths.root.glob(f"data/*/{partition}/*"), *paths.root.glob(f"masks/{partition}/*")]
    for path in sorted([*folders, *paths.views.glob(f"*/.{partition}.json.*.tmp")]):
        if path in named:
            continue
        if path in named_before:
            reason: str | None = "only replaced layer sets name it"
        elif path.name.startswith(_DOOMED):
            reason = "an earlier run was removing it"
        elif _is_held(path):
            yield Kept(partition, path, "a writer holds it")
            continue
        else:
            reason = "no manifest names it" if time.time() - path.stat().st_mtime >= min_age else None
        yield Garbage(partition, path, reason, _size(path)) if reason else Kept(partition, path, "no manifest names it, yet")


def _is_replaced(manifest: Manifest, manifests: list[Manifest], current: str | None) -> bool:
    if current is None or manifest.layer_set == current:
        return False
    has = {one.sample_id for other in manifests if other.layer_set == current for one in other.samples}
    return bool(has) and has >= {one.sample_id for one in manifest.samples}


def _named(paths: StorePaths, manifests: list[Manifest]) -> set[Path]:
    """Generations and masks that manifests name."""
    named = {paths.masks(manifest.partition, manifest.prompts.version) for manifest in manifests}
    for manifest in manifests:
        for generation in {part.generation for sample in manifest.samples for part in sample.parts}:
            named.add(paths.generation(manifest.state_fingerprint, manifest.partition, generation))
    return named


def remove_staging(paths: StorePaths, locks: Path, min_age: float) -> int:
    """Remove the generations that were never published and that nobody writes; returns how many.

    Arguments:
        min_age: seconds for which one is kept after the last write to it: a writer on another host is not seen.
    """
    removed = 0
    for folder in sorted(paths.root.glob(f"data/*/*/{STAGING_PREFIX}*")):
        with partition_lock(locks / f"{folder.parent.name}.lock") as ours:
            if ours and folder.exists() and not _is_held(folder) and _unchanged_for(folder) >= min_age:
                _remove(folder)
                removed += 1
    return removed


def _unchanged_for(folder: Path) -> float:
    """Seconds since anything in a folder was written."""
    return time.time() - max((path.stat().st_mtime for path in (folder, *folder.rglob("*"))), default=0.0)


def _partitions(paths: StorePaths) -> list[str]:
    folders = [*paths.root.glob("data/*/*"), *paths.root.glob("masks/*")]
    return sorted({path.name for path in folders if path.is_dir()} | {path.stem for path in paths.views.glob("*/[!.]*.json")})


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


def _is_held(folder: Path) -> bool:
    """Whether a writer holds a staging folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _remove(path: Path) -> None:
    """A folder loses its name first: nobody ever finds half of it under it."""
    if not path.is_dir():
        path.unlink()
    elif path.name.startswith(_DOOMED):
        remove_tree(path)
    else:
        doomed = path.with_name(_DOOMED + path.name)
        path.rename(doomed)
        sync(doomed.parent)
        remove_tree(doomed)


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
