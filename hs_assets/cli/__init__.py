"""The command line. A module for each kind of command; options.py has what many of them share."""

from __future__ import annotations

import errno
import sys
from typing import Any

try:
    import click
except ImportError:
    sys.exit("hs-assets: the commands need more than the reader: pip install 'hs-assets[pipeline]'")

from hs_assets.cli.exports import export
from hs_assets.cli.plan import plan
from hs_assets.cli.prompts import prompts
from hs_assets.cli.removal import gc, remove
from hs_assets.cli.run import demo, status
from hs_assets.cli.server import engine, server
from hs_assets.cli.show import show
from hs_assets.cli.store import lineage, verify
from hs_assets.errors import HsAssetsError


class _Group(click.Group):
    """Shows our own errors, and those of files and disks, as text, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HsAssetsError as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # who read our output had enough: click ends quietly
                raise
            raise click.ClickException(str(error)) from error


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


for command in (demo, engine, server, prompts, plan, status, lineage, show, verify, gc, remove, export):
    main.add_command(command)
