"""All assets and jobs of a project, put together."""

import dagster as dg

from hs_assets.config import Project
from hs_assets.defs.exports import build_exports
from hs_assets.defs.extraction import RAW_DUMPS, SAMPLES, build_extraction
from hs_assets.defs.layer_set import layer_set
from hs_assets.defs.partitions import prompt_partitions
from hs_assets.defs.project import ProjectResource
from hs_assets.defs.prompts import build_prompts
from hs_assets.defs.responses import build_responses


def build_definitions(project: Project) -> dg.Definitions:
    """All assets and jobs of a project; its sources are looked at for the partitions."""
    partitions = prompt_partitions(project)
    responses = [build_responses(partitions)] if project.settings.responses.enabled else []
    prompts = build_prompts(partitions, [asset.key for asset in responses])
    made = [*(asset.key for asset in responses), prompts.key, RAW_DUMPS, SAMPLES]
    return dg.Definitions(
        assets=[layer_set, *responses, prompts, build_extraction(partitions), *build_exports(partitions)],
        jobs=[
            dg.define_asset_job("record_layer_set", [layer_set], description="Record what is to be extracted."),
            dg.define_asset_job("extract", made, description="One partition, from rows to samples."),
        ],
        resources={"project": ProjectResource(home=str(project.home.root), config=project.origin)},
        executor=dg.in_process_executor,
    )
