"""All that is known of one row: its tokens and mask, where it came from, and what is stored of it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hs_assets.errors import HsAssetsError, PromptError
from hs_assets.samples.conversations import Dropped
from hs_assets.samples.prompts import Prompt, PromptPartition, PromptRow, read_partition_table, table_path
from hs_assets.samples.readable import Piece, pieces
from hs_assets.samples.sources import read_partition
from hs_assets.samples.tokenizer import ChatTokenizer
from hs_assets.store.manifest import UnstoredRow, manifests_of
from hs_assets.store.reader import Lineage, Store
from hs_assets.wire.rid import is_partition_key

_NEAREST = 3
_RAW_BYTES = 600


class UnknownSampleError(PromptError):
    """There is no such sample."""


@dataclass(frozen=True, slots=True)
class Norms:
    """L2 norms of the states of one residual id, over all tokens of a sample."""

    mean: float
    smallest: float
    largest: float


@dataclass(frozen=True, slots=True)
class ShownRow:
    """A row of a partition. ``pieces`` are empty and ``raw`` begins the source row where it was dropped.

    ``norms``: residual id → norms of its states, and ``lineage``, once extracted. ``unstored``: why it has no states though
    its partition was extracted. ``notes`` say what no longer fits together.
    """

    partition: PromptPartition
    row: PromptRow
    pieces: tuple[Piece, ...]
    raw: str | None
    norms: dict[int, Norms]
    lineage: Lineage | None
    unstored: UnstoredRow | None
    notes: tuple[str, ...]

    @property
    def dropped(self) -> Dropped | None:
        return self.row.content if isinstance(self.row.content, Dropped) else None

    @property
    def tokens(self) -> int:
        return len(self.row.content.input_ids) if isinstance(self.row.content, Prompt) else 0

    @property
    def supervised(self) -> int:
        """Tokens that are supervised."""
        return int(self.row.content.loss_mask.sum()) if isinstance(self.row.content, Prompt) else 0

    def as_json(self) -> dict[str, object]:
        made, row, dropped = self.partition, self.row, self.dropped
        return {
            "sample_id": row.sample_id,
            "source": {
                "path": str(made.source.path),
                "row": row.source_row,
                "sha256": row.source_sha256,
                "format": row.format,
                "turn": row.turn,
            },
            "prompts": {
                "partition": made.key,
                "version": made.version,
                "template_sha256": made.template_sha256,
                "tokenizer_sha256": made.tokenizer_sha256,
            },
            "dropped": dropped and {"reason": dropped.reason, "detail": dropped.detail},
            "raw": self.raw,
            "answers": {
                "by": row.origin.answered_by,
                "finish_reasons": row.origin.finish_reasons,
                "renderings": row.origin.renderings,
            },
            "tokens": self.tokens,
            "supervised": self.supervised,
            "pieces": [
                {"text": one.text, "ids": one.ids, "supervised": one.supervised, "special": one.special} for one in self.pieces
            ],
            "states": {
                residual_id: {"mean": norms.mean, "min": norms.smallest, "max": norms.largest}
                for residual_id, norms in self.norms.items()
            },
            "lineage": self.lineage
            and {
                "layer_set": self.lineage.layer_set,
                "state_fingerprint": self.lineage.state_fingerprint,
                "generations": [part.generation for part in self.lineage.parts],
                "servers": sorted({part.server for part in self.lineage.parts}),
                "run_ids": sorted({part.run_id for part in self.lineage.parts}),
            },
            "unstored": self.unstored
            and {"outcome": self.unstored.outcome, "reason": self.unstored.reason, "detail": self.unstored.detail},
            "notes": list(self.notes),
        }


def find_row(folder: Path, sample_id: str) -> tuple[PromptPartition, PromptRow]:
    """A row in the tables of `folder`, by its id.

    Raises:
        UnknownSampleError: there is none; names the nearest ids.
    """
    key = sample_id.rpartition("/")[0]
    if is_partition_key(key) and table_path(folder, key).exists():
        partition = read_partition_table(folder, key)
        found = next((row for row in partition.rows if row.sample_id == sample_id), None)
        if found is not None:
            return partition, found
        nearest = difflib.get_close_matches(sample_id, [row.sample_id for row in partition.rows], _NEAREST, cutoff=0)
    else:
        keys = [path.stem for path in sorted(folder.glob("*.parquet"))]
        closest = difflib.get_close_matches(key or sample_id, keys, _NEAREST, cutoff=0)
        nearest = [row.sample_id for one in closest for row in read_partition_table(folder, one).rows[:1]]
    raise UnknownSampleError(
        "no such sample",
        where=folder,
        expected=f"one such as {', '.join(nearest)}" if nearest else "prompts, and none were made yet",
        got=sample_id,
        remedy="an id is <partition>/<row, 4 digits>" if nearest else "materialise prompts first",
    )


def show_row(partition: PromptPartition, row: PromptRow, tokenizer: ChatTokenizer, index: Path, store: Store | None) -> ShownRow:
    """Put together what is known of a row.

    Arguments:
        index: folder of the index of the sources.
        store: None where nothing was extracted yet.
    """
    notes = []
    for what, then, now in (
        ("template", partition.template_sha256, tokenizer.template_sha256),
        ("tokenizer", partition.tokenizer_sha256, tokenizer.tokenizer_sha256),
    ):
        if then != now:
            notes.append(f"the {what} changed since the prompts were made: {then[:12]} then, {now[:12]} now")
    raw: str | None = None
    shown: tuple[Piece, ...] = ()
    if isinstance(row.content, Prompt):
        shown = tuple(pieces(row.content, tokenizer))
    else:
        raw, note = _raw(partition, row, index)
        notes += [note] if note else []
    norms: dict[int, Norms] = {}
    lineage = unstored = None
    manifests = manifests_of(store.paths, partition.key) if store else []
    stored = next((m for m in manifests if any(s.sample_id == row.sample_id for s in m.samples)), None)
    if store is not None and stored is not None:
        sample = store.sample(*store.find(row.sample_id))
        lineage, norms = sample.lineage, {i: _norms(states) for i, states in sample.states.items()}
        if isinstance(row.content, Dropped) or row.content.token_sha256 != lineage.token_sha256:
            notes.append("the states are those of an earlier prompt: materialise eagle3_samples")
    else:
        unstored = next((u for m in manifests for u in m.unstored if u.sample_id == row.sample_id), None)
    return ShownRow(partition, row, shown, raw, norms, lineage, unstored, tuple(notes))


def _raw(partition: PromptPartition, row: PromptRow, index: Path) -> tuple[str | None, str | None]:
    """The beginning of a source row as text; else why it cannot be read."""
    try:
        rows = read_partition(index, partition.source, partition.key)
    except (HsAssetsError, OSError) as error:
        return None, f"the source row cannot be read: {error.problem if isinstance(error, HsAssetsError) else error}"
    raw = next((one.raw for one in rows if one.number == row.source_row), b"")
    if isinstance(raw, Dropped):
        return None, f"the source row cannot be read: {raw.detail}"
    text = raw[:_RAW_BYTES].decode("utf-8", "backslashreplace")
    return (text + f" … {len(raw) - _RAW_BYTES:,} more bytes" if len(raw) > _RAW_BYTES else text), None


def _norms(states: np.ndarray) -> Norms:
    lengths = np.linalg.norm(states.astype(np.float32), axis=1)
    return Norms(float(lengths.mean()), float(lengths.min()), float(lengths.max()))
