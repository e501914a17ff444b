"""A folder of exported partitions. Each is written beside it and renamed into it whole; what is there has a manifest.

Trainers walk such folders for every file with their suffix, so nothing unfinished may ever lie in one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hs_assets.errors import ExportError
from hs_assets.store.layout import remove_tree, replace_file, sync

MANIFEST = "hs_assets_export.json"
ALL = "all"
"""In an export for speculators: one dataset over all partitions."""

_FORMAT, _VERSION = "hs-assets-export", 1


@dataclass(frozen=True, slots=True)
class ExportFolder:
    """The folder that a trainer is pointed to."""

    root: Path

    @property
    def manifest(self) -> Path:
        return self.root / MANIFEST

    def partition(self, key: str) -> Path:
        return self.root / key

    @property
    def _unfinished(self) -> Path:
        """Beside the folder, on the same disk: what is being written, and locks."""
        return self.root.parent / f".{self.root.name}.unfinished"

    def require_room_beside(self) -> None:
        """Raise ExportError where nothing can be renamed into the folder from beside it: it is the root of a disk."""
        if self.root.is_mount():
            raise ExportError(
                "a folder where a disk is mounted has no place beside it for what is being written",
                where=self.root,
                remedy=f"export to a folder in it, such as {self.root / 'export'}",
            )

    @contextmanager
    def staging(self, name: str) -> Iterator[Path]:
        """An empty folder for what `publish` will name `name`. One process at a time has it; what is left in it is removed."""
        with self.locked(name):
            path = self._unfinished / f"{name}.new"
            for left in (path, self._unfinished / f"{name}.old"):
                _remove(left)
            path.mkdir()
            try:
                yield path
            finally:
                _remove(path)

    def publish(self, staging: Path, name: str) -> None:
        """Put a finished staging folder in its place, its files on disk; what was there before is gone then."""
        for parent, _, files in os.walk(staging, topdown=False):
            for file in files:
                if not Path(parent, file).is_symlink():
                    sync(Path(parent, file))
            sync(Path(parent))
        self.discard(name)
        staging.rename(self.root / name)
        sync(self.root)

    def discard(self, name: str) -> None:
        """Take something out of the folder, at once, and remove it."""
        place, old = self.root / name, self._unfinished / f"{name}.old"
        if place.exists():
            place.rename(old)
        _remove(old)

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Wait until no other process has `name`."""
        path = self._unfinished / f"{name}.lock"
        with ExitStack() as held:
            while True:
                try:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    file = path.open("w")
                except (FileExistsError, FileNotFoundError):  # the folder went with the last lock in it
                    if path.parent.is_file():
                        raise
                    continue
                held.enter_context(file)
                fcntl.flock(file, fcntl.LOCK_EX)
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                        break  # else its last holder removed it
            try:
                yield
            finally:
                path.unlink()
                with suppress(OSError):  # somebody else is at work
                    path.parent.rmdir()


def write_manifest(path: Path, body: dict[str, Any]) -> None:
    """Write a manifest, whole or not at all."""
    replace_file(path, json.dumps({"format": _FORMAT, "version": _VERSION, **body}, indent=1))


def read_manifest(path: Path) -> dict[str, Any] | None:
    """What a manifest says; None where there is none.

    Raises:
        ExportError: it cannot be read, or is of another version.
    """
    if not path.exists():
        return None
    try:
        body: dict[str, Any] = json.loads(path.read_text())
        kind = body["format"], body["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        kind = repr(error), None
    if kind != (_FORMAT, _VERSION):
        raise ExportError(
            "the manifest of an export cannot be read",
            where=path,
            expected=(_FORMAT, _VERSION),
            got=kind,
            remedy="remove the export, or choose another folder",
        )
    return body


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_in(folder: Path) -> set[str]:
    """All files in a folder and below, by their paths in it."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def _remove(folder: Path) -> None:
    if folder.exists():
        remove_tree(folder)
