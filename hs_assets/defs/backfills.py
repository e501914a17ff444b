"""What a run knows of the backfill that it is of."""

import dagster as dg
from dagster._core.storage.tags import BACKFILL_ID_TAG

from hs_assets.config import Project
from hs_assets.defs.recorded import RAW_DUMPS, SAMPLES
from hs_assets.extraction.backfill_room import Wanted, require_room
from hs_assets.serving.launch import Target


def require_room_for_backfill(context: dg.AssetExecutionContext, project: Project, target: Target) -> None:
    """Raise ExtractionError where the run is of a backfill whose partitions cannot be extracted for want of room.

    To be called by each step that asks the server, before it does.
    """
    backfill_id = context.run.tags.get(BACKFILL_ID_TAG)
    if backfill_id is not None:
        require_room(project, target, backfill_id, lambda: _wanted(context, backfill_id), context.log.info)


def _wanted(context: dg.AssetExecutionContext, backfill_id: str) -> Wanted:
    """What of the extraction a backfill is to make; the run's own partition where it is not known."""
    backfill = context.instance.get_backfill(backfill_id)
    if backfill is None or not backfill.is_asset_backfill:
        named = (backfill.partition_names if backfill else None) or ()
        return Wanted({*named, context.partition_key}, kept=False)
    subset = backfill.get_asset_backfill_data(context.repository_def.asset_graph).target_subset
    made = [one for one in subset.iterate_asset_partitions() if one.asset_key in (RAW_DUMPS, SAMPLES)]
    kept = not any(one.asset_key == SAMPLES for one in made)
    return Wanted({one.partition_key for one in made if one.partition_key}, kept)
