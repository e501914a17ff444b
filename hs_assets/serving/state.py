"""What is known of a home's server: its state file, written by the watchdog alone, and the leases of those who use it.

<home>/server/start.lock        held while somebody starts or stops the server
<home>/server/plan.json         what the watchdog shall start (`LaunchPlan`)
<home>/server/state.json        `ServerState`
<home>/server/failed_start.json `FailedStart`: the last start that failed (failed_start.py)
<home>/server/leases/<id>.json  `LeaseRecord`, locked by the process that holds it: the lock vanishes with it
<home>/server/logs/             SGLang's and the watchdog's output
<home>/server/plugin/           the capture plugin as SGLang's environment sees it
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar

from hs_assets.errors import WireError
from hs_assets.wire.records import CountersRecord, Record
from hs_assets.wire.spool import Spool

STARTING, UP, STOPPING, STOPPED, FAILED = "starting", "up", "stopping", "stopped", "failed"


@dataclass(frozen=True, slots=True)
class LaunchPlan(Record):
    """Everything the watchdog needs to start a server and to know that it is the one that was asked for."""

    kind: ClassVar[str] = "launch-plan"
    identity: str
    """Hash of all that makes two servers interchangeable."""
    argv: tuple[str, ...]
    """The command, without its port."""
    env: dict[str, str]
    spool: str
    spool_bytes: int
    backlog_bytes: int
    residual_ids: tuple[int, ...]
    state_fingerprint: str
    model_path: str
    model_class: str
    sglang_version: str
    dtype: str
    """safetensors name."""
    hidden_size: int
    num_layers: int
    world_size: int
    writers: int
    logprob_tolerance: float
    start_timeout_seconds: float
    commit_timeout_seconds: float
    idle_stop_seconds: float
    url: str = ""
    """Of a server that somebody else runs, which then is to be used; empty for one of our own."""

    @property
    def attempt(self) -> str:
        """Hash of all by which another start may come out otherwise: the identity, and what the start is held to."""
        limits = [float(x) for x in (self.start_timeout_seconds, self.commit_timeout_seconds, self.logprob_tolerance)]
        return hashlib.sha256(json.dumps([self.identity, limits]).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class ServerState(Record):
    """The life of a server, from its start to its end."""

    kind: ClassVar[str] = "server-state"
    phase: str
    identity: str
    server: str
    """Name of this process in records and lineage."""
    url: str
    spool: str
    spool_bytes: int
    backlog_bytes: int
    residual_ids: tuple[int, ...]
    state_fingerprint: str
    model_path: str
    sglang_version: str
    pid: int
    pid_created: float
    watchdog_pid: int
    watchdog_created: float
    log: str
    started_at: float
    message: str
    """What the canary saw, or why the server did not come up or is gone."""
    attached: bool = False
    """Somebody else started it: no watchdog, and its processes may not be seen from here."""

    @property
    def watchdog_lives(self) -> bool:
        return lives(self.watchdog_pid, self.watchdog_created)

    @property
    def is_up(self) -> bool:
        """As far as its processes tell; see liveness.py for an attached one."""
        return self.phase == UP and (self.attached or (self.watchdog_lives and lives(self.pid, self.pid_created)))


@dataclass(frozen=True, slots=True)
class LeaseRecord(Record):
    """Who uses the server."""

    kind: ClassVar[str] = "lease"
    pid: int
    purpose: str
    since: float


@dataclass(frozen=True, slots=True)
class ServerFolder:
    """Paths of a home's server."""

    root: Path

    @property
    def start_lock(self) -> Path:
        return self.root / "start.lock"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def state(self) -> Path:
        return self.root / "state.json"

    @property
    def failed_start(self) -> Path:
        return self.root / "failed_start.json"

    @property
    def leases(self) -> Path:
        return self.root / "leases"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def plugin(self) -> Path:
        return self.root / "plugin"

    def make(self) -> None:
        for folder in (self.root, self.leases, self.logs, self.plugin):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def read_state(self) -> ServerState | None:
        """The state file; None before the first start, and where another version of this package left it."""
        with suppress(WireError):
            return ServerState.read(self.state) if self.state.exists() else None
        return None

    @contextmanager
    def try_start_lock(self) -> Iterator[bool]:
        """Hold the start lock, if nobody else does; gives whether it is held."""
        with self.start_lock.open("w") as file:
            yield _try_lock(file)

    @contextmanager
    def lease(self, purpose: str) -> Iterator[None]:
        """Keep the server from being stopped while this is entered, and this process lives."""
        path = self.leases / f"{secrets.token_hex(8)}.json"
        temporary = path.with_suffix(".new")
        with temporary.open("w") as file:
            _try_lock(file)
            file.write(LeaseRecord(os.getpid(), purpose, time.time()).to_json())
            file.flush()
            temporary.rename(path)  # visible only once it is locked
            try:
                yield
            finally:
                path.unlink(missing_ok=True)

    def live_leases(self) -> list[LeaseRecord]:
        """The leases that are held; those whose holder is gone are removed."""
        held = []
        for path in sorted(self.leases.glob("*.json")):
            with suppress(FileNotFoundError), path.open() as file:
                if _try_lock(file):
                    path.unlink(missing_ok=True)
                else:
                    held.append(LeaseRecord.parse(file.read(), path))
        return held


def started(pid: int) -> float:
    """When a process started, in clock ticks since boot: unlike a time of day, it stays when the clock is set.

    Raises:
        ProcessLookupError: it does not run.
    """
    _, ticks = _stat(pid)
    return ticks


def lives(pid: int, created: float) -> bool:
    """Whether the process that had this pid, and had `started` then, still runs."""
    try:
        state, ticks = _stat(pid)
    except ProcessLookupError:
        return False
    return ticks == created and state != "Z"


def _stat(pid: int) -> tuple[str, float]:
    """State and start of a process, from ``/proc/<pid>/stat`` (proc(5)); the name in it may hold anything but ends at ``)``."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ProcessLookupError(pid) from error
    return fields[0], float(fields[19])


def read_counters(spool: Spool, rank: int) -> CountersRecord | None:
    """What a rank last said of itself; None where it has not yet."""
    path = spool.counters(rank)
    return CountersRecord.read(path) if path.exists() else None


def log_tail(path: Path, lines: int = 30) -> str:
    """The last lines of a log."""
    if not path.exists():
        return f"(no log at {path})"
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 65536))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
