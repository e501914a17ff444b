"""One partition of rows → prompts: token ids, loss mask and lineage for each row, or the reason it is dropped.

The table on disk, ``<home>/prompts/<partition>.parquet``, has a line for every row of the partition.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hs_assets.errors import PromptError
from hs_assets.samples.conversations import Dropped, Tokenized, parse_row
from hs_assets.samples.masks import tokenize_conversation
from hs_assets.samples.sources import Source, SourceRow, replace_table
from hs_assets.samples.tokenizer import ChatTokenizer
from hs_assets.wire.dump import token_sha256
from hs_assets.wire.rid import sample_id

PROMPTS_VERSION = 1
"""Changes when the same rows would give other prompts."""


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """What a prompt must keep to: length in tokens, and ids in ``[0, vocab_size)``."""

    max_tokens: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row that can be extracted. ``input_ids`` int32 [L], ``loss_mask`` bool [L]."""

    row: int
    input_ids: np.ndarray
    loss_mask: np.ndarray
    token_sha256: str

    @classmethod
    def supervised(cls, row: int, input_ids: np.ndarray) -> Prompt:
        """A prompt of which every token is supervised."""
        ids = input_ids.astype("<i4")
        return cls(row, ids, np.ones(len(ids), bool), token_sha256(ids.tobytes()))


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A row of a partition: where it came from, and its prompt or the reason it has none."""

    sample_id: str
    row: int
    source_row: int
    source_sha256: str
    content: Prompt | Dropped


@dataclass(frozen=True, slots=True)
class PromptPartition:
    """A partition of prompts. ``version`` is its data version: it changes when a prompt in it may change."""

    key: str
    version: str
    source: Source
    template_sha256: str
    tokenizer_sha256: str
    rows: tuple[PromptRow, ...]

    @property
    def prompts(self) -> list[Prompt]:
        """The rows that can be extracted."""
        return [row.content for row in self.rows if isinstance(row.content, Prompt)]

    @property
    def dropped(self) -> dict[str, int]:
        """How many rows are dropped, by reason."""
        return dict(Counter(row.content.reason for row in self.rows if isinstance(row.content, Dropped)))


def make_partition(
    key: str, source: Source, rows: Sequence[SourceRow], tokenizer: ChatTokenizer, limits: PromptLimits
) -> PromptPartition:
    """The prompts of a partition."""
    made = tuple(
        PromptRow(sample_id(key, number), number, row.number, row.sha256, _make(number, row, tokenizer, limits))
        for number, row in enumerate(rows)
    )
    facts = (PROMPTS_VERSION, tokenizer.template_sha256, tokenizer.tokenizer_sha256, limits.max_tokens, limits.vocab_size)
    # The prompts themselves too: a template may look at the clock.
    identity = json.dumps([facts, [(row.source_sha256, _identity(row.content)) for row in made]])
    version = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return PromptPartition(key, version, source, tokenizer.template_sha256, tokenizer.tokenizer_sha256, made)


def _identity(content: Prompt | Dropped) -> tuple[str, str]:
    if isinstance(content, Dropped):
        return content.reason, content.detail
    return content.token_sha256, hashlib.sha256(content.loss_mask.tobytes()).hexdigest()


def _make(number: int, row: SourceRow, tokenizer: ChatTokenizer, limits: PromptLimits) -> Prompt | Dropped:
    if row.duplicate_of is not None:
        return Dropped("duplicate", f"the same bytes as {row.duplicate_of}")
    parsed = parse_row(row.raw)
    if isinstance(parsed, Dropped):
        return parsed
    made = parsed if isinstance(parsed, Tokenized) else tokenize_conversation(parsed, tokenizer)
    if isinstance(made, Dropped):
        return made
    outside = next((i for i in made.input_ids if not 0 <= i < limits.vocab_size), None)
    if outside is not None:
        return Dropped("token_out_of_vocab", f"id {outside} with a vocabulary of {limits.vocab_size}")
    if len(made.input_ids) > limits.max_tokens:
        return Dropped("too_long", f"{len(made.input_ids)} tokens, at most {limits.max_tokens}")
    if not any(made.loss_mask):
        return Dropped("no_supervised_tokens", f"none of {len(made.input_ids)} tokens is supervised")
    ids = np.asarray(made.input_ids, dtype="<i4")
    return Prompt(number, ids, np.asarray(made.loss_mask, dtype=bool), token_sha256(ids.tobytes()))


def write_partition(partition: PromptPartition, folder: Path) -> Path:
    """Write the partition's table, replacing the last one all at once; returns its path."""
    import pyarrow as pa

    kept = [row.content if isinstance(row.content, Prompt) else None for row in partition.rows]
    dropped = [row.content if isinstance(row.content, Dropped) else None for row in partition.rows]
    table = pa.table(
        {
            "sample_id": pa.array([row.sample_id for row in partition.rows], pa.string()),
            "source_row": pa.array([row.source_row for row in partition.rows], pa.int64()),
            "source_sha256": pa.array([row.source_sha256 for row in partition.rows], pa.string()),
            "dropped": pa.array([d and d.reason for d in dropped], pa.string()),
            "detail": pa.array([d and d.detail for d in dropped], pa.string()),
            "token_sha256": pa.array([p and p.token_sha256 for p in kept], pa.string()),
            "input_ids": pa.array([None if p is None else p.input_ids for p in kept], pa.list_(pa.int32())),
            "loss_mask": pa.array([None if p is None else p.loss_mask for p in kept], pa.list_(pa.bool_())),
        }
    ).replace_schema_metadata(
        {
            "version": partition.version,
            "source_name": partition.source.name,
            "source_path": str(partition.source.path),
            "template_sha256": partition.template_sha256,
            "tokenizer_sha256": partition.tokenizer_sha256,
            "coordinates": "loss_mask[i] is True where input_ids[i] is supervised; no shift",
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = table_path(folder, partition.key)
    replace_table(path, table)
    return path


def read_partition_table(folder: Path, key: str) -> PromptPartition:
    """The partition as it was written.

    Raises:
        PromptError: its prompts were never made.
    """
    import pyarrow.parquet as pq

    path = table_path(folder, key)
    if not path.exists():
        raise PromptError(
            "the prompts of this partition were not made yet", where=key, expected=path, remedy="materialise prompts first"
        )
    table = pq.read_table(path)
    metadata = {name.decode(): value.decode() for name, value in (table.schema.metadata or {}).items()}
    rows = tuple(_read_row(number, entry) for number, entry in enumerate(table.to_pylist()))
    source = Source(metadata["source_name"], Path(metadata["source_path"]))
    return PromptPartition(key, metadata["version"], source, metadata["template_sha256"], metadata["tokenizer_sha256"], rows)


def table_path(folder: Path, key: str) -> Path:
    """Where a partition's table lies."""
    return folder / f"{key}.parquet"


def _read_row(number: int, entry: dict[str, object]) -> PromptRow:
    content: Prompt | Dropped
    if entry["dropped"] is not None:
        content = Dropped(str(entry["dropped"]), str(entry["detail"]))
    else:
        ids, mask = np.asarray(entry["input_ids"], "<i4"), np.asarray(entry["loss_mask"], bool)
        content = Prompt(number, ids, mask, str(entry["token_sha256"]))
    return PromptRow(str(entry["sample_id"]), number, int(str(entry["source_row"])), str(entry["source_sha256"]), content)
