"""Facts of a checkpoint, read from its config.json and its safetensors files without loading it.

The final norm and single rows of the output head are all the arithmetic that the `logprob` rule needs.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from hs_assets.errors import ConfigError, WireError
from hs_assets.wire.dump import read_safetensors_header

_RMS_NORM_CLASSES = frozenset(
    {
        "DeepseekV3ForCausalLM",
        "KimiK25ForConditionalGeneration",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)
"""Model classes whose final norm is x / rms(x) * weight."""

CONTEXT_MARGIN = 7
"""Tokens of its context that SGLang does not let a prompt have: it refuses one of ``context - 6`` and longer."""

_DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What config.json says of the text model."""

    path: Path
    model_class: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    norm_eps: float
    tied_embeddings: bool
    logit_softcap: float | None
    logit_scale: float

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that SGLang takes."""
        return self.context_length - CONTEXT_MARGIN


@dataclass(frozen=True, slots=True)
class Head:
    """The final norm and the output head. ``norm_weight`` float32 [H]; ``_matrix`` [V, H], mapped, not loaded."""

    norm_weight: np.ndarray
    norm_eps: float
    softcap: float | None
    scale: float
    _matrix: np.ndarray

    @property
    def vocab_size(self) -> int:
        return len(self._matrix)

    def logits(self, state: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        """Logits float32 [n] of the ids [n] after a token whose final pre-norm state is `state` [H].

        RMSNorm (Zhang and Sennrich, 2019) and the rows of the head, in float32; then the model's own scale and softcap.
        """
        x = state.astype(np.float32)
        normed = x / np.sqrt(np.mean(x * x) + np.float32(self.norm_eps)) * self.norm_weight
        logits = self._matrix[token_ids].astype(np.float32) @ normed * np.float32(self.scale)
        return np.asarray(logits if self.softcap is None else self.softcap * np.tanh(logits / self.softcap))


def read_model_facts(path: Path) -> ModelFacts:
    """The facts of the checkpoint in a folder.

    Raises:
        ConfigError: no config.json there, or one without the usual fields.
    """
    file = path / "config.json"
    remedy = "check model.path; the demo's model is made by hs-assets demo"
    try:
        outer = json.loads(file.read_text())
        text = outer.get("text_config") or outer
        softcap = text.get("final_logit_softcapping")
        facts = ModelFacts(
            path=path,
            model_class=outer["architectures"][0],
            num_layers=text["num_hidden_layers"],
            hidden_size=text["hidden_size"],
            vocab_size=text["vocab_size"],
            context_length=text["max_position_embeddings"],
            norm_eps=float(text.get("rms_norm_eps", 1e-6)),
            tied_embeddings=bool(text.get("tie_word_embeddings", outer.get("tie_word_embeddings", False))),
            logit_softcap=None if softcap is None else float(softcap),
            logit_scale=float(text.get("logit_scale", 1.0)),
        )
    except OSError as error:
        raise ConfigError("the model's config.json cannot be read", where=path, got=error, remedy=remedy) from error
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ConfigError("the model's config.json lacks what is needed", where=file, got=repr(error), remedy=remedy) from error
    for name in ("num_layers", "hidden_size", "vocab_size", "context_length"):
        if type(value := getattr(facts, name)) is not int or value <= 0:
            raise ConfigError("the model's config.json lacks a size", where=file, got=f"{name} = {value!r}", remedy=remedy)
    return facts


def stop_token_ids(path: Path, eos_token_id: int | None) -> tuple[int, ...]:
    """The ids at which the model ends an answer: those of generation_config.json and config.json, and the tokenizer's.

    Raises:
        ConfigError: none of them names one.
    """
    found = set() if eos_token_id is None else {eos_token_id}
    for name in ("generation_config.json", "config.json"):
        fields = json.loads((path / name).read_text()) if (path / name).exists() else {}
        for holder in (fields, fields.get("text_config") or {}):
            named = holder.get("eos_token_id")
            found |= {int(i) for i in (named if isinstance(named, list) else [named]) if i is not None}
    if not found:
        raise ConfigError("nothing says where an answer ends", where=path, expected="eos_token_id in generation_config.json")
    return tuple(sorted(found))


@functools.lru_cache(maxsize=4)
def load_head(facts: ModelFacts) -> Head | str:
    """The final norm and head of a checkpoint, or why the `logprob` rule cannot use them."""
    if facts.model_class not in _RMS_NORM_CLASSES:
        return f"the final norm of {facts.model_class} is not known here"
    try:
        tensors = _tensors(facts.path)
        head, norm = _head_names(tensors, facts.tied_embeddings)
        matrix, weight = _map(tensors[head], head), _map(tensors[norm], norm)
    except (OSError, ValueError, KeyError, WireError) as error:
        return f"the checkpoint has no final norm and head that can be read: {error!r}"
    if matrix.shape != (facts.vocab_size, facts.hidden_size) or weight.shape != (facts.hidden_size,):
        return f"the head and the final norm have the shapes {matrix.shape} and {weight.shape}"
    return Head(weight.astype(np.float32), facts.norm_eps, facts.logit_softcap, facts.logit_scale, matrix)


def shard_files(path: Path) -> list[Path]:
    """The checkpoint's safetensors files, in order."""
    return sorted(path.glob("*.safetensors"))


def _tensors(path: Path) -> dict[str, Path]:
    """Tensor name → the file it lies in."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        return {name: path / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    return {name: file for file in shard_files(path) for name in read_safetensors_header(file)[0] if name != "__metadata__"}


def _head_names(tensors: dict[str, Path], tied: bool) -> tuple[str, str]:
    """Names of the output head (or the embedding it is tied to) and of the final norm, which lies beside the embedding."""
    embeddings = [name for name in tensors if name.rpartition("embed_tokens.weight")[1] and _norm_beside(name) in tensors]
    heads = embeddings if tied else [name for name in tensors if name == "lm_head.weight" or name.endswith(".lm_head.weight")]
    if not heads or not embeddings:
        raise KeyError("lm_head.weight, or embed_tokens.weight with norm.weight beside it")
    return min(heads, key=len), _norm_beside(min(embeddings, key=len))


def _norm_beside(embedding: str) -> str:
    return embedding.removesuffix("embed_tokens.weight") + "norm.weight"


def _map(file: Path, name: str) -> np.ndarray:
    """A tensor mapped from its file; raises ValueError if its dtype is not a plain float."""
    header, start = read_safetensors_header(file)
    entry: Any = header[name]
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"{name} is quantised: {entry['dtype']}")
    first, _ = entry["data_offsets"]
    return np.memmap(file, _DTYPES[entry["dtype"]], "r", start + first, tuple(entry["shape"]))
