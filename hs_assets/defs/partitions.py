"""One Dagster partition for each shard of prompts, from the index of the sources."""

import dagster as dg

from hs_assets.config import Project
from hs_assets.extraction.status import source_indexes
from hs_assets.samples.sources import partition_keys


def prompt_partitions(project: Project) -> dg.StaticPartitionsDefinition:
    """The partitions of all sources. Static ones, read when the definitions are loaded: dynamic ones are slow from 10,000 on."""
    return dg.StaticPartitionsDefinition(partition_keys(source_indexes(project)))
