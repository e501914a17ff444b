"""``python -m hs_assets.cli`` is ``hs-assets``."""

from hs_assets.cli import main

main()
