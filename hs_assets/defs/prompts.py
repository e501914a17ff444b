"""Asset `prompts`: the rows of a partition as token ids and loss masks, made by the model's own tokenizer and template."""

from collections.abc import Iterator

import dagster as dg

from hs_assets.defs.project import ProjectResource
from hs_assets.extraction.status import sources
from hs_assets.samples.conversations import Dropped
from hs_assets.samples.filters import limits_of
from hs_assets.samples.model import read_model_facts
from hs_assets.samples.prepare import make_partition
from hs_assets.samples.prompts import PromptPartition, write_partition
from hs_assets.samples.sources import read_partition
from hs_assets.samples.survey import Survey
from hs_assets.samples.tokenizer import load_tokenizer


def build_prompts(partitions: dg.PartitionsDefinition[str]) -> dg.AssetsDefinition:
    """The asset, over the partitions of all sources."""

    @dg.asset(
        partitions_def=partitions, group_name="extraction", kinds={"parquet"}, owners=["team:hs-assets"], output_required=False
    )
    def prompts(context: dg.AssetExecutionContext, project: ProjectResource) -> Iterator[dg.MaterializeResult[None]]:
        """Conversations → token ids and loss mask, with the row of the file that each came from.

        A row whose mask cannot be made surely is dropped with a reason, never guessed. Nothing is sent to the server.
        """
        loaded = project.load()
        settings, key = loaded.settings, context.partition_key
        facts = read_model_facts(settings.model.path)
        tokenizer = load_tokenizer(settings.model.path, trust_remote_code=settings.model.trust_remote_code)
        source = next(s for s in sources(loaded) if key.rpartition("-")[0] == s.name)
        rows = read_partition(loaded.home.prompts / "index", source, key, settings.prompts.max_row_bytes)
        made = make_partition(key, source, rows, tokenizer, limits_of(settings.prompts, facts))
        path = write_partition(made, loaded.home.prompts)
        dropped = sum(made.dropped.values())
        context.log.info("%d of %d rows are prompts; dropped: %s", len(made.prompts), len(made.rows), made.dropped)
        limit = settings.prompts.max_dropped_share
        if dropped > limit * len(made.rows):
            raise dg.Failure(
                f"{dropped} of {len(made.rows)} rows are dropped, more than the share of {limit} (prompts.max_dropped_share)",
                metadata={"dropped": dg.JsonMetadataValue(made.dropped), "dropped rows": _dropped_table(made)},
                allow_retries=False,
            )
        yield dg.MaterializeResult(
            data_version=dg.DataVersion(made.version), metadata={**_metadata(made), "path": dg.MetadataValue.path(path)}
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
        "lengths (tokens)": dg.JsonMetadataValue(quantiles),
        "supervised share": dg.FloatMetadataValue(round(survey.supervised_share, 4)),
        "source": dg.PathMetadataValue(str(made.source.path)),
        "template_sha256": dg.TextMetadataValue(made.template_sha256),
        "tokenizer_sha256": dg.TextMetadataValue(made.tokenizer_sha256),
    }


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
