"""Make a tiny random checkpoint with tokenizer and chat template, in seconds; runs in SGLang's environment.

    python -m hs_assets.serving.tiny_model FAMILY DEST TEXTS      FAMILY: llama, qwen3, deepseek_v3 or kimi_k25

The weights are random but matter: every layer changes the stream, norms are not 1, experts are routed to. The tokenizer
is a byte-level BPE trained on the file TEXTS, with a chat template in the manner of Kimi-K2's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

VOCAB_SIZE = 2048
_SPECIAL_TOKENS = [
    "[BOS]",
    "[EOS]",
    "[PAD]",
    "<|media_pad|>",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
]
_BOS, _EOS, _PAD, _MEDIA = range(4)
_END_OF_TURN = _SPECIAL_TOKENS.index("<|im_end|>")

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'system' -%}<|im_system|>system<|im_middle|>
{%- elif message.role == 'user' -%}<|im_user|>user<|im_middle|>
{%- else -%}<|im_assistant|>assistant<|im_middle|>
{%- endif -%}
{{ message.content }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"""

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
    "bos_token_id": _BOS,
    "eos_token_id": _END_OF_TURN,
    "pad_token_id": _PAD,
    "tie_word_embeddings": False,
}
_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    # SGLang's rotary embedding for the CPU wants the yarn scaling that the real models have too.
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 2048,
    },
}
_SGLANG_DEEPSEEK = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1, "num_nextn_predict_layers": 0}
_VISION: dict[str, Any] = {
    "model_type": "kimi_k25",
    "patch_size": 14,
    "init_pos_emb_height": 8,
    "init_pos_emb_width": 8,
    "init_pos_emb_time": 4,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vt_hidden_size": 64,
    "vt_intermediate_size": 128,
    "vt_num_attention_heads": 2,
    "vt_num_hidden_layers": 1,
    "merge_kernel_size": [2, 2],
    "mm_hidden_size": 64,
    "text_hidden_size": _SHAPE["hidden_size"],
    "mm_projector_type": "patchmerger",
}


def make(family: str, destination: Path, texts: Path) -> None:
    """Write the checkpoint; the same arguments give the same bytes."""
    configs: dict[str, PretrainedConfig] = {
        "llama": LlamaConfig(**_SHAPE, num_key_value_heads=2),
        "qwen3": Qwen3Config(**_SHAPE, num_key_value_heads=2, head_dim=32),
        "deepseek_v3": DeepseekV3Config(**_SHAPE, **_DEEPSEEK),
        "kimi_k25": DeepseekV3Config(**_SHAPE, **_DEEPSEEK),
    }
    model = AutoModelForCausalLM.from_config(configs[family])
    _randomize(model)
    model.to(torch.bfloat16).save_pretrained(destination)
    path = destination / "config.json"
    config = json.loads(path.read_text())
    if family in ("deepseek_v3", "kimi_k25"):
        config |= _SGLANG_DEEPSEEK
    if family == "kimi_k25":
        config = _wrap_as_kimi(destination, config)
    path.write_text(json.dumps(config, indent=1))
    _make_tokenizer(texts).save_pretrained(destination)


def _randomize(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * values if "norm" in name else 0.08 * values)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))


def _wrap_as_kimi(destination: Path, text: dict[str, Any]) -> dict[str, Any]:
    """Kimi-K2.5's layout around a DeepSeek-V3 text model: its weights under ``language_model.``, text only."""
    weights = destination / "model.safetensors"
    renamed = {f"language_model.{name}": tensor for name, tensor in load_file(weights).items()}
    save_file(renamed, weights, metadata={"format": "pt"})
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "bfloat16",
        "language_model_only": True,
        "text_config": text,
        "vision_config": _VISION,
        "media_placeholder_token_id": _MEDIA,
        "bos_token_id": _BOS,
        "eos_token_id": _END_OF_TURN,
        "pad_token_id": _PAD,
        "ignore_index": -100,
        "use_unified_vision_chunk": True,
    }


def _make_tokenizer(texts: Path) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=_SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts.read_text(encoding="utf-8").splitlines(), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="[BOS]", eos_token="<|im_end|>", pad_token="[PAD]")
    fast.add_special_tokens({"additional_special_tokens": _SPECIAL_TOKENS[3:]})
    fast.chat_template = CHAT_TEMPLATE
    return fast


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
