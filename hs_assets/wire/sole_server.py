"""Whether a server may be started into a spool; what the script of `hs-assets server command` asks before it clears anything.

    python -m hs_assets.wire.sole_server SPOOL URL 9>>LOCK

File descriptor 9 is locked for as long as the shell has it open, and the server that it starts. Exit status 1, with the reason,
where that is locked already, anybody listens at URL, or a server counts in the spool.
"""

from __future__ import annotations

import fcntl
import socket
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

from hs_assets.wire.spool import Spool

DESCRIPTOR = 9
_LOOKED_SECONDS = 3.0
"""Counters are written every second."""


def trouble(spool: Spool, url: str) -> str | None:
    """Why no server may be started into a spool, to listen at a URL; None where one may."""
    try:
        fcntl.flock(DESCRIPTOR, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return f"a server that was started like this is starting or running; it captures into {spool.root}"
    place = urlsplit(url)
    with socket.socket() as probe:
        if probe.connect_ex((place.hostname or "", place.port or 0)) == 0:
            return f"somebody answers at {url}"
    before = _counted(spool)
    if before:
        time.sleep(_LOOKED_SECONDS)
    if any(was < now for was, now in zip(before, _counted(spool), strict=False)):
        return f"another server captures into {spool.root}"
    return None


def _counted(spool: Spool) -> list[int]:
    """When the ranks of the last server counted last, in nanoseconds."""
    return [path.stat().st_mtime_ns for path in sorted(spool.ready.glob("counters-*.json"))]


if __name__ == "__main__":
    why = trouble(Spool(Path(sys.argv[1])), sys.argv[2])
    sys.exit(f"{why}; end it first" if why else 0)
