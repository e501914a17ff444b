"""What tests of the store share: partitions with made-up states, written as the pipeline writes them, and what was written."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from hs_assets.store.layout import StorePaths
from hs_assets.store.manifest import Manifest, Part, PromptsVersion, StoredSample, UnstoredRow
from hs_assets.store.masks import write_masks
from hs_assets.store.writer import ArrayShape, GenerationWriter
from hs_assets.wire.dump import token_sha256
from hs_assets.wire.layers import LayerSet

FINGERPRINT, PARTITION = "0123456789abcdef", "demo-00000"
LAYERS, OTHER = LayerSet((2, 4), 8), LayerSet((3, 5), 8)
SHAPE = ArrayShape(hidden_size=4, dtype="BF16", chunk_tokens=4, shard_tokens=8)
SPEC = {
    "model_path": "moonshotai/Kimi-K2.5",
    "model_class": "KimiK25ForConditionalGeneration",
    "weight_fingerprint": "w" * 16,
    "sglang_version": "0.5.17",
}
PROMPTS = PromptsVersion("prompts-1", "demo", "demo.jsonl", "t" * 64, "k" * 64)
DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}
EXPONENTS = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}
"""The exponent's bits; all of them are set in an infinity or a NaN."""


def make_states(random: np.random.Generator, tokens: int, shape: ArrayShape = SHAPE) -> np.ndarray:
    """States [T, H] of any finite value, subnormal ones and both zeros among them."""
    dtype = DTYPES[shape.dtype]
    unsigned = np.dtype(f"<u{dtype.itemsize}")
    bits = random.integers(0, 256, (tokens, shape.hidden_size * dtype.itemsize), np.uint8).view(unsigned)
    bits[random.random(bits.shape) < 0.1] = 1 << (8 * dtype.itemsize - 1)  # -0.0
    bits[random.random(bits.shape) < 0.1] = 0
    exponent = unsigned.type(EXPONENTS[shape.dtype])
    return np.where(bits & exponent == exponent, unsigned.type(1), bits).view(dtype)


def bits(states: np.ndarray) -> np.ndarray:
    """The same array as unsigned integers: equal bits and nothing less."""
    return states.view(np.dtype(f"<u{states.dtype.itemsize}"))


@dataclass
class Made:
    """Samples as they were handed to the store: by sample id what reading must give."""

    input_ids: dict[str, np.ndarray]
    masks: dict[str, np.ndarray]
    states: dict[str, dict[int, np.ndarray]]


@dataclass
class Partition(Made):
    """Samples that are in a store, and the manifest that names them."""

    manifest: Manifest


def make_samples(
    lengths: Sequence[int],
    partition: str = PARTITION,
    residual_ids: Sequence[int] = LAYERS.residual_ids,
    shape: ArrayShape = SHAPE,
    seed: int = 0,
) -> Made:
    """Samples of these lengths; the same arguments give the same ones."""
    random, made = np.random.default_rng(seed), Made({}, {}, {})
    for row, length in enumerate(lengths):
        sample_id = f"{partition}/{row:04d}"
        made.input_ids[sample_id] = random.integers(0, 160_000, length).astype(np.int32)
        made.masks[sample_id] = random.random(length) < 0.5
        made.states[sample_id] = {residual_id: make_states(random, length, shape) for residual_id in residual_ids}
    return made


def make_partition(
    paths: StorePaths,
    lengths: Sequence[int],
    *,
    partition: str = PARTITION,
    layers: LayerSet = LAYERS,
    shape: ArrayShape = SHAPE,
    generation_of: Sequence[int] | None = None,
    ids_by_generation: Sequence[tuple[int, ...]] | None = None,
    unstored: tuple[UnstoredRow, ...] = (),
    prompts: PromptsVersion = PROMPTS,
    seed: int = 0,
    made: Made | None = None,
) -> Partition:
    """Write samples of these lengths with their masks and their manifest.

    Arguments:
        made: these samples, of `lengths`; by default made-up ones.
        generation_of: for each sample the number of the generation that it goes to; by default all go to one.
        ids_by_generation: sets of residual ids that lie in generations of their own; by default all lie together.
    """
    made = made or make_samples(lengths, partition, layers.residual_ids, shape, seed)
    writers: dict[tuple[int, tuple[int, ...]], GenerationWriter] = {}
    offsets: dict[tuple[str, tuple[int, ...]], tuple[GenerationWriter, int]] = {}
    together = ids_by_generation or [layers.residual_ids]
    for (sample_id, ids), number in zip(made.input_ids.items(), generation_of or [0] * len(lengths), strict=True):
        for group in together:
            writer = writers.get((number, group))
            if writer is None:
                writer = writers[number, group] = GenerationWriter(paths, FINGERPRINT, partition, group, layers.final, shape)
            states = {residual_id: made.states[sample_id][residual_id] for residual_id in group}
            offsets[sample_id, group] = writer, writer.append(ids, states)
    for writer in writers.values():
        writer.publish()
    write_masks(paths, partition, prompts.version, list(made.masks.values()))

    def part(sample_id: str, group: tuple[int, ...]) -> Part:
        writer, offset = offsets[sample_id, group]
        return Part(writer.name, offset, group, tuple(1.5 for _ in group), 17, "server-1", "run-1", 1_760_000_000.25)

    samples = tuple(
        StoredSample(
            sample_id=sample_id,
            source_row=row,
            source_sha256=f"{row:064x}",
            tokens=len(ids),
            supervised_tokens=int(made.masks[sample_id].sum()),
            token_sha256=token_sha256(ids.tobytes()),
            mask=row,
            parts=tuple(part(sample_id, group) for group in together),
        )
        for row, (sample_id, ids) in enumerate(made.input_ids.items())
    )
    manifest = Manifest(
        partition=partition,
        layer_set=layers.id,
        state_fingerprint=FINGERPRINT,
        state_spec=SPEC | {"dtype": shape.dtype},
        prompts=prompts,
        rows=len(samples) + len(unstored),
        samples=samples,
        unstored=unstored,
    )
    manifest.write(paths)
    return Partition(made.input_ids, made.masks, made.states, manifest)


def widen(paths: StorePaths, made: Partition, layers: LayerSet = OTHER) -> Manifest:
    """Another layer set over the same rows: the final state from the generation that is there, two more from a new one."""
    lengths = [len(ids) for ids in made.input_ids.values()]
    together, partition = [layers.aux], made.manifest.partition
    more = make_partition(paths, lengths, partition=partition, layers=layers, seed=0, ids_by_generation=together)
    samples = tuple(
        dataclasses.replace(
            new,
            parts=(
                new.parts[0],
                dataclasses.replace(old.parts[0], residual_ids=(8,), norms=(1.0,)),
            ),
        )
        for old, new in zip(made.manifest.samples, more.manifest.samples, strict=True)
    )
    manifest = dataclasses.replace(more.manifest, samples=samples)
    manifest.write(paths)
    return manifest


def generation_folder(paths: StorePaths, made: Partition, sample: int = 0, part: int = 0) -> Path:
    """Where the states of a sample lie."""
    generation = made.manifest.samples[sample].parts[part].generation
    return paths.generation(FINGERPRINT, made.manifest.partition, generation)


def flip_byte(path: Path, position: int) -> None:
    """Turn one bit over, as a bad disk does."""
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)
