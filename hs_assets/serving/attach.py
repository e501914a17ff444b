"""A server that somebody else started: taken as it is once it is proven, never started or stopped from here."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from hs_assets.errors import HandshakeError, ServerError, WireError
from hs_assets.serving.canary import run_canary
from hs_assets.serving.handshake import answers, raise_if_refused, ready_records
from hs_assets.serving.launch import read_capture_config
from hs_assets.serving.liveness import attached_trouble, capturing, listens
from hs_assets.serving.spec import command_flags
from hs_assets.serving.state import UP, LaunchPlan, ServerFolder, ServerState
from hs_assets.wire.records import CaptureConfig, ReadyRecord
from hs_assets.wire.spool import Spool

_COMMAND = "start it with what hs-assets server command prints"


def attach(folder: ServerFolder, plan: LaunchPlan, say: Callable[[str], None]) -> ServerState:
    """The server at `plan.url`, proven by handshake and canary; to be called with the start lock held.

    One that was proven before and still is the same process is not proven again.

    Raises:
        ServerError: it does not answer, or this home's own server runs.
        ServerStartError: the capture plugin refuses it.
        HandshakeError: it is not patched, or not the one that the configuration asks for.
        SpoolError: its spool cannot be reached.
    """
    before = folder.read_state()
    if before is not None and before.watchdog_lives:
        remedy = "hs-assets server stop, or take server.url out of the configuration"
        raise ServerError(
            "a server of this home's own runs", where=before.server, expected=plan.url, got=before.url, remedy=remedy
        )
    spool = Spool(Path(plan.spool))
    config = read_capture_config(spool)
    raise_if_refused(spool)  # such a server ends at once
    if not listens(plan.url):
        raise ServerError("no server answers", where=plan.url, remedy=f"{_COMMAND}, or take server.url out of the configuration")
    if not answers(f"{plan.url}/health"):
        raise ServerError("the server does not say that it is well", where=plan.url, remedy="wait until it is up, or see its log")
    if capturing(spool) != config.server:
        raise HandshakeError(
            "the server is not patched: nobody captures into its spool",
            where=plan.url,
            expected=f"counters of {config.server} in {spool.ready}, written every second",
            got=capturing(spool) or "none, or old ones",
            remedy=_COMMAND,
        )
    _check(plan, config, spool)
    ready = ready_records(plan, spool, config.server)
    state = ServerState(
        phase=UP,
        identity=plan.identity,
        server=config.server,
        url=plan.url,
        spool=plan.spool,
        spool_bytes=config.spool_bytes,
        backlog_bytes=config.backlog_bytes,
        residual_ids=config.residual_ids,
        state_fingerprint=config.state_fingerprint,
        model_path=plan.model_path,
        sglang_version=plan.sglang_version,
        pid=ready[0].pid,
        pid_created=0.0,
        watchdog_pid=0,
        watchdog_created=0.0,
        log="",
        started_at=spool.ready_record(0).stat().st_mtime,
        message="",
        attached=True,
    )
    if (why := attached_trouble(state)) is not None:
        raise ServerError("the server cannot be used", where=plan.url, got=why, remedy=f"end it, and {_COMMAND}")
    if before is not None and before.attached and _who(before) == _who(state):
        return before
    say(f"attaching to the server {config.server} at {plan.url}, pid {ready[0].pid}, which somebody else started")
    state = _proven(plan, state, ready)
    state.write(folder.state)
    return state


def _check(plan: LaunchPlan, config: CaptureConfig, spool: Spool) -> None:
    """Raise HandshakeError unless the server has the flags, the layers and the spec that the configuration asks for."""
    differences: list[tuple[str, object, object]] = []
    path, wanted = spool.ready_record(0), set(command_flags(plan.argv))
    has = set(command_flags(ReadyRecord.read(path).argv)) if path.exists() else wanted
    if wanted != has:
        lacks, only = sorted(wanted - has), sorted(has - wanted)
        differences.append(("flags", lacks or f"none of {only}", only or f"none of {lacks}"))
    if plan.residual_ids != config.residual_ids:
        differences.append(("residual ids", plan.residual_ids, config.residual_ids))
    if plan.state_fingerprint != config.state_fingerprint:
        differences.append(("state spec", plan.state_fingerprint, config.state_fingerprint))
    for name, expected, got in differences:
        raise HandshakeError(
            "the server is not the one that the configuration asks for",
            where=f"{plan.url}: {name}",
            expected=expected,
            got=got,
            remedy=f"end it, and {_COMMAND}; or change the configuration",
        )


def _who(state: ServerState) -> tuple[object, ...]:
    return state.identity, state.server, state.url, state.spool, state.pid, state.started_at


def _proven(plan: LaunchPlan, state: ServerState, ready: list[ReadyRecord]) -> ServerState:
    began = time.monotonic()
    try:
        return dataclasses.replace(state, message=run_canary(plan, state, ready))
    except WireError as error:
        raise HandshakeError(
            "the server answers, but what it captures does not come into this spool",
            where=plan.url,
            expected=f"the canary's dumps in {plan.spool}",
            got=f"{error.problem}, after {time.monotonic() - began:.0f} s",
            remedy=f"check that server.url and server.spool are of one server, or {_COMMAND}",
        ) from error
