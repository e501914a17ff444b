"""What was removed on purpose: the manifests of removed partitions, kept so that lineage can say what became of their samples."""

from __future__ import annotations

import calendar
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hs_assets.errors import StoreError
from hs_assets.store.layout import StorePaths, sync
from hs_assets.store.manifest import Manifest, read_manifest

_TIME = "%Y%m%dT%H%M%S"


@dataclass(frozen=True, slots=True)
class Removed:
    """A manifest as it was when its partition was removed, ``at`` seconds since 1970."""

    manifest: Manifest
    at: float


def move_to_removed(paths: StorePaths, manifest: Path) -> None:
    """Take a manifest out of its layer set: nothing is stored of it any more, all at once."""
    name = f"{time.strftime(_TIME, time.gmtime())}-{secrets.token_hex(4)}.json"
    kept = paths.removed / manifest.parent.name / manifest.stem / name
    kept.parent.mkdir(parents=True, exist_ok=True)
    manifest.rename(kept)
    sync(kept.parent)
    sync(manifest.parent)


def removed_manifests(paths: StorePaths, partition: str = "*") -> Iterator[Removed]:
    """Manifests of a partition that was removed, or of all, by layer set and partition; the latest of each comes last.

    Raises:
        StoreError: one cannot be read.
    """
    for path in sorted(paths.removed.glob(f"*/{partition}/*.json")):
        yield Removed(read_manifest(path), _seconds(path))


def _seconds(path: Path) -> float:
    """When a manifest was removed, as its name says."""
    said = path.stem.partition("-")[0]
    try:
        return calendar.timegm(time.strptime(said, _TIME))
    except ValueError as error:
        remedy = "give it its name again, or remove the file: it is only there for lineage"
        raise StoreError(
            "a removed manifest has another name",
            where=path,
            expected="<UTC time>-<hex>.json",
            remedy=remedy,
        ) from error
