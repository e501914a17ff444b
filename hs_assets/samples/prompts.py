"""A partition of prompts, and its table on disk: token ids, loss mask and lineage for each row, or the reason it is dropped.

``<home>/prompts/<partition>.parquet`` has a line for every prompt, and one for every row that gave none.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hs_assets.errors import PromptError
from hs_assets.samples.conversations import Dropped
from hs_assets.samples.sources import Source
from hs_assets.samples.tables import readable, replace_table
from hs_assets.wire.dump import token_sha256

_COUNTS = "counts"
_TABLE = "a table of prompts", "materialise prompts of this partition again"


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
class Origin:
    """Who wrote the assistant's turns: the source, or a model; then how each of them ended, and how it renders."""

    answered_by: str = "source"
    finish_reasons: tuple[str, ...] = ()
    renderings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A row of a partition: where it came from, and its prompt or the reason it has none.

    ``turn``: the one turn of ``source_row`` that it is for, where several rows come of that; None where it has all turns.
    ``format`` that the source row was read as, and its columns that were not needed for it.
    """

    sample_id: str
    row: int
    source_row: int
    source_sha256: str
    content: Prompt | Dropped
    turn: int | None = None
    format: str = ""
    unread: tuple[str, ...] = ()
    origin: Origin = Origin()


@dataclass(frozen=True, slots=True)
class PromptCounts:
    """What a partition of prompts amounts to. ``source_rows``: of how many rows of the source it is."""

    prompts: int
    dropped: dict[str, int]
    source_rows: int


@dataclass(frozen=True, slots=True)
class PromptPartition:
    """A partition of prompts. ``version`` is its data version: it changes when a prompt in it may change.

    ``options``: the hash of the settings that it was made with, and of the answers where a model gave them.
    """

    key: str
    version: str
    source: Source
    template_sha256: str
    tokenizer_sha256: str
    rows: tuple[PromptRow, ...]
    options: str = ""

    @property
    def prompts(self) -> list[Prompt]:
        """The rows that can be extracted."""
        return [row.content for row in self.rows if isinstance(row.content, Prompt)]

    @property
    def dropped(self) -> dict[str, int]:
        """How many rows are dropped, by reason."""
        return dict(Counter(row.content.reason for row in self.rows if isinstance(row.content, Dropped)))

    @property
    def counts(self) -> PromptCounts:
        """What status says of it."""
        return PromptCounts(len(self.prompts), self.dropped, self.source_rows)

    @property
    def formats(self) -> dict[str, int]:
        """How many source rows are in which format; ``unknown`` where they are in none."""
        return dict(Counter({row.source_row: row.format or "unknown" for row in self.rows}.values()))

    @property
    def source_rows(self) -> int:
        """How many rows of the source these are of."""
        return len({row.source_row for row in self.rows})


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
            "turn": pa.array([row.turn for row in partition.rows], pa.int32()),
            "format": pa.array([row.format for row in partition.rows], pa.string()),
            "unread": pa.array([row.unread for row in partition.rows], pa.list_(pa.string())),
            "dropped": pa.array([d and d.reason for d in dropped], pa.string()),
            "detail": pa.array([d and d.detail for d in dropped], pa.string()),
            "token_sha256": pa.array([p and p.token_sha256 for p in kept], pa.string()),
            "input_ids": pa.array([None if p is None else p.input_ids for p in kept], pa.list_(pa.int32())),
            "loss_mask": pa.array([None if p is None else p.loss_mask for p in kept], pa.list_(pa.bool_())),
            "answered_by": pa.array([row.origin.answered_by for row in partition.rows], pa.string()),
            "finish_reasons": pa.array([row.origin.finish_reasons for row in partition.rows], pa.list_(pa.string())),
            "renderings": pa.array([row.origin.renderings for row in partition.rows], pa.list_(pa.string())),
        }
    ).replace_schema_metadata(
        {
            "version": partition.version,
            "options": partition.options,
            "source_name": partition.source.name,
            "source_path": str(partition.source.path),
            "source_format": partition.source.format,
            "template_sha256": partition.template_sha256,
            "tokenizer_sha256": partition.tokenizer_sha256,
            _COUNTS: json.dumps(dataclasses.asdict(partition.counts)),
            "coordinates": "loss_mask[i] is True where input_ids[i] is supervised; no shift",
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = table_path(folder, partition.key)
    replace_table(path, table)
    return path


def find_counts(folder: Path, key: str) -> PromptCounts | None:
    """The counts of a partition's prompts, if they were made: from its table's metadata, without the rows.

    Raises:
        PromptError: the table is damaged.
    """
    import pyarrow.parquet as pq

    path = table_path(folder, key)
    if not path.exists():
        return None
    with readable(path, *_TABLE):
        said = (pq.read_schema(path).metadata or {}).get(_COUNTS.encode())
        # An earlier version did not write them.
        return PromptCounts(**json.loads(said)) if said is not None else read_partition_table(folder, key).counts


def read_partition_table(folder: Path, key: str) -> PromptPartition:
    """The partition as it was written.

    Raises:
        PromptError: its prompts were never made, or the table is damaged.
    """
    path = table_path(folder, key)
    if not path.exists():
        raise PromptError(
            "the prompts of this partition were not made yet", where=key, expected=path, remedy="materialise prompts first"
        )
    with readable(path, *_TABLE):
        return _read_table(path, key)


def _read_table(path: Path, key: str) -> PromptPartition:
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    metadata = {name.decode(): value.decode() for name, value in (table.schema.metadata or {}).items()}
    lists = zip(_lists(table["input_ids"]), _lists(table["loss_mask"]), strict=True)
    entries = table.drop_columns(["input_ids", "loss_mask"]).to_pylist()
    rows = tuple(_read_row(number, entry, *each) for number, (entry, each) in enumerate(zip(entries, lists, strict=True)))
    source = Source(metadata["source_name"], Path(metadata["source_path"]), metadata.get("source_format", ""))
    return PromptPartition(
        key,
        metadata["version"],
        source,
        metadata["template_sha256"],
        metadata["tokenizer_sha256"],
        rows,
        metadata.get("options", ""),
    )


def table_path(folder: Path, key: str) -> Path:
    """Where a partition's table lies."""
    return folder / f"{key}.parquet"


def page_path(folder: Path, key: str) -> Path:
    """Where the page that shows some of its rows lies."""
    return folder / f"{key}.html"


def _lists(column: Any) -> list[np.ndarray]:
    """The lists of a column; a missing one is empty."""
    flat = column.combine_chunks()
    values, ends = flat.values.to_numpy(zero_copy_only=False), flat.offsets.to_numpy()
    return [values[start:end] for start, end in itertools.pairwise(ends)]


def _read_row(number: int, entry: dict[str, Any], input_ids: np.ndarray, loss_mask: np.ndarray) -> PromptRow:
    content: Prompt | Dropped
    if entry["dropped"] is not None:
        content = Dropped(entry["dropped"], entry["detail"])
    else:
        content = Prompt(number, input_ids.astype("<i4"), loss_mask.astype(bool), entry["token_sha256"])
    origin = Origin(entry["answered_by"], tuple(entry["finish_reasons"]), tuple(entry["renderings"]))
    return PromptRow(
        entry["sample_id"],
        number,
        entry["source_row"],
        entry["source_sha256"],
        content,
        entry.get("turn"),
        entry.get("format", ""),
        tuple(entry.get("unread", ())),
        origin,
    )
