"""Write a checkpoint with random weights of the sizes that matter; runs in an environment with torch and transformers.

    python make_checkpoint.py SHAPE DEST [--dtype bfloat16] [--device cuda]

SHAPE ``dense`` is Qwen3-1.7B; ``mla`` is DeepSeek-V3 with Kimi-K2's sizes of a layer (hidden 7168, 64 heads, MLA ranks,
8 experts a token), but 6 layers and 32 experts (20 GB); ``small`` is a Qwen3 that a CPU can prefill. Every layer changes the
stream: SGLang's own dummy weights would leave all states equal to the embedding.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, PretrainedConfig, Qwen3Config

_SHARD_BYTES = 4 << 30

_YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}


def config_of(shape: str) -> PretrainedConfig:
    if shape == "mla":
        return DeepseekV3Config(
            vocab_size=163840,
            hidden_size=7168,
            intermediate_size=18432,
            moe_intermediate_size=2048,
            num_hidden_layers=6,
            num_attention_heads=64,
            num_key_value_heads=64,
            n_routed_experts=32,
            n_shared_experts=1,
            num_experts_per_tok=8,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            routed_scaling_factor=2.827,
            norm_topk_prob=True,
            max_position_embeddings=131072,
            rope_scaling=_YARN,
            tie_word_embeddings=False,
        )
    small = shape == "small"
    return Qwen3Config(
        vocab_size=8192 if small else 151936,
        hidden_size=512 if small else 2048,
        intermediate_size=1024 if small else 6144,
        num_hidden_layers=8 if small else 28,
        num_attention_heads=8 if small else 16,
        num_key_value_heads=4 if small else 8,
        head_dim=64 if small else 128,
        max_position_embeddings=40960,
        rope_theta=1_000_000,
        tie_word_embeddings=not small,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=["dense", "mla", "small"])
    parser.add_argument("destination", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    torch.manual_seed(0)
    with torch.device(arguments.device):
        model = AutoModelForCausalLM.from_config(config_of(arguments.shape), dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1, 0.1)
            else:
                parameter.normal_(0, 0.8 / max(parameter.shape[-1], 1) ** 0.5)
    model.save_pretrained(arguments.destination, max_shard_size=_SHARD_BYTES)
    path = arguments.destination / "config.json"
    config = json.loads(path.read_text())
    if arguments.shape == "mla":
        config |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1, "num_nextn_predict_layers": 0}
    path.write_text(json.dumps(config, indent=1))
    (arguments.destination / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")


if __name__ == "__main__":
    main()
