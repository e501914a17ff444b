"""``hs-assets demo`` and ``hs-assets status``: everything once, and the ledger of what came of it."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections import Counter
from pathlib import Path

import click

from hs_assets.cli.options import json_option, project_options, say
from hs_assets.config import load_project


@click.command()
@project_options
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
    prepare(project, say)
    began, outcomes = time.monotonic(), []
    for outcome in materialize(project, build_definitions(project), say):
        outcomes.append(outcome)
        said = f"complete, {outcome.tokens:,} tokens captured" if outcome.tokens else "complete, nothing had to be captured"
        if outcome.problem is not None:
            said = f"NOT COMPLETE: {outcome.problem}"
        say(f"{outcome.partition}: {said} ({time.monotonic() - began:.0f} s since the beginning)")
    partitions = status(project)
    console.print(ledger_table(partitions))
    view = open_store(project.store_path).layer_set(partitions[0].layer_set)
    if len(view):
        tokens, size = sum(one.tokens for one in partitions), sum(one.bytes for one in partitions)
        captured, seconds = sum(one.tokens for one in outcomes), sum(one.seconds for one in outcomes)
        speed = f"{captured / seconds:,.0f} tokens/s captured now" if captured else "nothing had to be captured"
        if any(outcome.problem for outcome in outcomes):
            speed = "not all is complete"
        stored = sum(one.stored for one in partitions)
        console.print(f"{stored} samples, {tokens:,} tokens, {size:,} bytes of states in {project.store_path}; {speed}")
        own, other = max(one.own_logprob for one in outcomes), min(one.other_logprob for one in outcomes)
        if captured and own:
            console.print(f"logprob rule: differences of own states at most {own:.3f}, of another sample's at least {other:.3f}")
        console.print(lineage_tree(lineage(*view.entries[0])))
    console.print(next_steps(project, view.entries[0][1].sample_id if len(view) else None), markup=False, soft_wrap=True)
    sys.exit(1 if any(outcome.problem for outcome in outcomes) else 0)


@click.command()
@project_options
@json_option
@click.option("--layer-set", help="Such as r3-31-59-61 [the configured one].")
def status(home: Path | None, config: str | None, as_json: bool, layer_set: str | None) -> None:
    """The ledger of every partition, also of sources that are not configured, and why its last run failed. Exit status 1 where
    rows failed, a partition is damaged, or the last run of one that is not complete failed.

    \b
    hs-assets status
    hs-assets status --json | jq '.partitions[] | select(.failed != {})'
    """
    from hs_assets.console import failure_lines, ledger_table, make_console
    from hs_assets.extraction.last_failure import last_failures
    from hs_assets.extraction.status import COMPLETE, DAMAGED, INCOMPLETE
    from hs_assets.extraction.status import status as read_status

    project = load_project(home, config)
    partitions = read_status(project, layer_set)
    known = last_failures(project.home)
    failures = {one.partition: known[one.partition] for one in partitions if one.partition in known}
    if as_json:
        lines = []
        for one in partitions:
            failure = failures.get(one.partition)
            lines.append({**one.as_json(), "last_failure": dataclasses.asdict(failure) if failure else None})
        click.echo(json.dumps({"partitions": lines, "states": Counter(one.state for one in partitions)}))
    else:
        make_console().print(ledger_table(partitions))
        click.echo("".join(f"{line}\n" for line in failure_lines(failures)), nl=False)
    rows_failed = any(one.state in (INCOMPLETE, DAMAGED) for one in partitions)
    run_failed = any(one.partition in failures and one.state != COMPLETE for one in partitions)
    sys.exit(1 if rows_failed or run_failed else 0)
