"""Asset `responses`: the target model's own answers to the rows of a partition."""

from collections import Counter
from collections.abc import Iterator

import dagster as dg

from hs_assets.defs.backfills import require_room_for_backfill
from hs_assets.defs.extraction import POOL
from hs_assets.defs.failures import keeping_failure
from hs_assets.defs.processes import note_process
from hs_assets.defs.project import ProjectResource
from hs_assets.defs.retry import retry_if_died
from hs_assets.extraction.respond import RespondReport, respond
from hs_assets.samples.responses import Responses, write_responses
from hs_assets.serving.launch import resolve

RESPONSES = dg.AssetKey("responses")


def build_responses(partitions: dg.PartitionsDefinition[str]) -> dg.AssetsDefinition:
    """The asset, over the partitions of all sources."""

    @dg.asset(
        key=RESPONSES,
        partitions_def=partitions,
        group_name="extraction",
        kinds={"sglang", "parquet"},
        owners=["team:hs-assets"],
        output_required=False,
        pool=POOL,
    )
    def responses(context: dg.AssetExecutionContext, project: ProjectResource) -> Iterator[dg.MaterializeResult[None]]:
        """Every assistant turn of a conversation answered by the target model itself, after its own earlier answers.

        What was generated is kept turn by turn: materialise it again after a failure, and only what is missing is asked for.
        """
        note_process(context)
        with keeping_failure(context, project, "responses"):
            loaded, key = project.load(), context.partition_key
            target = resolve(loaded)
            require_room_for_backfill(context, loaded, target)
            report = respond(loaded, target, key, context.log.info)
            if report.responses is None:
                retry_if_died(context, report.died)
                raise dg.Failure(
                    f"{key} is not complete:\n" + "\n".join(report.problems),
                    metadata={
                        "failed rows": _failed_table(report),
                        **({"server log": dg.MetadataValue.path(report.server.log)} if report.server else {}),
                    },
                    allow_retries=False,
                )
            path = write_responses(report.responses, loaded.home.responses)
            context.log.info("%d requests, %d tokens generated", report.requests, report.output_tokens)
            metadata = {**_metadata(report, report.responses), "path": dg.MetadataValue.path(path)}
            yield dg.MaterializeResult(data_version=dg.DataVersion(report.responses.version), metadata=metadata)

    return responses


def _metadata(report: RespondReport, made: Responses) -> dict[str, dg.MetadataValue]:
    turns = made.turns
    return {
        "rows": dg.IntMetadataValue(report.rows),
        "answered": dg.IntMetadataValue(report.rows - sum(made.dropped.values())),
        "dropped": dg.JsonMetadataValue(made.dropped),
        "turns": dg.IntMetadataValue(len(turns)),
        "finish reasons": dg.JsonMetadataValue(dict(Counter(turn.finish for turn in turns))),
        "renderings": dg.JsonMetadataValue(dict(Counter(turn.rendering for turn in turns))),
        "requests": dg.IntMetadataValue(report.requests),
        "generated tokens": dg.IntMetadataValue(report.output_tokens),
        "tokens/s": dg.FloatMetadataValue(round(report.output_tokens / report.seconds, 1) if report.seconds else 0.0),
        "seconds": dg.FloatMetadataValue(round(report.seconds, 3)),
        "answered by": dg.TextMetadataValue(made.answered_by),
    }


def _failed_table(report: RespondReport) -> dg.TableMetadataValue:
    records = [
        dg.TableRecord({"row": row, "reason": reason, "detail": detail[:300]})
        for row, (reason, detail) in sorted(report.failed.items())
    ]
    columns = [dg.TableColumn("row", "int"), dg.TableColumn("reason"), dg.TableColumn("detail")]
    return dg.TableMetadataValue(records, schema=dg.TableSchema(columns))
