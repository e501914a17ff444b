"""What ``dagster dev`` loads (see workspace.yaml): the definitions of the home and configuration of the environment."""

from hs_assets.config import load_project
from hs_assets.defs.build import build_definitions

defs = build_definitions(load_project())
