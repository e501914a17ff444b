"""What frees the store: ``hs-assets gc`` and ``remove``. Both only list unless they are told to delete."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import click

from hs_assets.cli.options import json_option, project_options
from hs_assets.config import load_project
from hs_assets.store.disposal import Garbage, Kept

_min_age = click.option(
    "--min-age", type=click.FloatRange(0), default=24.0, show_default=True, help="Hours that a leftover is kept."
)
_delete = click.option("--delete", is_flag=True, help="Remove it; else it is only listed.")


@click.command()
@project_options
@json_option
@click.option("--old-layer-sets", is_flag=True, help="Also layer sets that the configured one has replaced, sample for sample.")
@_min_age
@_delete
def gc(home: Path | None, config: str | None, as_json: bool, old_layer_sets: bool, min_age: float, delete: bool) -> None:
    """List what no manifest names any more, and with --delete remove it; never what a running writer holds.

    \b
    hs-assets gc                              generations, arrays and masks that crashes and changes left behind
    hs-assets gc --old-layer-sets --delete    also the layer sets from before the last change, array by array
    """
    from hs_assets.samples.model import read_model_facts
    from hs_assets.store.gc import collect
    from hs_assets.store.layout import check
    from hs_assets.wire.layers import LayerSet

    project = load_project(home, config)
    current = None
    if old_layer_sets:
        layers = read_model_facts(project.settings.model.path).num_layers
        current = LayerSet.choose(project.settings.layers, layers).id
    paths = check(project.store_path)
    found = collect(paths, project.home.locks, current=current, min_age=min_age * 3600, delete=delete)
    _report(found, paths.root, delete, as_json)


@click.command()
@project_options
@json_option
@click.option("--prompts", is_flag=True, help="Also their prompts, and the answers of the model to them.")
@_min_age
@_delete
@click.argument("names", nargs=-1, required=True, metavar="KEY_OR_SOURCE...")
def remove(
    home: Path | None, config: str | None, as_json: bool, prompts: bool, min_age: float, delete: bool, names: tuple[str, ...]
) -> None:
    """List the samples of partitions or whole sources, of all layer sets, and with --delete remove them.

    What lineage knows of them is kept. Exported files stay. A partition of a source that is configured comes back as soon as it
    is extracted again. Exit status 1 where something is left, as of a partition that a run is at.

    \b
    hs-assets remove old_chats                      what there is of a source
    hs-assets remove old_chats --prompts --delete   all of it goes
    hs-assets remove chats-00007 --delete           one partition
    """
    from hs_assets.extraction.remove import choose_partitions
    from hs_assets.extraction.remove import remove as find

    project = load_project(home, config)
    chosen = choose_partitions(project, names, prompts=prompts)
    found = find(project, chosen, prompts=prompts, min_age=min_age * 3600, delete=delete)
    sys.exit(1 if _report(found, project.store_path, delete, as_json) else 0)


def _report(found: Iterable[Garbage | Kept], root: Path, delete: bool, as_json: bool) -> list[Kept]:
    """Print what is found as it is found, or all of it as JSON, and the sums; returns what is kept."""
    garbage, kept = list[Garbage](), list[Kept]()
    for one in found:
        if isinstance(one, Garbage):
            garbage.append(one)
            said = f"{_shown(one.path, root)}: {one.reason} ({one.bytes:,} bytes)"
        else:
            kept.append(one)
            said = f"{_shown(one.where, root)}: kept: {one.reason}"
        if not as_json:
            click.echo(f"{one.partition}: {said}")
    total, counts = sum(one.bytes for one in garbage), Counter(one.kind for one in garbage)
    if as_json:
        body = {"garbage": [dataclasses.asdict(one) for one in garbage], "kept": [dataclasses.asdict(one) for one in kept]}
        click.echo(json.dumps({"deleted": delete, "bytes": total, "counts": counts, **body}, default=str))
    else:
        did = "removed" if delete else "could go (--delete removes it)"
        kinds = ", ".join(f"{kind} {count}" for kind, count in counts.items())
        of = f" ({kinds})" if kinds else ""
        click.echo(f"{len(garbage)} files and folders{of}, {total:,} bytes {did}; {len(kept)} kept")
    return kept


def _shown(path: Path, root: Path) -> Path:
    return path.relative_to(root) if path.is_relative_to(root) else path
