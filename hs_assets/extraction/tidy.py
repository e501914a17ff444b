"""What crashes left, removed: dumps half done, generations that were never published, leases of processes that are gone."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from hs_assets.config import Project
from hs_assets.serving.admission import spool_use, sweep
from hs_assets.serving.state import ServerFolder
from hs_assets.store.gc import partition_lock
from hs_assets.store.layout import remove_tree
from hs_assets.store.writer import STAGING_PREFIX
from hs_assets.wire.spool import Spool

_STAGING_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Tidied:
    """What was removed, and what still lies in the spool: dumps that a run is at, or that wait to be stored."""

    dumps: int
    generations: int
    leases: int
    dumps_left: int
    dump_bytes_left: int

    def __str__(self) -> str:
        return (
            f"removed {self.dumps} dumps half done, {self.generations} generations never published, {self.leases} leases of "
            f"processes that are gone; {self.dumps_left} dumps, {self.dump_bytes_left:,} bytes, are in the spool"
        )


def tidy(project: Project, staging_seconds: float = _STAGING_SECONDS) -> Tidied:
    """Remove what crashes left.

    Arguments:
        staging_seconds: an unpublished generation that nothing was written to for so long is nobody's, if no run of this home
            is at its partition; another host's may be.
    """
    spool, server = Spool(project.spool_path), ServerFolder(project.home.server)
    dumps = sweep(spool) if spool.dumps.is_dir() else 0
    leases = len(list(server.leases.glob("*.json")))
    gone = leases - len(server.live_leases())
    folders = project.store_path.glob(f"data/*/*/{STAGING_PREFIX}*")
    generations = sum(_remove_staging(project, folder, staging_seconds) for folder in folders)
    return Tidied(dumps, generations, gone, *spool_use(project.spool_path))


def _remove_staging(project: Project, folder: Path, seconds: float) -> bool:
    """Remove an unpublished generation, if it is nobody's."""
    with partition_lock(project.home.locks / f"{folder.parent.name}.lock") as ours:
        if not ours:
            return False
        newest = max((path.stat().st_mtime for path in (folder, *folder.rglob("*")) if path.exists()), default=0.0)
        if time.time() - newest < seconds:
            return False
        remove_tree(folder)
    return True
