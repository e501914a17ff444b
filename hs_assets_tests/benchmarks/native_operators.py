"""A plugin for parity in float32 on a GPU: SGLang's operators in plain torch, because its kernels know 16 bits only."""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Entry point."""
    from sglang.srt.layers.utils.multi_platform import MultiPlatformOp
    from sglang.srt.models import utils

    def native(operator: Any) -> Any:
        return operator.forward_native

    MultiPlatformOp.dispatch_forward = native
    utils.can_use_fused_inplace_qknorm = lambda *_: False
