"""The resource that every asset takes its configuration from; read anew in every run, so editing the file needs no reload."""

import dagster as dg

from hs_assets.config import Project, load_project


class ProjectResource(dg.ConfigurableResource[Project]):
    """Home and configuration, as `hs_assets.config.load_project` takes them."""

    home: str
    config: str

    def load(self) -> Project:
        """Read the configuration."""
        return load_project(self.home, self.config)
