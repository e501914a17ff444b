"""What crashes left, removed: dumps half done, generations that were never published, leases of processes that are gone."""

from __future__ import annotations

from dataclasses import dataclass

from hs_assets.config import Project
from hs_assets.serving.admission import spool_use, sweep
from hs_assets.serving.state import ServerFolder
from hs_assets.store.gc import remove_staging
from hs_assets.store.layout import StorePaths
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
            is at its partition and no writer holds it.
    """
    spool, server = Spool(project.spool_path), ServerFolder(project.home.server)
    dumps = sweep(spool) if spool.dumps.is_dir() else 0
    leases = len(list(server.leases.glob("*.json")))
    gone = leases - len(server.live_leases())
    generations = remove_staging(StorePaths(project.store_path), project.home.locks, staging_seconds)
    return Tidied(dumps, generations, gone, *spool_use(project.spool_path))
