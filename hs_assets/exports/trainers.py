"""The trainers that samples can be exported for, by name."""

from hs_assets.exports.modelopt import MODELOPT
from hs_assets.exports.specforge import SPECFORGE
from hs_assets.exports.speculators import SPECULATORS, SPECULATORS_LEGACY

__all__ = ["MODELOPT", "SPECFORGE", "SPECULATORS", "SPECULATORS_LEGACY", "TRAINERS"]

TRAINERS = {trainer.name: trainer for trainer in (SPECFORGE, SPECULATORS, SPECULATORS_LEGACY, MODELOPT)}
