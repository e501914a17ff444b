"""``hs-assets engine`` and ``hs-assets server``: SGLang on the CPU, and the server of a home."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path

import click

from hs_assets.cli.options import json_option, project_options, say
from hs_assets.config import load_project


@click.group()
def engine() -> None:
    """The CPU engine: SGLang without a GPU, for small models."""


@engine.command("install")
def engine_install() -> None:
    """Make the CPU engine's environment (some 3 GB, a few minutes); does nothing where it is there already."""
    from hs_assets.serving import engine as cpu_engine

    click.echo(cpu_engine.install(say))


@click.group()
def server() -> None:
    """The SGLang server of a home."""


@server.command("start")
@project_options
def server_start(home: Path | None, config: str | None) -> None:
    """Start the server, unless it runs; it stops by itself when nobody has used it for a while.

    It always tries, while runs do not try again for some minutes what just failed.
    Where server.url names one that somebody else started, that is proven instead.
    """
    from hs_assets.serving.launch import make_launch_plan, resolve
    from hs_assets.serving.server import lease_server
    from hs_assets.serving.state import ServerFolder

    project = load_project(home, config)
    folder, plan = ServerFolder(project.home.server), make_launch_plan(project, resolve(project))
    with lease_server(folder, plan, "hs-assets server start", say, again=True) as state:
        click.echo(state.url)


@server.command("command")
@project_options
@json_option
@click.option("--port", type=click.IntRange(1, 65535), default=30000, show_default=True)
def server_command(home: Path | None, config: str | None, as_json: bool, port: int) -> None:
    """How to start the server by hand, as a script for sh; a configuration with its server.url then uses it.

    \b
    hs-assets server command > server.sh; sh server.sh
    hs-assets server command --json | jq .env
    """
    from hs_assets.serving.by_hand import hand_start

    made = hand_start(load_project(home, config), port)
    click.echo(json.dumps(made.as_json()) if as_json else made.as_shell())


@server.command("stop")
@project_options
@click.option("--force", is_flag=True, help="Also while somebody uses it.")
def server_stop(home: Path | None, config: str | None, force: bool) -> None:
    """Stop the server."""
    from hs_assets.serving.server import stop_server
    from hs_assets.serving.state import ServerFolder

    project = load_project(home, config)
    stopped = stop_server(ServerFolder(project.home.server), say, force=force)
    click.echo("stopped" if stopped else "no server of this home's own runs")


@server.command("status")
@project_options
@json_option
def server_status(home: Path | None, config: str | None, as_json: bool) -> None:
    """Whether the server runs, who uses it, and how full its spool is. Exit status 1 where it is not up."""
    from hs_assets.console import server_lines
    from hs_assets.serving.admission import spool_use
    from hs_assets.serving.server import describe
    from hs_assets.serving.state import UP, ServerFolder, read_counters
    from hs_assets.wire.spool import Spool

    project = load_project(home, config)
    folder = ServerFolder(project.home.server)
    state, leases = folder.read_state(), folder.live_leases()
    dumps, used = spool_use(project.spool_path)
    phase, counters = describe(state), read_counters(Spool(project.spool_path), 0)
    if as_json:
        known = dataclasses.asdict(state) if state else {}
        click.echo(
            json.dumps(
                {
                    **known,
                    "phase": phase,
                    "uptime_seconds": time.time() - state.started_at if state and phase == UP else None,
                    "leases": [dataclasses.asdict(lease) for lease in leases],
                    "dumps": dumps,
                    "spool_used_bytes": used,
                    "counters": dataclasses.asdict(counters) if counters else None,
                }
            )
        )
    else:
        click.echo("\n".join(server_lines(phase, state, leases, dumps, used, counters)))
    sys.exit(0 if phase == UP else 1)
