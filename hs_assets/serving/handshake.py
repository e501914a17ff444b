"""What a server says of itself, compared with what was asked for, before the canary proves it."""

from __future__ import annotations

import httpx

from hs_assets.errors import HandshakeError, ServerStartError
from hs_assets.serving.state import LaunchPlan
from hs_assets.wire.records import CAPTURE_VERSION, ReadyRecord, RefusedRecord
from hs_assets.wire.source import source_hash
from hs_assets.wire.spool import Spool


def raise_if_refused(spool: Spool) -> None:
    """Raise ServerStartError, with the reasons, where the capture plugin will not run in a server."""
    if refused := sorted(spool.ready.glob("refused-*.json")):
        reasons = "; ".join(RefusedRecord.read(refused[0]).reasons)
        raise ServerStartError(
            "the capture plugin refuses this server", got=reasons, remedy="change server.args, or the version of SGLang"
        )


def ready_records(plan: LaunchPlan, spool: Spool, server: str) -> list[ReadyRecord]:
    """The ready records of all ranks, checked.

    Raises:
        HandshakeError: one is missing, or not what was asked for.
    """
    paths = [spool.ready_record(rank) for rank in range(plan.world_size)]
    if absent := [path.name for path in paths if not path.exists()]:
        raise HandshakeError(
            "SGLang is up, but the capture plugin did not start in it",
            expected=f"ready records {absent} in {spool.ready}",
            remedy="look for 'plugin' in the server's log",
        )
    ready = [ReadyRecord.read(path) for path in paths]
    for record in ready:
        _check(plan, server, record)
    return ready


def _check(plan: LaunchPlan, server: str, ready: ReadyRecord) -> None:
    expected = {
        "server": server,
        "capture_version": CAPTURE_VERSION,
        "source_hash": source_hash(),
        "sglang_version": plan.sglang_version,
        "model_class": plan.model_class,
        "residual_ids": plan.residual_ids,
        "num_layers": plan.num_layers,
        "hidden_size": plan.hidden_size,
        "dtype": plan.dtype,
        "world_size": plan.world_size,
    }
    for name, value in expected.items():
        if (got := getattr(ready, name)) != value:
            raise HandshakeError(f"rank {ready.rank} is not what was asked for", where=name, expected=value, got=got)


def answers(url: str) -> bool:
    """Whether a server says that it is well."""
    try:
        return httpx.get(url, timeout=30, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
