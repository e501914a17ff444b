"""``hs-assets show``: a row as the model sees it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from hs_assets.cli.options import json_option, project_options
from hs_assets.config import load_project


@click.command()
@project_options
@json_option
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
