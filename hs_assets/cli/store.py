"""The commands that work on a store alone: ``hs-assets lineage``, ``verify``."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hs_assets.cli.options import json_option, project_options
from hs_assets.config import load_project
from hs_assets.errors import StoreError

if TYPE_CHECKING:
    from hs_assets.store.reader import Store


@click.command()
@project_options
@json_option
@click.argument("sample_id", required=False)
@click.option("--partition", help="Rows of a partition, such as demo-00000.")
@click.option("--source", help="Rows of a source, by its name or path.")
@click.option("--row", "source_row", type=int, help="Rows made of this row of a source (0-based).")
@click.option("--run", "run_id", help="Rows of which a run captured states.")
@click.option("--spec", help="Rows of a state spec, by its fingerprint or the beginning of it.")
@click.option("--layer-set", help="Only rows of this layer set, such as r3-31-59-61.")
@click.option("--parquet", type=click.Path(dir_okay=False, path_type=Path), help="Write all rows asked for to a Parquet table.")
def lineage(
    home: Path | None,
    config: str | None,
    as_json: bool,
    sample_id: str | None,
    partition: str | None,
    source: str | None,
    source_row: int | None,
    run_id: str | None,
    spec: str | None,
    layer_set: str | None,
    parquet: Path | None,
) -> None:
    """Where a sample came from; or which samples came of a source row, a run or a state spec. Exit status 1 where there is none.

    \b
    hs-assets lineage demo-00000/0003                  states, dump, server, tokens, prompts, file and row; of each layer set
    hs-assets lineage --source demo --row 17           what became of a source row, also where it was dropped
    hs-assets lineage --run 3f2c… --json               a line of JSON a row
    hs-assets lineage --parquet lineage.parquet        a table: duckdb -c "select * from 'lineage.parquet' where source_row = 17"
    """
    from hs_assets.extraction.lineage_table import write_lineage_table
    from hs_assets.store import open_store
    from hs_assets.store.lineage import Question, lineage_rows

    store = open_store(load_project(home, config).store_path)
    question = Question(sample_id, layer_set, partition, source, source_row, run_id, spec)
    only_sample = sample_id if dataclasses.replace(question, sample_id=None) == Question() and parquet is None else None
    if only_sample is not None and _print_sample(store, only_sample, as_json):
        return
    if parquet is not None:
        count = write_lineage_table(store, parquet, question)
        click.echo(f"{count} rows in {parquet}")
    elif question == Question():
        raise click.UsageError(
            "Name a sample, or what its rows shall be of: --partition, --source, --row, --run, --spec; or --parquet FILE."
        )
    else:
        count = 0
        for count, row in enumerate(lineage_rows(store, question), 1):  # noqa: B007  (the last number is the count)
            why = "" if row.reason is None else f"  {row.reason}: {row.detail}"
            runs = ", ".join(dict.fromkeys(row.run_ids))
            line = (
                f"{row.sample_id}  {row.layer_set}  {row.outcome}{why}  {row.source_name} row {row.source_row}  run {runs or '-'}"
            )
            click.echo(json.dumps(row.as_dict()) if as_json else line)
    if not count:
        problem = "no such sample in the store" if only_sample is not None else "no row is an answer"
        remedy = "hs-assets status lists the partitions, <source>-<number>; their rows are known once one was extracted"
        raise StoreError(problem, where=store.paths.root, got=sample_id, remedy=remedy)


def _print_sample(store: Store, sample_id: str, as_json: bool) -> bool:
    """The lineage of a sample in each layer set, as it is found; returns whether there is any."""
    from hs_assets.console import lineage_tree, make_console
    from hs_assets.store.reader import lineage as record_of

    found = False
    for entry in store.find_all(sample_id):
        found, record = True, record_of(*entry)
        if as_json:
            click.echo(json.dumps(dataclasses.asdict(record)))
        else:
            make_console().print(lineage_tree(record))
    return found


@click.command()
@project_options
@json_option
@click.option("--processes", type=click.IntRange(1), help="How many read at once [one a core].")
def verify(home: Path | None, config: str | None, as_json: bool, processes: int | None) -> None:
    """Read every stored byte and check it against manifests and checksums. Exit status 1 where something does not hold."""
    from hs_assets.store import open_store
    from hs_assets.store.verify import Checked, Problem, count_samples
    from hs_assets.store.verify import verify as check_all

    store = open_store(load_project(home, config).store_path)
    good, problems = 0, list[Problem]()

    def where(checked: Checked | None) -> str:
        return f"{checked.last}, {len(problems)} problems" if checked else ""

    with click.progressbar(length=count_samples(store), label="samples", file=sys.stderr, item_show_func=where) as bar:
        for checked in check_all(store, processes):
            good += checked.good
            problems += checked.problems
            bar.update(checked.samples, checked)
    if as_json:
        click.echo(json.dumps({"samples": good, "problems": [dataclasses.asdict(problem) for problem in problems]}))
    else:
        for problem in problems:
            click.echo(f"{problem.where} ({problem.layer_set}): {problem.detail}")
        click.echo(f"{good} samples hold, {len(problems)} problems")
    sys.exit(1 if problems else 0)
