"""Start, share and stop a home's one server: what runs and commands call.

Whoever needs the server takes a lease and asks for it with `lease_server`. If it runs and is the one that is asked for,
that is all; if it runs as another, it is stopped once nobody else uses it; if it does not run, it is started. Two
processes that ask at once start one. A start that failed just now is not tried again by runs (failed_start.py). Where the
configuration names a server that somebody else runs, see attach.py.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from hs_assets.errors import ServerError, ServerStartError
from hs_assets.serving.attach import attach
from hs_assets.serving.failed_start import forget_failed_start, note_failed_start, raise_if_failed_just_now
from hs_assets.serving.liveness import capturing, trouble
from hs_assets.serving.state import (
    FAILED,
    STARTING,
    STOPPED,
    UP,
    LaunchPlan,
    ServerFolder,
    ServerState,
    lives,
    log_tail,
)
from hs_assets.wire.spool import Spool

_POLL_SECONDS = 0.2
_SAY_SECONDS = 10.0
_STOP_SECONDS = 90.0


@contextmanager
def lease_server(
    folder: ServerFolder, plan: LaunchPlan, purpose: str, say: Callable[[str], None], *, again: bool = False
) -> Iterator[ServerState]:
    """A server that is up and is the one of `plan`, kept up as long as this is entered.

    Arguments:
        purpose: shown by `hs-assets server status`.
        say: is told what is waited for.
        again: try a start also where the same failed just now (failed_start.py): somebody asks for it.

    Raises:
        ServerStartError: it did not come up, now or just before; with the tail of its log.
        ServerError, HandshakeError, SpoolError: see `attach`, where `plan.url` names a server that somebody else runs.
    """
    folder.make()
    with ExitStack() as stack:
        with _start_lock(folder, say):  # who has a lease waits for nobody: two that wait for each other's would wait forever
            state = attach(folder, plan, say) if plan.url else _ensure(folder, plan, say, again)
            stack.enter_context(folder.lease(purpose))
        yield state


def stop_server(folder: ServerFolder, say: Callable[[str], None], *, force: bool = False) -> bool:
    """Stop the server; returns False where none of our own runs.

    Raises:
        ServerError: it is in use, and `force` is off.
    """
    folder.make()
    with _start_lock(folder, say):
        state = folder.read_state()
        if state is not None and state.attached:
            say(f"the server at {state.url} was started by somebody else: it is left to them")
            return False
        if state is None or not _anything_lives(state):
            return False
        leases = folder.live_leases()
        if leases and not force:
            users = ", ".join(f"{lease.purpose} (pid {lease.pid})" for lease in leases)
            raise ServerError("the server is in use", where=state.server, got=users, remedy="wait, or stop it with --force")
        _stop(state, say)
    return True


def _ensure(folder: ServerFolder, plan: LaunchPlan, say: Callable[[str], None], again: bool) -> ServerState:
    """The server of `plan`, up; to be called with the start lock held."""
    state = folder.read_state()
    if state is not None and state.identity == plan.identity and state.phase == STARTING and state.watchdog_lives:
        again = False  # this is the try that was asked for
        say(f"the server {state.server} is starting already")  # who began it was cut off
        starting = state
        _wait(lambda: _settled(folder, starting), plan.start_timeout_seconds, "the server is starting", say)
        state = folder.read_state()
    if state is not None and state.is_up and state.identity == plan.identity:
        return state
    if not again:
        raise_if_failed_just_now(folder, plan)
    if state is not None and _anything_lives(state):
        say(f"the server {state.server} is {state.phase}, but another one is needed: stopping it once nobody uses it")
        _wait(lambda: not folder.live_leases(), plan.start_timeout_seconds, "waiting for those who use the server", say)
        _stop(state, say)
    return _start(folder, plan, say)


def _settled(folder: ServerFolder, before: ServerState) -> bool:
    """Whether a server that was starting is up, or will not be."""
    state = folder.read_state()
    return state is None or state.phase != STARTING or not before.watchdog_lives


def _start(folder: ServerFolder, plan: LaunchPlan, say: Callable[[str], None]) -> ServerState:
    before, other = folder.read_state(), capturing(Spool(Path(plan.spool)))
    if other is not None and (before is None or before.attached or before.server != other):
        remedy = "set server.url to it, or end it"
        raise ServerError("somebody else's server captures into this spool", where=plan.spool, got=other, remedy=remedy)
    plan.write(folder.plan)
    forget_failed_start(folder, plan)
    say(f"starting SGLang {plan.sglang_version} for {plan.model_path}; spool {plan.spool}, {plan.spool_bytes / 2**30:.1f} GiB")
    with (folder.logs / "watchdog.log").open("a") as log:
        watchdog = subprocess.Popen(
            [sys.executable, "-m", "hs_assets.serving.watchdog", str(folder.root)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    threading.Thread(target=watchdog.wait, daemon=True).start()  # no zombie, should it end before this process

    def settled() -> bool:
        state = folder.read_state()
        ours = state is not None and state.watchdog_pid == watchdog.pid
        return watchdog.poll() is not None or (ours and state is not None and state.phase != STARTING)

    _wait(settled, plan.start_timeout_seconds + _STOP_SECONDS, "the server is starting", say)
    state = folder.read_state()
    if state is None or state.watchdog_pid != watchdog.pid:
        problem, tail = "the server's watchdog ended at once", log_tail(folder.logs / "watchdog.log")
        if (watchdog.poll() or 0) > 0:  # no signal ended it
            note_failed_start(folder, plan, folder.root, f"{problem}\n{tail}")
        raise ServerStartError(problem, where=folder.root, got=tail)
    if state.phase != UP:
        raise ServerStartError("the server did not come up", where=state.log, got=f"{state.message}\n{log_tail(Path(state.log))}")
    say(f"the server is up: {state.message}")
    return state


def _stop(state: ServerState, say: Callable[[str], None]) -> None:
    """Ask the watchdog to stop the server; without one, kill what it left behind."""
    say(f"stopping the server {state.server}")
    if state.watchdog_lives:
        psutil.Process(state.watchdog_pid).terminate()
        _wait(lambda: not _anything_lives(state), _STOP_SECONDS, "the server is stopping", say)
    elif lives(state.pid, state.pid_created):
        kill_tree(state.pid)


def kill_tree(pid: int) -> None:
    """SIGKILL a process and everything below it."""
    try:
        parent = psutil.Process(pid)
        family = [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return
    for process in family:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family, timeout=_STOP_SECONDS)


def describe(state: ServerState | None) -> str:
    """The phase of a server as it is now, whatever its state file says."""
    if state is None:
        return STOPPED
    if state.attached:
        return UP if trouble(state) is None else FAILED
    if state.phase in (STOPPED, FAILED) or state.is_up or (state.phase != UP and state.watchdog_lives):
        return state.phase
    return FAILED


def _anything_lives(state: ServerState) -> bool:
    return state.watchdog_lives or lives(state.pid, state.pid_created)


@contextmanager
def _start_lock(folder: ServerFolder, say: Callable[[str], None]) -> Iterator[None]:
    said = False
    while True:
        with folder.try_start_lock() as held:
            if held:
                yield
                return
        if not said:
            say("somebody else is starting or stopping the server: waiting")
            said = True
        time.sleep(_POLL_SECONDS)


def _wait(done: Callable[[], bool], seconds: float, what: str, say: Callable[[str], None]) -> None:
    began = said = time.monotonic()
    while not done():
        now = time.monotonic()
        if now - began > seconds:
            raise ServerError("gave up waiting", where=what, expected=f"within {seconds:.0f} s")
        if now - said > _SAY_SECONDS:
            said = now
            say(f"{what}: {now - began:.0f} s")
        time.sleep(_POLL_SECONDS)
