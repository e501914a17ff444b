"""Where everything lies in a store, and the version of the format (README.md specifies it)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hs_assets.errors import StoreError, StoreVersionError
from hs_assets.wire.records import replacing

STORE_VERSION = 1
_ATTRIBUTE = "hs_assets_store_version"


@dataclass(frozen=True, slots=True)
class StorePaths:
    """Paths inside a store."""

    root: Path

    def generations(self, fingerprint: str, partition: str) -> Path:
        return self.root / "data" / fingerprint / partition

    def generation(self, fingerprint: str, partition: str, name: str) -> Path:
        return self.generations(fingerprint, partition) / name

    @property
    def views(self) -> Path:
        return self.root / "views"

    def manifest(self, layer_set_id: str, partition: str) -> Path:
        return self.views / layer_set_id / f"{partition}.json"

    def manifests(self, layer_set_id: str) -> list[Path]:
        """All manifests of a layer set, in the order of their partitions."""
        return sorted((self.views / layer_set_id).glob("*.json"), key=lambda path: path.stem)

    @property
    def removed(self) -> Path:
        """Manifests of partitions that were removed, ``<layer set id>/<partition>/<UTC time>-<hex>.json``."""
        return self.root / "removed"

    def masks(self, partition: str, version: str) -> Path:
        return self.root / "masks" / partition / version

    def model(self, weight_fingerprint: str) -> Path:
        return self.root / "models" / weight_fingerprint


def create(root: Path) -> StorePaths:
    """The store at `root`, made if it is not there yet."""
    if not (root / "zarr.json").exists():
        text = json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {_ATTRIBUTE: STORE_VERSION}}, indent=2)
        replace_file(root / "zarr.json", text)
    return check(root)


def check(root: Path) -> StorePaths:
    """The store at `root`.

    Raises:
        StoreError: there is none.
        StoreVersionError: it was written by a newer version.
    """
    try:
        version = json.loads((root / "zarr.json").read_text())["attributes"][_ATTRIBUTE]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            "there is no store here",
            where=root,
            expected=f"zarr.json with the attribute {_ATTRIBUTE}",
            got=repr(error),
            remedy="materialise eagle3_samples first (hs-assets demo), or check --home",
        ) from error
    if version != STORE_VERSION:
        raise StoreVersionError(
            f"the store has another version, {version}: this hs-assets reads {STORE_VERSION}",
            where=root,
            expected=STORE_VERSION,
            got=version,
            remedy="install a version of hs-assets that reads it",
        )
    return StorePaths(root)


def array_name(residual_id: int, final: int) -> str:
    """``residual_003``; the final state's array is called ``final``."""
    return "final" if residual_id == final else f"residual_{residual_id:03d}"


def replace_file(path: Path, text: str) -> None:
    """Write a file so that it is there whole, also after a power cut, or not at all; on a full disk nothing is left of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync(path.parent)


def publish_folder(staging: Path, destination: Path) -> None:
    """Give a finished folder its name: its files are on disk first, then the rename, then the folder that holds it."""
    for path in _tree(staging):
        sync(path)
    staging.rename(destination)
    sync(destination.parent)


def sync(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _tree(folder: Path) -> Iterator[Path]:
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            yield Path(parent, name)
        yield Path(parent)


def remove_tree(folder: Path) -> None:
    """Remove a folder that was never published."""
    for path in _tree(folder):
        with suppress(FileNotFoundError):
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink()
