"""The process that owns SGLang: starts it, proves it, and stops it when nobody has used it for a while.

    python -m hs_assets.serving.watchdog <home>/server

It belongs to nobody's session, so the server outlives the run that asked for it and ``dagster dev`` too. If it is
killed itself, the kernel terminates SGLang.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil

from hs_assets.errors import ServerError, ServerStartError, WireError
from hs_assets.serving.canary import run_canary
from hs_assets.serving.failed_start import note_failed_start
from hs_assets.serving.handshake import answers, raise_if_refused, ready_records
from hs_assets.serving.launch import capture_config, server_environment
from hs_assets.serving.liveness import SILENCE_SECONDS, dead_workers
from hs_assets.serving.server import kill_tree
from hs_assets.serving.state import (
    FAILED,
    STARTING,
    STOPPED,
    STOPPING,
    UP,
    LaunchPlan,
    ServerFolder,
    ServerState,
    log_tail,
    read_counters,
    started,
)
from hs_assets.wire.records import CountersRecord, ReadyRecord
from hs_assets.wire.spool import Spool

_POLL_SECONDS = 0.5
_TERM_SECONDS = 30.0
_DRAIN_SECONDS = 10.0
_ASKS_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""SGLang's own way to end on an error is SIGKILL."""
_SHARED_MEMORY = Path("/dev/shm")
_PR_SET_PDEATHSIG = 1


class _Stop(Exception):  # noqa: N818  # a signal, not an error
    """A signal came, to the watchdog or to SGLang."""


def main(root: Path) -> None:
    """Run one server from its start to its end."""
    folder = ServerFolder(root)
    plan = LaunchPlan.read(folder.plan)
    process, state = _launch(folder, plan)
    try:
        signal.signal(signal.SIGTERM, _on_term)  # before, it ends this process, and SGLang with it
        ready = _wait_until_ready(plan, state, process)
        seen = run_canary(plan, state, ready)
        state = _note(folder, state, UP, seen)
        state = _keep(folder, plan, process, state)
    except _Stop as stop:
        state = _note(folder, state, STOPPING, str(stop))
    except Exception as error:  # whatever it is: the server must not be left to itself
        traceback.print_exc()
        if state.phase == STARTING:
            note_failed_start(folder, plan, state.log, f"{error}\n{log_tail(Path(state.log))}")
        state = _note(folder, state, FAILED, str(error))
    finally:
        _end(plan, process)
    _note(folder, state, STOPPED if state.phase == STOPPING else FAILED, state.message)


def _on_term(_number: int, _frame: FrameType | None) -> None:
    raise _Stop("asked to stop")


def _launch(folder: ServerFolder, plan: LaunchPlan) -> tuple[subprocess.Popen[bytes], ServerState]:
    name = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
    _prepare_spool(plan, name)
    port = free_port()
    log = folder.logs / f"sglang-{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*plan.argv, "--port", str(port)],
            cwd=folder.root,
            env={**os.environ, **server_environment(plan)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    state = ServerState(
        phase=STARTING,
        identity=plan.identity,
        server=name,
        url=f"http://127.0.0.1:{port}",
        spool=plan.spool,
        spool_bytes=plan.spool_bytes,
        backlog_bytes=plan.backlog_bytes,
        residual_ids=plan.residual_ids,
        state_fingerprint=plan.state_fingerprint,
        model_path=plan.model_path,
        sglang_version=plan.sglang_version,
        pid=process.pid,
        pid_created=started(process.pid),
        watchdog_pid=os.getpid(),
        watchdog_created=started(os.getpid()),
        log=str(log),
        started_at=time.time(),
        message="starting",
    )
    state.write(folder.state)
    return process, state


def _prepare_spool(plan: LaunchPlan, server: str) -> None:
    """Make the spool, and remove what an earlier server left to say about itself; dumps stay for those who own them."""
    spool = Spool(Path(plan.spool))
    spool.make()
    _remove_shared_memory(spool)
    for stale in (*spool.ready.iterdir(), *spool.canary.glob("*/*")):
        stale.unlink(missing_ok=True)
    capture_config(plan, server).write(spool.config)


def _remove_shared_memory(spool: Spool) -> None:
    """Remove SGLang's message queues of schedulers that are dead, 25 MB each: who is killed cannot."""
    for path in spool.ready.glob("rank-*.json"):
        with suppress(WireError):  # of another version
            pid = ReadyRecord.read(path).pid
            if not psutil.pid_exists(pid):
                for left in _SHARED_MEMORY.glob(f"sgl_shm_mq_{pid}_*"):
                    left.unlink(missing_ok=True)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_until_ready(plan: LaunchPlan, state: ServerState, process: subprocess.Popen[bytes]) -> list[ReadyRecord]:
    """The ready records of all ranks, checked, once the server answers its health check."""
    spool, deadline = Spool(Path(plan.spool)), time.monotonic() + plan.start_timeout_seconds
    while time.monotonic() < deadline:
        raise_if_refused(spool)
        if (status := process.poll()) is not None:
            if -status in _ASKS_TO_END:
                raise _Stop(f"SGLang was asked to end while it started, by {signal.Signals(-status).name}")
            raise ServerStartError("SGLang ended while it started", got=f"exit status {status}")
        if answers(f"{state.url}/health"):
            return ready_records(plan, spool, state.server)
        time.sleep(_POLL_SECONDS)
    raise ServerStartError(
        "SGLang did not come up in time",
        expected=f"{plan.start_timeout_seconds:.0f} s",
        remedy="raise server.start_timeout_seconds",
    )


def _keep(folder: ServerFolder, plan: LaunchPlan, process: subprocess.Popen[bytes], state: ServerState) -> ServerState:
    """Return when the server has to end or has ended; the state says why."""
    last_used, signs = time.monotonic(), dict[int, tuple[float, float]]()
    while process.poll() is None:
        _check_capture(plan, signs)
        if folder.live_leases():
            last_used = time.monotonic()
        elif time.monotonic() - last_used > plan.idle_stop_seconds:
            with folder.try_start_lock() as held:  # nobody takes a lease at this very moment
                if held and not folder.live_leases():
                    return _note(folder, state, STOPPING, f"nobody used it for {plan.idle_stop_seconds:.0f} s")
        time.sleep(_POLL_SECONDS)
    return _note(folder, state, FAILED, f"SGLang ended with exit status {process.returncode}")


def _check_capture(plan: LaunchPlan, signs: dict[int, tuple[float, float]]) -> None:
    """Raise ServerError where a part of a rank's capture ended, or it counts no more.

    Arguments:
        signs: rank → the time in its last counters, and when they were first seen; kept up to date.
    """
    for counters in _counters(plan):
        where, now = f"rank {counters.rank}", time.monotonic()
        if signs.get(counters.rank, (0.0, 0.0))[0] != counters.at:
            signs[counters.rank] = counters.at, now
        if now - signs[counters.rank][1] > SILENCE_SECONDS:
            raise ServerError("capture is broken", where=where, got="it counts no more")
        if (dead := dead_workers(counters)) is not None:
            raise ServerError("capture is broken", where=where, got=dead)


def _counters(plan: LaunchPlan) -> list[CountersRecord]:
    """The last counters of all ranks."""
    spool = Spool(Path(plan.spool))
    return [counters for rank in range(plan.world_size) if (counters := read_counters(spool, rank)) is not None]


def _end(plan: LaunchPlan, process: subprocess.Popen[bytes]) -> None:
    """Let it write what it captured, then SIGTERM, and SIGKILL to all that is left after a while."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    began = time.time()
    while process.poll() is None and time.time() < began + _DRAIN_SECONDS:
        if all(counters.at > began and not counters.pending_bytes for counters in _counters(plan)):
            break
        time.sleep(_POLL_SECONDS)
    process.terminate()
    try:
        process.wait(_TERM_SECONDS)
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)
    _, alive = psutil.wait_procs(family, timeout=2)
    for child in alive:
        child.kill()
    _remove_shared_memory(Spool(Path(plan.spool)))


def _note(folder: ServerFolder, state: ServerState, phase: str, message: str) -> ServerState:
    state = dataclasses.replace(state, phase=phase, message=message)
    state.write(folder.state)
    return state


if __name__ == "__main__":
    main(Path(sys.argv[1]))
