"""Turn conversations into training data for EAGLE-3 drafters, by extracting hidden states from a patched SGLang server.

The modules, from the bottom up: ``wire`` (the contract between server and pipeline), ``capture`` (runs inside SGLang),
``store`` (zarr), ``samples`` (pure functions), ``serving`` (the server's life), ``extraction`` (one partition, end to end),
``defs`` (Dagster). This module imports nothing, so that SGLang's processes load no more of it than ``capture`` and ``wire``.
"""
