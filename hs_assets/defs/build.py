"""All assets, jobs, schedules and sensors of a project, put together."""

import dagster as dg

from hs_assets.config import Project
from hs_assets.defs.exports import build_exports
from hs_assets.defs.extraction import build_extraction
from hs_assets.defs.layer_set import RECORD_JOB, layer_set
from hs_assets.defs.partitions import prompt_partitions
from hs_assets.defs.project import ProjectResource
from hs_assets.defs.prompts import build_prompts
from hs_assets.defs.recorded import RAW_DUMPS, SAMPLES
from hs_assets.defs.reextract import REEXTRACT_JOB, build_reextract
from hs_assets.defs.responses import build_responses
from hs_assets.defs.sensors import backfill_summary, janitor


def build_definitions(project: Project) -> dg.Definitions:
    """All assets, jobs, schedules and sensors of a project; its sources are looked at for the partitions."""
    partitions = prompt_partitions(project)
    responses = [build_responses(partitions)] if project.settings.responses.enabled else []
    prompts = build_prompts(partitions, [asset.key for asset in responses])
    made = [*(asset.key for asset in responses), prompts.key, RAW_DUMPS, SAMPLES]
    return dg.Definitions(
        assets=[layer_set, *responses, prompts, build_extraction(partitions), *build_exports(partitions)],
        jobs=[
            dg.define_asset_job(RECORD_JOB, [layer_set], description="Record what is to be extracted."),
            dg.define_asset_job("extract", made, description="One partition, from rows to samples."),
            dg.define_asset_job(REEXTRACT_JOB, [RAW_DUMPS, SAMPLES], description="One partition, from its prompts to samples."),
        ],
        schedules=[build_reextract(partitions, project)],
        sensors=[janitor, backfill_summary],
        resources={"project": ProjectResource(home=str(project.home.root), config=project.origin)},
        executor=dg.in_process_executor,
    )
