"""A second plugin, for SGLang's CPU engine alone: attention of DeepSeek models (MLA) on the torch back end.

SGLang names no method of attention for that back end and falls back to one that needs a GPU.
"""

from __future__ import annotations

import os
from typing import Any


def register() -> None:
    """Entry point: inert unless SGLang runs on its CPU engine."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod

    def absorbed(_attention: Any, _forward_batch: Any) -> Any:
        return AttnForwardMethod.MLA

    AttentionBackendRegistry.register("torch_native", absorbed)
