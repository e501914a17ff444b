"""A store to export: partitions with states of any bits, token ids, masks, and the final norm, and what was put in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from hs_assets.store import Store, open_store
from hs_assets.store.layout import StorePaths, create
from hs_assets.store.manifest import Manifest, Part, PromptsVersion, StoredSample, UnstoredRow
from hs_assets.store.masks import write_final_norm, write_masks
from hs_assets.store.writer import ArrayShape, GenerationWriter
from hs_assets.wire.dump import token_sha256
from hs_assets.wire.layers import LayerSet

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HIDDEN, VOCABULARY, EPS = 16, 6000, 1e-5
LAYERS = LayerSet((2, 4, 6), 8)
SHAPE = ArrayShape(hidden_size=HIDDEN, dtype="BF16", chunk_tokens=128, shard_tokens=1024)
FINGERPRINT, WEIGHTS = "0123456789abcdef", "fedcba9876543210"
NORM_WEIGHT = np.random.default_rng(5).normal(1, 0.5, HIDDEN).astype(BFLOAT16).astype(np.float32)


@dataclass(frozen=True)
class Put:
    """A sample as it was handed to the store: ids int32 [L], mask bool [L], residual id → states [L, H]."""

    sample_id: str
    ids: np.ndarray
    mask: np.ndarray
    states: Mapping[int, np.ndarray]


def random_sample(sample_id: str, length: int, random: np.random.Generator) -> Put:
    """States of any bits, NaN payloads and -0.0 among them, but a first column that is not NaN, as a store asks; the final
    state has the size that a norm is made for."""
    states = {}
    for residual_id in LAYERS.aux:
        bits = random.integers(0, 1 << 16, (length, HIDDEN), np.uint16)
        bits[:, 0] &= 0x7EFF
        states[residual_id] = bits.view(BFLOAT16)
    states[LAYERS.final] = random.normal(0, random.uniform(0.1, 300), (length, HIDDEN)).astype(BFLOAT16)
    mask = random.random(length) < 0.5
    mask[-1] = True
    return Put(sample_id, random.integers(0, VOCABULARY, length).astype(np.int32), mask, states)


def numbered_sample(sample_id: str) -> Put:
    """Ten tokens 0 … 9, of which 4, 5 and 6 are supervised; every state of token t is t + 1."""
    ids = np.arange(10, dtype=np.int32)
    states = np.repeat((ids + 1.0)[:, None], HIDDEN, axis=1).astype(BFLOAT16)
    return Put(sample_id, ids, (ids >= 4) & (ids < 7), dict.fromkeys(LAYERS.residual_ids, states))


def put_partition(
    paths: StorePaths,
    samples: Sequence[Put],
    *,
    layers: LayerSet = LAYERS,
    prompts_version: str = "prompts-1",
    fingerprint: str = FINGERPRINT,
    unstored: tuple[UnstoredRow, ...] = (),
) -> Manifest:
    """Store samples of one partition as a new generation, and their manifest."""
    partition = samples[0].sample_id.partition("/")[0]
    writer = GenerationWriter(paths, fingerprint, partition, layers.residual_ids, layers.final, SHAPE)
    offsets = [writer.append(s.ids, {i: s.states[i] for i in layers.residual_ids}) for s in samples]
    writer.publish()
    write_masks(paths, partition, prompts_version, [s.mask for s in samples])
    norms = (1.0,) * len(layers.residual_ids)
    manifest = Manifest(
        partition=partition,
        layer_set=layers.id,
        state_fingerprint=fingerprint,
        state_spec={"model_path": "a model", "model_class": "LlamaForCausalLM", "weight_fingerprint": WEIGHTS},
        prompts=PromptsVersion(prompts_version, "rows", "rows.jsonl", "t" * 64, "k" * 64),
        rows=len(samples) + len(unstored),
        samples=tuple(
            StoredSample(
                sample_id=s.sample_id,
                source_row=100 + row,
                source_sha256=f"{row:064x}",
                tokens=len(s.ids),
                supervised_tokens=int(s.mask.sum()),
                token_sha256=token_sha256(s.ids.tobytes()),
                mask=row,
                parts=(Part(writer.name, offset, layers.residual_ids, norms, 17 + row, "server", "run", 1.5),),
            )
            for row, (s, offset) in enumerate(zip(samples, offsets, strict=True))
        ),
        unstored=unstored,
    )
    manifest.write(paths)
    return manifest


def put_store(root: Path, lengths: Mapping[str, Sequence[int]]) -> tuple[Store, list[Put]]:
    """A store of random samples, with a partition for each key, its samples of these lengths; and all samples, in their order."""
    paths, random = create(root), np.random.default_rng(3)
    write_final_norm(paths, WEIGHTS, "LlamaForCausalLM", NORM_WEIGHT, EPS)
    put = []
    for partition, sizes in lengths.items():
        samples = [random_sample(f"{partition}/{row:04d}", length, random) for row, length in enumerate(sizes)]
        put_partition(paths, samples)
        put += samples
    return open_store(root), put


def bits(states: np.ndarray) -> np.ndarray:
    """bfloat16 as its bits, uint16."""
    return states.view(np.uint16)
