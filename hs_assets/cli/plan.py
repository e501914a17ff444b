"""``hs-assets plan``: what an extraction would take, before it is begun."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from hs_assets.cli.options import json_option, project_options
from hs_assets.config import load_project
from hs_assets.errors import HsAssetsError


@click.command()
@project_options
@json_option
@click.argument("partitions", nargs=-1)
def plan(home: Path | None, config: str | None, as_json: bool, partitions: tuple[str, ...]) -> None:
    """What extracting PARTITIONS (all by default) would take of store and spool.

    Exit status 1 where it does not fit, or one of them cannot be read.

    Exact where prompts are made; else estimated from the bytes of the rows. No server is started or asked.

    \b
    hs-assets plan
    hs-assets plan chat-00000 chat-00001 --json | jq .store_bytes
    """
    from hs_assets.extraction.preflight import predict
    from hs_assets.extraction.status import source_indexes
    from hs_assets.samples.sources import partition_keys
    from hs_assets.serving.launch import resolve

    project = load_project(home, config)
    target = resolve(project)
    if unknown := sorted(set(partitions) - set(partition_keys(source_indexes(project)))):
        raise HsAssetsError("no such partition", got=", ".join(unknown), remedy="hs-assets status lists them")
    need = predict(project, target, partitions or None)
    if as_json:
        click.echo(json.dumps({"layer_set": target.layer_set.id, **need.as_json()}))
    else:
        guessed = f", of which {need.estimated} are estimated: their prompts are not made yet" if need.estimated else ""
        spool = f"of {need.spool_bytes:,} bytes" if need.spool_bytes is not None else "and there is no room for one"
        click.echo(
            f"layer set    {target.layer_set.id}\n"
            f"partitions   {need.partitions:,}{guessed}\n"
            f"to capture   {need.samples:,} samples, {need.tokens:,} tokens\n"
            f"store        {need.store_bytes:,} bytes; {need.store_free_bytes:,} are free in {project.store_path}\n"
            f"spool        {spool}; the largest dump has {need.largest_dump_bytes:,} bytes"
        )
        for warning in need.warnings:
            click.echo(f"WARNING      {warning}")
        for problem in need.problems:
            click.echo(f"DOES NOT FIT {problem}")
        for key, problem in need.damaged.items():
            click.echo(f"DAMAGED {key}: nothing is counted for it: {problem}")
    sys.exit(1 if need.problems or need.damaged else 0)
