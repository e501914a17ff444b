"""The command line: ``hs-assets demo``, ``engine``, ``server``, ``plan``, ``status``, ``lineage``, ``show``, ``verify``."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

try:
    import click
except ImportError:
    sys.exit("hs-assets: the commands need more than the reader: pip install 'hs-assets[pipeline]'")

from hs_assets.cli_plan import plan
from hs_assets.cli_prompts import prompts
from hs_assets.config import DEFAULT_HOME, load_project
from hs_assets.errors import HsAssetsError

F = TypeVar("F", bound=Callable[..., Any])


class _Group(click.Group):
    """Shows our own errors as text, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HsAssetsError as error:
            raise click.ClickException(str(error)) from error


def _project_options(command: F) -> F:
    home = click.option(
        "--home", type=click.Path(path_type=Path), help=f"Where everything is kept [HS_ASSETS_HOME, or {DEFAULT_HOME}]."
    )
    config = click.option(
        "--config", help="A TOML file, or preset:NAME [HS_ASSETS_CONFIG, or <home>/hs_assets.toml, or preset:demo]."
    )
    return home(config(command))


def _json_option(command: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def _say(line: str) -> None:
    click.echo(line, err=True)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="hs-assets")
def main() -> None:
    """Conversations in, training data for EAGLE-3 drafters out.

    \b
    hs-assets prompts check FILE          what would become of its rows, without a server
    hs-assets demo                        everything once, on this machine, without a GPU
    hs-assets status --json               the ledger of every partition
    hs-assets show demo-00000/0000        a sample's text, with what is supervised
    """


main.add_command(prompts)
main.add_command(plan)


@main.command()
@_project_options
@click.option("--model", type=click.Path(exists=True, file_okay=False, path_type=Path), help="A checkpoint of your own.")
@click.option(
    "--prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A JSONL file of conversations of your own."
)
def demo(home: Path | None, config: str | None, model: Path | None, prompts: Path | None) -> None:
    """Extract every partition through Dagster, and show what came of it.

    \b
    hs-assets demo
    hs-assets demo --model ~/models/SmolLM2-135M-Instruct --prompts chats.jsonl --home /tmp/try
    """
    from hs_assets.console import ledger_table, lineage_tree, make_console, next_steps
    from hs_assets.defs.build import build_definitions
    from hs_assets.defs.demo import materialize, prepare, write_config
    from hs_assets.extraction.status import status
    from hs_assets.store import open_store
    from hs_assets.store.reader import lineage

    if model is not None or prompts is not None:
        write_config(load_project(home, "preset:demo").home, model, prompts)
    project = load_project(home, config)
    console = make_console()
    prepare(project, _say)
    began, outcomes = time.monotonic(), []
    for outcome in materialize(project, build_definitions(project), _say):
        outcomes.append(outcome)
        said = "complete" if outcome.problem is None else f"NOT COMPLETE: {outcome.problem}"
        did = f"{outcome.tokens:,} tokens captured" if outcome.tokens else "nothing had to be captured"
        _say(f"{outcome.partition}: {said}, {did} ({time.monotonic() - began:.0f} s since the beginning)")
    partitions = status(project)
    console.print(ledger_table(partitions))
    view = open_store(project.store_path).layer_set(partitions[0].layer_set)
    if len(view):
        tokens, size = sum(one.tokens for one in partitions), sum(one.bytes for one in partitions)
        captured, seconds = sum(one.tokens for one in outcomes), sum(one.seconds for one in outcomes)
        speed = f"{captured / seconds:,.0f} tokens/s captured now" if captured else "nothing had to be captured"
        stored = sum(one.stored for one in partitions)
        console.print(f"{stored} samples, {tokens:,} tokens, {size:,} bytes of states in {project.store_path}; {speed}")
        own, other = max(one.own_logprob for one in outcomes), min(one.other_logprob for one in outcomes)
        if captured and own:
            console.print(f"logprob rule: differences of own states at most {own:.3f}, of another sample's at least {other:.3f}")
        console.print(lineage_tree(lineage(*view.entries[0])))
    console.print(next_steps(project, view.entries[0][1].sample_id if len(view) else None), markup=False, soft_wrap=True)
    sys.exit(1 if any(outcome.problem for outcome in outcomes) else 0)


@main.group()
def engine() -> None:
    """The CPU engine: SGLang without a GPU, for small models."""


@engine.command("install")
def engine_install() -> None:
    """Make the CPU engine's environment (some 3 GB, a few minutes); does nothing where it is there already."""
    from hs_assets.serving import engine as cpu_engine

    click.echo(cpu_engine.install(_say))


@main.group()
def server() -> None:
    """The SGLang server of a home."""


@server.command("start")
@_project_options
def server_start(home: Path | None, config: str | None) -> None:
    """Start the server, unless it runs; it stops by itself when nobody has used it for a while."""
    from hs_assets.serving.launch import make_launch_plan, resolve
    from hs_assets.serving.server import lease_server
    from hs_assets.serving.state import ServerFolder

    project = load_project(home, config)
    with lease_server(
        ServerFolder(project.home.server), make_launch_plan(project, resolve(project)), "hs-assets server start", _say
    ) as state:
        click.echo(state.url)


@server.command("stop")
@_project_options
@click.option("--force", is_flag=True, help="Also while somebody uses it.")
def server_stop(home: Path | None, config: str | None, force: bool) -> None:
    """Stop the server."""
    from hs_assets.serving.server import stop_server
    from hs_assets.serving.state import ServerFolder

    project = load_project(home, config)
    stopped = stop_server(ServerFolder(project.home.server), _say, force=force)
    click.echo("stopped" if stopped else "no server runs")


@server.command("status")
@_project_options
@_json_option
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


@main.command()
@_project_options
@_json_option
@click.option("--layer-set", help="Such as r3-31-59-61 [the configured one].")
def status(home: Path | None, config: str | None, as_json: bool, layer_set: str | None) -> None:
    """The ledger of every partition. Exit status 1 where rows failed.

    \b
    hs-assets status
    hs-assets status --json | jq '.partitions[] | select(.failed != {})'
    """
    from hs_assets.console import ledger_table, make_console
    from hs_assets.extraction.status import INCOMPLETE
    from hs_assets.extraction.status import status as read_status

    partitions = read_status(load_project(home, config), layer_set)
    if as_json:
        click.echo(json.dumps({"partitions": [one.as_json() for one in partitions]}))
    else:
        make_console().print(ledger_table(partitions))
    sys.exit(1 if any(one.state == INCOMPLETE for one in partitions) else 0)


@main.command()
@_project_options
@_json_option
@click.argument("sample_id")
def lineage(home: Path | None, config: str | None, as_json: bool, sample_id: str) -> None:
    """Where a sample came from: states, dump, server, tokens, prompt partition, file and row.

    \b
    hs-assets lineage demo-00000/0003
    """
    from hs_assets.console import lineage_tree, make_console
    from hs_assets.store import open_store
    from hs_assets.store.reader import lineage as record_of

    record = record_of(*open_store(load_project(home, config).store_path).find(sample_id))
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(record)))
    else:
        make_console().print(lineage_tree(record))


@main.command()
@_project_options
@_json_option
@click.option("--ids", is_flag=True, help="A line for every token, with its id.")
@click.option("--no-color", is_flag=True, help="What is supervised in ⟦ ⟧ instead of colour; so it is where nobody watches.")
@click.argument("sample_id")
def show(home: Path | None, config: str | None, as_json: bool, ids: bool, no_color: bool, sample_id: str) -> None:
    """A row as the model sees it, what is supervised in colour; what is stored of it. Exit status 2 where there is none.

    \b
    hs-assets show demo-00000/0003 --ids
    hs-assets show demo-00000/0003 --json | jq '.states'
    """
    from hs_assets.console import make_console, shown_row
    from hs_assets.samples.show import UnknownSampleError, find_row, show_row
    from hs_assets.samples.tokenizer import load_tokenizer
    from hs_assets.store import open_store

    project = load_project(home, config)
    try:
        partition, row = find_row(project.home.prompts, sample_id)
    except UnknownSampleError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    model = project.settings.model
    tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    store = open_store(project.store_path) if project.store_path.exists() else None
    shown = show_row(partition, row, tokenizer, project.home.prompts / "index", store)
    if as_json:
        click.echo(json.dumps(shown.as_json()))
        return
    console = make_console()
    colour = console.is_terminal and not console.no_color and not no_color
    console.print(shown_row(shown, colour=colour, ids=ids), soft_wrap=True)


@main.command()
@_project_options
@_json_option
def verify(home: Path | None, config: str | None, as_json: bool) -> None:
    """Read every stored byte and check it against manifests and checksums. Exit status 1 where something does not hold."""
    from hs_assets.extraction.verify import Problem, count_samples
    from hs_assets.extraction.verify import verify as check_all
    from hs_assets.store import open_store

    store = open_store(load_project(home, config).store_path)
    good, problems = 0, []
    with click.progressbar(check_all(store), length=count_samples(store), label="samples", file=sys.stderr) as checked:
        for one in checked:
            if isinstance(one, Problem):
                problems.append(one)
            else:
                good += 1
    if as_json:
        click.echo(json.dumps({"samples": good, "problems": [dataclasses.asdict(problem) for problem in problems]}))
    else:
        for problem in problems:
            click.echo(f"{problem.where} ({problem.layer_set}): {problem.detail}")
        click.echo(f"{good} samples hold, {len(problems)} problems")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
