"""Options that many commands have, and where they say what they do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from hs_assets.config import DEFAULT_HOME

F = TypeVar("F", bound=Callable[..., Any])


def project_options(command: F) -> F:
    """``--home`` and ``--config``."""
    home = click.option(
        "--home", type=click.Path(path_type=Path), help=f"Where everything is kept [HS_ASSETS_HOME, or {DEFAULT_HOME}]."
    )
    config = click.option(
        "--config", help="A TOML file, or preset:NAME [HS_ASSETS_CONFIG, or <home>/hs_assets.toml, or preset:demo]."
    )
    return home(config(command))


def json_option(command: F) -> F:
    """``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def say(line: str) -> None:
    """Tell the person, not the program that reads the output."""
    click.echo(line, err=True)
