"""Asset `prompts`: the rows of a partition as token ids and loss masks, made by the model's own tokenizer and template."""

from collections.abc import Iterator, Sequence

import dagster as dg

from hs_assets.defs.failures import keeping_failure
from hs_assets.defs.plots import histogram
from hs_assets.defs.project import ProjectResource
from hs_assets.extraction.respond import choice, generation_spec
from hs_assets.extraction.status import source_of
from hs_assets.samples.conversations import Dropped
from hs_assets.samples.filters import limits_of
from hs_assets.samples.model import read_model_facts
from hs_assets.samples.page import render_page
from hs_assets.samples.prepare import make_partition
from hs_assets.samples.prompts import PromptPartition, page_path, write_partition
from hs_assets.samples.responses import read_responses
from hs_assets.samples.sources import read_partition
from hs_assets.samples.survey import Survey
from hs_assets.samples.tokenizer import load_tokenizer
from hs_assets.wire.records import write_atomic


def build_prompts(partitions: dg.PartitionsDefinition[str], deps: Sequence[dg.AssetKey] = ()) -> dg.AssetsDefinition:
    """The asset, over the partitions of all sources; `deps` are what it is made from beside them."""

    @dg.asset(
        deps=deps,
        partitions_def=partitions,
        group_name="extraction",
        kinds={"parquet"},
        owners=["team:hs-assets"],
        output_required=False,
    )
    def prompts(context: dg.AssetExecutionContext, project: ProjectResource) -> Iterator[dg.MaterializeResult[None]]:
        """Conversations → token ids and loss mask, with the row of the file that each came from.

        A row whose mask cannot be made surely is dropped with a reason, never guessed. Nothing is sent to the server. Where
        `responses` is enabled, the answers are the target model's own.

        Where: `<home>/prompts/<partition>.parquet`, and beside it a page to read the rows as the model sees them. New rows
        and new sources are new partitions once the definitions are reloaded; a partly filled last one grows, and is to be
        materialised again. A partition that fails names the reasons in its metadata: mend the rows, or raise
        `prompts.max_dropped_share`, and materialise it again.
        """
        with keeping_failure(context, project, "prompts"):
            loaded = project.load()
            settings, key = loaded.settings, context.partition_key
            facts = read_model_facts(settings.model.path)
            tokenizer = load_tokenizer(settings.model.path, trust_remote_code=settings.model.trust_remote_code)
            source = source_of(loaded, key)
            rows = read_partition(loaded.home.prompts / "index", source, key, settings.prompts.max_row_bytes)
            responses = read_responses(loaded.home.responses, key) if settings.responses.enabled else None
            if responses is not None:
                responses.require(generation_spec(loaded, tokenizer), choice(loaded), rows)
            made = make_partition(key, source, rows, tokenizer, limits_of(settings.prompts, facts), responses)
            path, page = write_partition(made, loaded.home.prompts), page_path(loaded.home.prompts, key)
            write_atomic(page, render_page(made, tokenizer))
            dropped = sum(made.dropped.values())
            context.log.info("%d of %d rows are prompts; dropped: %s", len(made.prompts), len(made.rows), made.dropped)
            limit = settings.prompts.max_dropped_share
            if dropped > limit * len(made.rows):
                raise dg.Failure(
                    f"{dropped} of {len(made.rows)} rows are dropped, more than the share of {limit} (prompts.max_dropped_share)",
                    metadata={
                        "dropped": dg.JsonMetadataValue(made.dropped),
                        "dropped rows": _dropped_table(made),
                        "page": dg.MetadataValue.path(page),
                    },
                    allow_retries=False,
                )
            yield dg.MaterializeResult(
                data_version=dg.DataVersion(made.version),
                metadata={**_metadata(made), "path": dg.MetadataValue.path(path), "page": dg.MetadataValue.path(page)},
            )

    return prompts


def _metadata(made: PromptPartition) -> dict[str, dg.MetadataValue]:
    survey = Survey()
    survey.add(made)
    quantiles = survey.length_quantiles
    return {
        "source rows": dg.IntMetadataValue(survey.source_rows),
        "rows": dg.IntMetadataValue(survey.rows),
        "prompts": dg.IntMetadataValue(len(made.prompts)),
        "formats": dg.JsonMetadataValue(dict(survey.formats)),
        "columns not needed": dg.JsonMetadataValue(dict(survey.unread)),
        "dropped": dg.JsonMetadataValue(made.dropped),
        "dropped rows": _dropped_table(made),
        "tokens": dg.IntMetadataValue(survey.tokens),
        "longest prompt (tokens)": dg.IntMetadataValue(quantiles.get("max", 0)),
        "lengths (tokens)": _lengths_table(quantiles),
        "histogram of lengths": histogram(survey.lengths, "tokens of a prompt"),
        "dropped share": dg.FloatMetadataValue(round(sum(made.dropped.values()) / max(1, len(made.rows)), 4)),
        "supervised share": dg.FloatMetadataValue(round(survey.supervised_share, 4)),
        "source": dg.PathMetadataValue(str(made.source.path)),
        "template_sha256": dg.TextMetadataValue(made.template_sha256),
        "tokenizer_sha256": dg.TextMetadataValue(made.tokenizer_sha256),
    }


def _lengths_table(quantiles: dict[str, int]) -> dg.TableMetadataValue:
    schema = dg.TableSchema([dg.TableColumn(name, "int") for name in quantiles])
    return dg.TableMetadataValue([dg.TableRecord(dict(quantiles))] if quantiles else [], schema=schema)


def _dropped_table(made: PromptPartition) -> dg.TableMetadataValue:
    records = [
        dg.TableRecord(
            {
                "sample": row.sample_id,
                "source row": row.source_row,
                "reason": row.content.reason,
                "detail": row.content.detail[:300],
            }
        )
        for row in made.rows
        if isinstance(row.content, Dropped)
    ]
    columns = [dg.TableColumn("sample"), dg.TableColumn("source row", "int"), dg.TableColumn("reason"), dg.TableColumn("detail")]
    return dg.TableMetadataValue(records, schema=dg.TableSchema(columns))
