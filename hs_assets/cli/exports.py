"""``hs-assets export …``: stored samples as the files of SpecForge, speculators and ModelOpt, and their draft vocabulary."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import click

from hs_assets.cli.options import json_option, project_options
from hs_assets.config import Project, load_project

F = TypeVar("F", bound=Callable[..., Any])


def _project_options(command: F) -> F:
    layer_set = click.option("--layer-set", help="Such as r3-31-59-61 [the configured one].")
    return layer_set(project_options(json_option(command)))


def _export_options(command: F) -> F:
    destination = click.argument("destination", metavar="DEST", type=click.Path(file_okay=False, path_type=Path))
    partition = click.option("--partition", "partitions", multiple=True, help="Only this one; may be given more than once [all].")
    processes = click.option("--processes", type=click.IntRange(1), help="How many partitions are made at once [one a core].")
    return destination(partition(processes(_project_options(command))))


@click.group()
def export() -> None:
    """Stored samples as files for the trainers people use.

    Each partition is a folder in DEST that is there whole or not at all. Exporting again leaves alone what is identical, byte
    for byte, replaces what is not, and says which. DEST/hs_assets_export.json lists the partitions, and the manifest in each
    its files with sample ids, rows and sha256; DEST/trainer_config.json has the layer ids in the trainer's numbering.
    """


@export.command()
@_export_options
def specforge(destination: Path, partitions: tuple[str, ...], **options: Any) -> None:
    """SpecForge, offline: DEST/<partition>/data_<row>.ckpt, with the final state after the norm.

    Its trainer shifts ids and states but not the mask, so the mask is shifted here. Make the vocabulary before (hs-assets export
    vocabulary) and set model.vocab_mapping_path to DEST/vocab_mapping/vocab_mapping.pt: it would count by the shifted mask.

    \b
    hs-assets export specforge /data/specforge
    hs-assets export specforge /data/try --partition chats-00000 --partition chats-00001
    """
    _export("specforge", destination, partitions, **options)


@export.command()
@_export_options
@click.option("--legacy", is_flag=True, help="The format of speculators 0.3 to 0.6: DEST/<partition>/data_<row>.pt.")
def speculators(destination: Path, partitions: tuple[str, ...], legacy: bool, **options: Any) -> None:
    """speculators: a dataset folder for each partition, and DEST/all over all of them; the final state before the norm.

    \b
    hs-assets export speculators /data/speculators        # then train with --data-path /data/speculators/all
    hs-assets export speculators /data/v1 --legacy
    """
    _export("speculators-legacy" if legacy else "speculators", destination, partitions, **options)


@export.command()
@_export_options
def modelopt(destination: Path, partitions: tuple[str, ...], **options: Any) -> None:
    """NVIDIA ModelOpt, offline: DEST/<partition>/<partition>-<row>.pt, with the final state after the norm.

    \b
    hs-assets export modelopt /data/modelopt --layer-set r2-30-58-61
    """
    _export("modelopt", destination, partitions, **options)


@export.command()
@_project_options
@click.option("--draft-size", type=click.IntRange(1), default=32_000, show_default=True, help="Ids in the draft vocabulary.")
@click.option("--replace", is_flag=True, help="Also where another mapping is there; drafters trained with it need the old one.")
def vocabulary(
    draft_size: int, replace: bool, layer_set: str | None, home: Path | None, config: str | None, as_json: bool
) -> None:
    """Make the draft vocabulary (d2t, t2d) from the supervised tokens of all stored samples; every export then carries it.

    It changes only here, and only with --replace. Exports say whether it is older than the samples.

    \b
    hs-assets export vocabulary --draft-size 32000
    """
    from hs_assets.exports.export import choose_manifests
    from hs_assets.exports.vocabulary import FILE, keep_mapping, make_mapping
    from hs_assets.samples.model import read_model_facts
    from hs_assets.store import open_store

    project = load_project(home, config)
    store, path = open_store(project.store_path), project.home.root / FILE
    manifests = choose_manifests(store, layer_set or _configured(project))
    with click.progressbar(length=len(manifests), label="partitions", file=sys.stderr) as bar:
        target_size = read_model_facts(project.settings.model.path).vocab_size
        mapping = make_mapping(store, manifests, draft_size, target_size, lambda: bar.update(1))
    changed = keep_mapping(path, mapping, replace=replace)
    known = {**asdict(mapping), "sha256": mapping.sha256, "changed": changed, "path": str(path)}
    del known["ids"], known["made_from"]
    if as_json:
        click.echo(json.dumps(known))
        return
    share = mapping.covered_tokens / mapping.supervised_tokens
    click.echo(f"{path} is {'written' if changed else 'as it was'}: {mapping.sha256}")
    click.echo(
        f"{draft_size:,} of {target_size:,} ids cover {share:.2%} of {mapping.supervised_tokens:,} supervised tokens, "
        f"which have {mapping.supervised_ids:,} different ids"
    )


def _configured(project: Project) -> str:
    from hs_assets.samples.model import read_model_facts
    from hs_assets.wire.layers import LayerSet

    return LayerSet.choose(project.settings.layers, read_model_facts(project.settings.model.path).num_layers).id


def _export(
    trainer_name: str,
    destination: Path,
    partitions: tuple[str, ...],
    processes: int | None,
    layer_set: str | None,
    home: Path | None,
    config: str | None,
    as_json: bool,
) -> None:
    from hs_assets.exports.export import Exported, check_room, choose_manifests
    from hs_assets.exports.folder import ALL, ExportFolder
    from hs_assets.exports.processes import export_partitions
    from hs_assets.exports.summary import begin, combine, finish
    from hs_assets.exports.trainers import SPECULATORS, TRAINERS
    from hs_assets.exports.vocabulary import FILE, find_mapping
    from hs_assets.store import open_store

    project, trainer = load_project(home, config), TRAINERS[trainer_name]
    store, folder = open_store(project.store_path), ExportFolder(destination.resolve())
    chosen = layer_set or _configured(project)
    manifests, mapping = choose_manifests(store, chosen, partitions), find_mapping(project.home.root / FILE)
    begin(folder, manifests[0], trainer)
    check_room(store, manifests, folder)
    done: list[Exported] = []
    tokens = sum(sample.tokens for manifest in manifests for sample in manifest.samples)
    try:
        with click.progressbar(length=tokens, label="tokens", file=sys.stderr, item_show_func=lambda sample: sample) as bar:

            def told(sample_id: str, tokens: int) -> None:
                bar.update(tokens, sample_id)

            done.extend(export_partitions(store, manifests, trainer, folder, told, processes))
    finally:
        done.sort(key=lambda one: f"{one.partition}/")
        body = finish(folder, trainer, manifests[0], done, mapping)
    rows = combine(folder) if trainer is SPECULATORS else None
    if as_json:
        click.echo(json.dumps({**body, "exported": [asdict(one) for one in done]}))
        return
    failed = {manifest.partition: manifest.ledger.failed for manifest in manifests}
    for one in done:
        counts = f"{one.samples} samples, {one.tokens:,} tokens, {one.bytes:,} bytes"
        lost = ", ".join(f"{reason} {count}" for reason, count in failed[one.partition].items())
        why = f" ({one.why})" if one.why else ""
        click.echo(f"{one.partition}: {one.state}, {counts}{why}{f'; NOT COMPLETE, rows that failed: {lost}' if lost else ''}")
    click.echo(f"{body['samples']} samples, {body['bytes']:,} bytes in {folder.root}, layer set {chosen}")
    if rows is not None:
        click.echo(f"{rows} rows in {folder.root / ALL}")
    vocabulary_of = body["vocabulary"]
    if vocabulary_of is None:
        click.echo("no vocabulary mapping: the trainer makes its own (hs-assets export vocabulary makes one)")
    else:
        stale = f"; STALE, {vocabulary_of['stale']}" if vocabulary_of["stale"] else ""
        click.echo(f"vocabulary mapping {vocabulary_of['sha256'][:16]}{stale}")
