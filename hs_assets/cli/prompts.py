"""``hs-assets prompts check``: what would become of a file's rows, in seconds and without a server."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import click

from hs_assets.cli.options import json_option
from hs_assets.config import load_project
from hs_assets.errors import ConfigError, HsAssetsError
from hs_assets.samples.formats import FORMATS
from hs_assets.samples.survey import Survey
from hs_assets.settings import PromptSettings, SourceSettings

_SHOWN_DETAIL = 160


class _UsageError(click.ClickException):
    exit_code = 2


@click.group()
def prompts() -> None:
    """Rows of a source, before anything is extracted."""


@prompts.command()
@click.argument("file", type=click.Path(exists=True, path_type=Path))
@click.option("--model", type=click.Path(exists=True, file_okay=False, path_type=Path), help="The checkpoint [of --config].")
@click.option(
    "--format", "row_format", type=click.Choice(FORMATS), help="What the rows are [that of --config, or told by their columns]."
)
@click.option("--config", help="A TOML file, or preset:NAME, whose [prompts] and [model] apply [their defaults].")
@click.option("--trust-remote-code", is_flag=True, help="Run the tokenizer's code that lies in the checkpoint.")
@json_option
def check(
    file: Path, model: Path | None, row_format: str | None, config: str | None, trust_remote_code: bool, as_json: bool
) -> None:
    """Formats, drops with an example of each reason, lengths and the share that is supervised, for all rows of FILE.

    FILE is JSON lines, JSON, Parquet or Arrow, or a folder of such. Nothing is written and no server is asked. Exit status 1
    where a partition would drop more of its rows than prompts.max_dropped_share, or there are no rows; 2 where the file or
    the checkpoint cannot be used.

    \b
    hs-assets prompts check chats.jsonl --model ~/models/SmolLM2-135M-Instruct
    hs-assets prompts check data/train.parquet --model /models/Kimi-K2.5 --trust-remote-code --format messages
    hs-assets prompts check chats.jsonl --config hs_assets.toml --json | jq .dropped
    """
    try:
        settings, survey = _survey(file, model, row_format, config, trust_remote_code)
    except HsAssetsError as error:
        raise _UsageError(str(error)) from error
    failing = survey.too_many_dropped(settings.max_dropped_share)
    if as_json:
        click.echo(json.dumps(_json(survey, settings, failing)))
    else:
        click.echo("\n".join([f"{file}: {survey.source_rows:,} rows", *_lines(survey, settings, failing)]))
    sys.exit(1 if failing or not survey.rows else 0)


def _survey(
    file: Path, model: Path | None, row_format: str | None, config: str | None, trust_remote_code: bool
) -> tuple[PromptSettings, Survey]:
    from hs_assets.samples.filters import limits_of
    from hs_assets.samples.model import read_model_facts
    from hs_assets.samples.sources import Partitioning, Source
    from hs_assets.samples.survey import survey_source
    from hs_assets.samples.tokenizer import load_tokenizer

    project = load_project(config=config) if config else None
    settings = project.settings.prompts if project else PromptSettings(sources=(SourceSettings(path=file),))
    path = model or (project.settings.model.path if project else None)
    if path is None:
        raise ConfigError("no model is named", where="prompts check", remedy="pass --model PATH, or --config FILE")
    trusted = trust_remote_code or bool(project and project.settings.model.trust_remote_code)
    limits = limits_of(settings, read_model_facts(path))
    tokenizer = load_tokenizer(path, trust_remote_code=trusted)
    configured = [one.format for one in settings.sources if one.path.resolve() == file.resolve()]
    source = Source("check", file.absolute(), row_format or "".join(configured[:1]))
    partitioning = Partitioning(settings.rows_per_partition, settings.tokens_per_partition)
    surveys = survey_source(source, tokenizer, limits, partitioning, settings.max_row_bytes)
    survey, rows = next(surveys)
    with click.progressbar(length=rows, label="rows", file=sys.stderr) as bar:
        for survey, _ in surveys:
            bar.update(survey.source_rows - bar.pos)
    return settings, survey


def _json(survey: Survey, settings: PromptSettings, failing: list[str]) -> dict[str, Any]:
    return {
        "source_rows": survey.source_rows,
        "training_rows": survey.rows,
        "prompts": len(survey.lengths),
        "partitions": len(survey.dropped_shares),
        "formats": dict(survey.formats),
        "dropped": {reason: dataclasses.asdict(drops) for reason, drops in _by_rows(survey)},
        "unread_columns": dict(survey.unread),
        "tokens": survey.tokens,
        "supervised_tokens": survey.supervised_tokens,
        "supervised_share": round(survey.supervised_share, 4),
        "length_quantiles": survey.length_quantiles,
        "max_dropped_share": settings.max_dropped_share,
        "partitions_that_fail": failing,
    }


def _lines(survey: Survey, settings: PromptSettings, failing: list[str]) -> list[str]:
    dropped = survey.rows - len(survey.lengths)
    lines = [
        f"formats      {_counts(dict(survey.formats))}",
        f"prompts      {len(survey.lengths):,} of {survey.rows:,} training rows, in {len(survey.dropped_shares):,} partitions",
        f"tokens       {survey.tokens:,}, of which {survey.supervised_share:.1%} are supervised",
        f"length       {', '.join(f'{name} {tokens:,}' for name, tokens in survey.length_quantiles.items()) or 'none'}",
        f"dropped      {dropped:,} ({dropped / max(1, survey.rows):.1%})",
    ]
    for reason, drops in _by_rows(survey):
        lines += [f"  {drops.rows:>7,}  {reason}", f"           row {drops.source_row}: {drops.detail[:_SHOWN_DETAIL]}"]
    if "no_assistant_turn" in survey.dropped:
        lines.append(
            "note         with [responses] enabled = true the model answers rows without an answer; checked here is the file"
        )
    if survey.unread:
        lines.append(f"not needed   {_counts(dict(survey.unread.most_common()))}")
    if failing:
        from hs_assets.extraction.status import some_of

        numbers = some_of([key.rpartition("-")[2] for key in failing])
        lines.append(f"NOT GOOD     partitions {numbers} drop more than {settings.max_dropped_share:.0%} of their rows")
    return lines


def _by_rows(survey: Survey) -> list[tuple[str, Any]]:
    return sorted(survey.dropped.items(), key=lambda item: -item[1].rows)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "none"
