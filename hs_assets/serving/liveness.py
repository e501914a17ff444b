"""Whether a server that was up still is: one of ours by its processes, an attached one by its port and its counters."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx

from hs_assets.errors import ServerDiedError, WireError
from hs_assets.serving.state import UP, ServerFolder, ServerState, log_tail, read_counters
from hs_assets.wire.records import CountersRecord
from hs_assets.wire.spool import Spool

SILENCE_SECONDS = 300.0
"""A rank whose counters stand still for so long is broken; they are written every second."""

_FRESH_SECONDS = 15.0
_POLL_SECONDS = 0.2
_ASK_SECONDS = 5.0


def trouble(state: ServerState) -> str | None:
    """Why a server cannot be used any more; None as long as it is up."""
    if not state.is_up:
        return state.message if state.phase != UP else "its process ended"
    return attached_trouble(state) if state.attached else None


def require_up(folder: ServerFolder, server: str) -> None:
    """Raise ServerDiedError, with the tail of the log, unless the server called `server` is up."""
    state = folder.read_state()
    known = state is not None and state.server == server
    why = trouble(state) if state is not None and known else "its state file is gone, or another server's"
    if why is None:
        return
    tail = log_tail(Path(state.log)) if state and state.log else ""
    start = "start it again (hs-assets server command), then " if state and state.attached else ""
    remedy = f"{start}materialise again: only what is missing is asked for"
    raise ServerDiedError("the server went away", where=server, got=f"{why}\n{tail}".rstrip(), remedy=remedy)


def why_gone(folder: ServerFolder, server: str, seconds: float, give_up: threading.Event) -> ServerDiedError | None:
    """Why the server is gone, if it is; a watchdog takes some `seconds` to notice."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            require_up(folder, server)
        except ServerDiedError as died:
            return died
        if time.monotonic() >= deadline or give_up.is_set():
            return None
        time.sleep(_POLL_SECONDS)


def attached_trouble(state: ServerState) -> str | None:
    """As `trouble`, of a server that somebody else started: its processes may not be seen from here."""
    if not listens(state.url):
        return f"nobody listens at {state.url}"
    counters = read_counters(Spool(Path(state.spool)), 0)
    if counters is None or counters.server != state.server:
        return "another server took its place" if counters else "it has no counters in its spool any more"
    if time.time() - counters.at > SILENCE_SECONDS:
        return f"its capture has not counted for {time.time() - counters.at:.0f} s"
    return dead_workers(counters)


def dead_workers(counters: CountersRecord) -> str | None:
    """What is wrong with a rank whose copying thread or writers ended."""
    dead = counters.workers - counters.workers_alive
    return f"{dead} of its {counters.workers} workers ended" if dead > 0 else None


def listens(url: str) -> bool:
    """Whether anybody takes connections there; one who is too busy to answer does."""
    try:
        httpx.get(f"{url}/health", timeout=_ASK_SECONDS, trust_env=False)
    except (httpx.ReadTimeout, httpx.PoolTimeout):
        return True
    except httpx.HTTPError:
        return False
    return True


def capturing(spool: Spool) -> str | None:
    """The name of the server that captures into a spool at this moment, if one does.

    What is left there tells nothing, whatever it is: counters of another version, or of a time that is yet to come because
    the clock was set back since.
    """
    try:
        counters = read_counters(spool, 0)
    except WireError:
        with suppress(FileNotFoundError):
            if _is_now(spool.counters(0).stat().st_mtime):
                return "a server of another version of hs-assets"
        return None
    return counters.server if counters is not None and _is_now(counters.at) else None


def _is_now(seconds: float) -> bool:
    return abs(time.time() - seconds) < _FRESH_SECONDS
