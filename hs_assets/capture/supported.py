"""What capture was proven on, and what it refuses."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

PROVEN = {
    "0.5.17": frozenset({"Qwen3ForCausalLM"}),
    "0.5.23": frozenset({"LlamaForCausalLM", "Qwen3ForCausalLM", "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"}),
}
"""SGLang version → model classes whose captured states equal those of HF transformers (the parity tests)."""


def _is(name: str, *values: object) -> Callable[[Any], bool]:
    return lambda args: getattr(args, name, None) in values


def _on(name: str) -> Callable[[Any], bool]:
    return lambda args: bool(getattr(args, name, False))


def _above_one(name: str) -> Callable[[Any], bool]:
    return lambda args: (getattr(args, name, 1) or 1) > 1


def _prefill_graphs(args: Any) -> bool:
    if args.device != "cuda" or args.disable_prefill_cuda_graph:
        return False
    config = getattr(args, "cuda_graph_config", None)
    return config is None or str(config.prefill.backend).rpartition(".")[2].lower() != "disabled"


_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "--disable-radix-cache missing",
        _is("disable_radix_cache", False, None),
        "cached prefixes are not computed, so not captured",
    ),
    ("--disable-prefill-cuda-graph missing", _prefill_graphs, "hooks do not run inside a CUDA graph"),
    ("--enable-two-batch-overlap", _on("enable_two_batch_overlap"), "it captures nothing"),
    ("--enable-attn-tp-input-scattered", _on("enable_attn_tp_input_scattered"), "a rank sees only its share of the rows"),
    ("--enable-layernorm-sp", _on("enable_layernorm_sp"), "a rank sees only its share of the rows"),
    ("--enable-prefill-cp", _on("enable_prefill_cp"), "a rank sees only its share of the rows"),
    ("--attn-cp-size", _above_one("attn_cp_size"), "a rank sees only its share of the rows"),
    ("--pp-size", _above_one("pp_size"), "a rank sees only its share of the layers"),
    ("--dp-size", _above_one("dp_size"), "ranks of different groups would write under the same number"),
    ("--attn-dp-size", _above_one("attn_dp_size"), "a rank sees only the requests of its group"),
    ("--moe-dp-size", _above_one("moe_dp_size"), "a rank sees only its share of the rows"),
    ("--dcp-size", _above_one("dcp_size"), "it was never compared with one rank"),
    ("--enable-pdmux", _on("enable_pdmux"), "prefill is split over several passes"),
    ("--disaggregation-mode", lambda args: args.disaggregation_mode != "null", "prefill runs on another server"),
    ("--dllm-algorithm", _on("dllm_algorithm"), "there is no causal prefill"),
    ("--enable-mixed-chunk", _on("enable_mixed_chunk"), "decode rows mix with prefill rows"),
    ("--speculative-algorithm", _on("speculative_algorithm"), "a draft model truncates what is captured"),
)


def violations(server_args: Any, sglang_version: str, model_class: str) -> list[str]:
    """Why capture will not run on this server: one sentence a reason, none if it will."""
    reasons = []
    if model_class not in PROVEN.get(sglang_version, frozenset()):
        proven = "; ".join(f"SGLang {version}: {', '.join(sorted(classes))}" for version, classes in PROVEN.items())
        reasons.append(f"SGLang {sglang_version} with {model_class} has not passed the parity tests (passed: {proven})")
    reasons += [f"{flag}: {reason}" for flag, refuses, reason in _REFUSED if refuses(server_args)]
    if os.environ.get("SGLANG_ENABLE_DELAY_SAMPLE", "0").lower() in {"1", "true", "yes", "y"}:
        reasons.append("SGLANG_ENABLE_DELAY_SAMPLE: sampling runs after the batch was let go of")
    return reasons
