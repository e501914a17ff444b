"""What can go: layer sets that another one has replaced, partitions that are not wanted, and what no manifest names.

A run holds its partition's lock from before its first generation until its manifest is written, and a writer holds its
staging folder; both locks vanish with the process. Where a lock cannot be seen (a run on another host, of another home), the
age decides: what no manifest names is kept for a while.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hs_assets.errors import HsAssetsError, StoreError
from hs_assets.store.disposal import DOOMED, Garbage, Kept, Kind, dispose, doomed_manifests, is_held, partition_lock, size_of
from hs_assets.store.generation import state_arrays
from hs_assets.store.layout import StorePaths
from hs_assets.store.manifest import Manifest, manifests_of, read_manifest
from hs_assets.store.removed import move_to_removed, removed_manifests
from hs_assets.store.writer import STAGING_PREFIX

_INTERRUPTED = "an earlier run was removing it"


def collect(
    paths: StorePaths, locks: Path, *, current: str | None = None, min_age: float = 86_400.0, delete: bool = False
) -> Iterator[Garbage | Kept]:
    """Find what can go, partition by partition, and with `delete` remove it.

    Arguments:
        locks: folder of the partitions' locks, ``<partition>.lock``.
        current: a layer set; the others are old, and go where this one has every sample that they have. None keeps all.
        min_age: seconds for which what no manifest ever named is kept.
    """
    for partition in stored_partitions(paths):
        with partition_lock(locks / f"{partition}.lock") as ours:
            if not ours:
                yield Kept(partition, paths.root, "a run is at work on it")
                continue
            try:
                manifests = manifests_of(paths, partition)
            except HsAssetsError as error:
                yield Kept(partition, paths.views, f"a manifest cannot be read, so nobody knows what it names: {error.problem}")
                continue
            staying, leaving = [], _leaving(paths, partition)
            for manifest in manifests:
                path = paths.manifest(manifest.layer_set, partition)
                if _is_replaced(manifest, manifests, current):
                    reason = f"layer set {manifest.layer_set} is replaced by {current}"
                    yield (found := Garbage("manifest", partition, path, reason, path.stat().st_size))
                    if delete:
                        dispose(found)
                    continue
                staying.append(manifest)
                if current not in (None, manifest.layer_set):
                    yield Kept(partition, path, f"layer set {manifest.layer_set} has samples that {current} has not")
            yield from _collect_data(paths, partition, staying, manifests, leaving, min_age, delete)
    yield from _collect_half_written(paths, locks, min_age, delete)


def remove_partition(
    paths: StorePaths, partition: str, *, min_age: float = 86_400.0, delete: bool = False
) -> Iterator[Garbage | Kept]:
    """Find all that is stored of a partition, and with `delete` remove it: its manifests first, which lineage keeps.

    The caller holds the partition's lock.

    Arguments:
        min_age: seconds for which what no manifest ever named is kept.
    """
    manifests, leaving = [], _leaving(paths, partition)
    for path in sorted(paths.views.glob(f"*/{partition}.json")):
        try:
            manifests.append(read_manifest(path))
        except StoreError as error:
            reason = f"lineage cannot keep what it says: {error.problem}"
            yield (damaged := Garbage("manifest", partition, path, reason, path.stat().st_size))
            if delete:
                dispose(damaged)
        else:
            yield Garbage("manifest", partition, path, "lineage keeps what it says", 0)
            if delete:
                move_to_removed(paths, path)
    yield from _collect_data(paths, partition, [], manifests, leaving, min_age, delete)


def _collect_data(
    paths: StorePaths,
    partition: str,
    staying: list[Manifest],
    manifests: list[Manifest],
    leaving: dict[Path, Manifest | None],
    min_age: float,
    delete: bool,
) -> Iterator[Garbage | Kept]:
    """Go through what a partition's manifests name or named. Those that lost their name go last: until then they are known.

    Arguments:
        manifests: all that had their name, those that stay among them.
        leaving: those that an earlier run took the name of; None where one is damaged: then the age of what it named decides.
    """
    before = [removed.manifest for removed in removed_manifests(paths, partition)]
    before += [manifest for manifest in leaving.values() if manifest is not None]
    for found in _find(paths, partition, _named(paths, staying), _named(paths, [*manifests, *before]), min_age):
        yield found
        if delete and isinstance(found, Garbage):
            dispose(found)
    for path in leaving:
        yield Garbage("leftover", partition, path, _INTERRUPTED, path.stat().st_size)
    if delete:
        for path in doomed_manifests(paths, partition):
            path.unlink()


def _collect_half_written(paths: StorePaths, locks: Path, min_age: float, delete: bool) -> Iterator[Garbage | Kept]:
    """Manifests that a crash left half written, of all partitions in one look: a layer set may have very many files."""
    for path in sorted(paths.views.glob("*/.*.json.*.tmp")):
        partition = path.name[1:].rpartition(".json.")[0]
        with partition_lock(locks / f"{partition}.lock") as ours:
            if not ours or not path.exists():
                continue
            reason = _unnamed(path, min_age)
            yield (found := Garbage("leftover", partition, path, reason, size_of(path)) if reason else _young(partition, path))
            if delete and isinstance(found, Garbage):
                dispose(found)


def _find(
    paths: StorePaths, partition: str, named: dict[Path, set[int]], named_before: dict[Path, set[int]], min_age: float
) -> Iterator[Garbage | Kept]:
    """What of a partition's data can go.

    Arguments:
        named: generations, with the residual ids that are used of them, and masks, that manifests name which stay.
        named_before: the same of all manifests, also those that go or went.
    """
    folders = [*paths.root.glob(f"data/*/{partition}/*"), *paths.root.glob(f"masks/{partition}/*")]
    for path in sorted(folders):
        if path in named:
            if named[path]:
                yield from _find_arrays(partition, path, named[path], named_before[path], min_age)
            continue
        kind: Kind = "masks" if path.is_relative_to(paths.root / "masks") else "generation"
        if path in named_before:
            reason: str | None = "only replaced layer sets name it" if named else "only removed manifests name it"
        elif path.name.startswith(DOOMED):
            kind, reason = "leftover", _INTERRUPTED
        elif is_held(path):
            yield Kept(partition, path, "a writer holds it")
            continue
        else:
            reason = _unnamed(path, min_age)
        yield Garbage(kind, partition, path, reason, size_of(path)) if reason else _young(partition, path)


def _find_arrays(
    partition: str, generation: Path, named: set[int], named_before: set[int], min_age: float
) -> Iterator[Garbage | Kept]:
    """State arrays of a generation that stays which can go, and what an earlier run left of its metadata."""
    try:
        arrays = state_arrays(generation)
    except (OSError, KeyError, ValueError, TypeError) as error:
        yield Kept(partition, generation, f"its metadata cannot be read, so nobody knows which arrays it has: {error!r}")
        return
    for path in sorted(generation.glob(".zarr.json.*.tmp")):
        yield Garbage("leftover", partition, path, _INTERRUPTED, size_of(path))
    for residual_id, path in sorted((arrays.held | arrays.freed).items()):
        if residual_id in named or not path.is_dir():
            continue
        reason: str | None = "only replaced layer sets name it"
        if residual_id in arrays.freed:
            reason = _INTERRUPTED
        elif residual_id not in named_before:
            reason = _unnamed(path, min_age)
        yield Garbage("array", partition, path, reason, size_of(path)) if reason else _young(partition, path)


def _unnamed(path: Path, min_age: float) -> str | None:
    return "no manifest names it" if time.time() - path.stat().st_mtime >= min_age else None


def _young(partition: str, path: Path) -> Kept:
    return Kept(partition, path, "no manifest names it, yet")


def _is_replaced(manifest: Manifest, manifests: list[Manifest], current: str | None) -> bool:
    if current is None or manifest.layer_set == current:
        return False
    has = {one.sample_id for other in manifests if other.layer_set == current for one in other.samples}
    return bool(has) and has >= {one.sample_id for one in manifest.samples}


def _named(paths: StorePaths, manifests: list[Manifest]) -> dict[Path, set[int]]:
    """Generations that manifests name, with the residual ids that they use of each, and masks, of which there are none."""
    named: dict[Path, set[int]] = {paths.masks(one.partition, one.prompts.version): set() for one in manifests}
    for manifest in manifests:
        for part in (part for sample in manifest.samples for part in sample.parts):
            generation = paths.generation(manifest.state_fingerprint, manifest.partition, part.generation)
            named.setdefault(generation, set()).update(part.residual_ids)
    return named


def _leaving(paths: StorePaths, partition: str) -> dict[Path, Manifest | None]:
    """Manifests whose removal was begun and not ended."""
    leaving: dict[Path, Manifest | None] = dict.fromkeys(doomed_manifests(paths, partition))
    for path in leaving:
        with suppress(StoreError):
            leaving[path] = read_manifest(path)
    return leaving


def remove_staging(paths: StorePaths, locks: Path, min_age: float) -> int:
    """Remove the generations that were never published and that nobody writes; returns how many.

    Arguments:
        min_age: seconds for which one is kept after the last write to it: a writer on another host is not seen.
    """
    removed = 0
    for folder in sorted(paths.root.glob(f"data/*/*/{STAGING_PREFIX}*")):
        partition = folder.parent.name
        with partition_lock(locks / f"{partition}.lock") as ours:
            if ours and folder.exists() and not is_held(folder) and _unchanged_for(folder) >= min_age:
                dispose(Garbage("generation", partition, folder, "it was never published", 0))
                removed += 1
    return removed


def _unchanged_for(folder: Path) -> float:
    """Seconds since anything in a folder was written."""
    return time.time() - max((path.stat().st_mtime for path in (folder, *folder.rglob("*"))), default=0.0)


def stored_partitions(paths: StorePaths) -> list[str]:
    """Keys of all partitions of which anything lies in the store, named by a manifest or not."""
    folders = [*paths.root.glob("data/*/*"), *paths.root.glob("masks/*")]
    keys = {path.name for path in folders if path.is_dir() and any(path.iterdir())}
    keys |= {path.stem for path in paths.views.glob("*/[!.]*.json")}
    return sorted(keys | {path.name.removeprefix(DOOMED) for path in doomed_manifests(paths, "*")})
