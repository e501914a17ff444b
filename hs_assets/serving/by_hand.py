"""The command, environment and capture configuration with which somebody starts the server of a configuration by hand."""

from __future__ import annotations

import dataclasses
import secrets
import shlex
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hs_assets.config import Project
from hs_assets.errors import ServerError, WireError
from hs_assets.serving.launch import capture_config, make_launch_plan, resolve, server_environment
from hs_assets.serving.liveness import capturing
from hs_assets.serving.state import ServerFolder
from hs_assets.wire import sole_server
from hs_assets.wire.records import CaptureConfig
from hs_assets.wire.spool import Spool

_NAMES = "by-hand-"


@dataclass(frozen=True, slots=True)
class HandStart:
    """How to start a server. ``env``: beside what the shell has; ``clear``: a folder that must be empty at the start."""

    argv: tuple[str, ...]
    env: dict[str, str]
    clear: str
    url: str
    spool: str

    def as_json(self) -> dict[str, object]:
        return dataclasses.asdict(self)

    def as_shell(self) -> str:
        """A script for sh; it starts nothing, and clears nothing, while a server captures into the spool."""
        only = f"{shlex.quote(self.argv[0])} -m {sole_server.__name__} {shlex.quote(self.spool)} {self.url}"
        env = " \\\n  ".join(f"{name}={shlex.quote(value)}" for name, value in self.env.items())
        return (
            f"# SGLang with the capture plugin; it captures into {self.spool}. Once it is up, have the pipeline use it:\n"
            f'#   [server]\n#   url = "{self.url}"\n'
            f"exec {sole_server.DESCRIPTOR}>>{shlex.quote(str(Spool(Path(self.spool)).by_hand_lock))}\n"
            f"PYTHONPATH={shlex.quote(self.env['PYTHONPATH'])} {only} || exit 1\n"
            f"rm -f {shlex.quote(self.clear)}/*\n"
            f"env {env} \\\n  {shlex.join(self.argv)}"
        )


def hand_start(project: Project, port: int) -> HandStart:
    """How to start the server that a configuration asks for; its spool is made, and says what to capture.

    Raises:
        ServerError: a server captures into that spool already.
        SpoolError: the spool is not ours alone, or too small.
    """
    settings = project.settings
    server = settings.server.model_copy(update={"url": ""})
    own = dataclasses.replace(project, settings=settings.model_copy(update={"server": server}))
    plan = make_launch_plan(own, resolve(own))
    spool, name = Spool(Path(plan.spool)), f"{_NAMES}{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
    config = capture_config(plan, name)
    with suppress(WireError):  # there is none yet, or another version's
        before = CaptureConfig.read(spool.config)
        room = config.spool_bytes if server.spool_bytes is None else before.spool_bytes  # by default it changes all the time
        if before.server.startswith(_NAMES) and dataclasses.replace(before, server=name, spool_bytes=room) == config:
            config = before  # asked again: a server that was started with it stays the one that is meant
    state, runs = ServerFolder(project.home.server).read_state(), capturing(spool)
    ours = state is not None and not state.attached and runs in (None, state.server)
    if ours and state is not None and state.watchdog_lives:
        raise ServerError(
            "this home's own server captures into this spool already",
            where=plan.spool,
            got=state.server,
            remedy="hs-assets server stop, then ask again",
        )
    if not ours and runs not in (None, config.server):
        raise ServerError(
            "a server captures into this spool already",
            where=plan.spool,
            got=runs,
            remedy="end it, and ask again once it has not counted for 15 s",
        )
    config.write(spool.config)
    return HandStart(
        argv=(*plan.argv, "--port", str(port)),
        env=server_environment(plan),
        clear=str(spool.ready),
        url=f"http://127.0.0.1:{port}",
        spool=plan.spool,
    )
