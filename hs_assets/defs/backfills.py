"""What a run knows of the backfill that it is of."""

import dagster as dg
from dagster._core.storage.tags import BACKFILL_ID_TAG

from hs_assets.config import Project
from hs_assets.defs.recorded import RAW_DUMPS, SAMPLES
from hs_assets.extraction.backfill_room import require_room
from hs_assets.serving.launch import Target


def require_room_for_backfill(context: dg.AssetExecutionContext, project: Project, target: Target) -> None:
    """Raise ExtractionError where the run is of a backfill whose partitions cannot be extracted for want of room."""
    backfill_id = context.run.tags.get(BACKFILL_ID_TAG)
    if backfill_id is not None:
        kept = SAMPLES not in context.selected_asset_keys
        require_room(project, target, backfill_id, lambda: _partitions(context, backfill_id), context.log.info, kept=kept)


def _partitions(context: dg.AssetExecutionContext, backfill_id: str) -> set[str]:
    """The partitions of the extraction that a backfill is to make; the run's own where it is not known."""
    backfill = context.instance.get_backfill(backfill_id)
    if backfill is None:
        return {context.partition_key}
    if not backfill.is_asset_backfill:
        return {*(backfill.partition_names or ()), context.partition_key}
    wanted = backfill.get_asset_backfill_data(context.repository_def.asset_graph).target_subset
    made = (one for one in wanted.iterate_asset_partitions() if one.asset_key in (RAW_DUMPS, SAMPLES))
    return {one.partition_key for one in made if one.partition_key}
