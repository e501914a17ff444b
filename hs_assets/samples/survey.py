"""What the prompts of one or many partitions are like: formats, drops, lengths, and how much is supervised."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hs_assets.samples.conversations import Dropped
from hs_assets.samples.filters import PromptLimits
from hs_assets.samples.prepare import make_partition
from hs_assets.samples.prompts import PromptPartition
from hs_assets.samples.sources import Partitioning, Source, partition_keys, read_partition, refresh
from hs_assets.samples.tokenizer import ChatTokenizer

QUANTILES = {"min": 0.0, "25%": 0.25, "50%": 0.5, "75%": 0.75, "95%": 0.95, "99%": 0.99, "max": 1.0}


@dataclass(slots=True)
class Drops:
    """How many rows a reason dropped, and the first of them: its row in the source, and the detail."""

    rows: int
    source_row: int
    detail: str


@dataclass(slots=True)
class Survey:
    """Counts over partitions. ``rows`` are training rows: prompts and dropped ones; a source row may give several."""

    source_rows: int = 0
    rows: int = 0
    supervised_tokens: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    """Source rows by format."""
    unread: Counter[str] = field(default_factory=Counter)
    """Training rows by a column that was not needed."""
    dropped: dict[str, Drops] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    """Tokens of each prompt."""
    dropped_shares: dict[str, float] = field(default_factory=dict)
    """Partition → the share of its rows that is dropped."""

    def add(self, partition: PromptPartition) -> None:
        """Count another partition."""
        self.source_rows += partition.source_rows
        self.rows += len(partition.rows)
        self.formats.update(partition.formats)
        for row in partition.rows:
            self.unread.update(row.unread)
            if not isinstance(row.content, Dropped):
                self.lengths.append(len(row.content.input_ids))
                self.supervised_tokens += int(row.content.loss_mask.sum())
            elif row.content.reason in self.dropped:
                self.dropped[row.content.reason].rows += 1
            else:
                self.dropped[row.content.reason] = Drops(1, row.source_row, row.content.detail)
        self.dropped_shares[partition.key] = sum(partition.dropped.values()) / max(1, len(partition.rows))

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def supervised_share(self) -> float:
        """The share of all tokens of prompts that is supervised."""
        return self.supervised_tokens / max(1, self.tokens)

    @property
    def length_quantiles(self) -> dict[str, int]:
        """Tokens of a prompt; each is the length of one; empty where there are none."""
        lengths = np.array(self.lengths)
        return {name: int(np.quantile(lengths, q, method="nearest")) for name, q in QUANTILES.items()} if len(lengths) else {}

    def too_many_dropped(self, max_dropped_share: float) -> list[str]:
        """The partitions that would fail."""
        return [key for key, share in self.dropped_shares.items() if share > max_dropped_share]


def survey_source(
    source: Source, tokenizer: ChatTokenizer, limits: PromptLimits, partitioning: Partitioning, max_row_bytes: int
) -> Iterator[tuple[Survey, int]]:
    """The survey after each partition of a source, and the source's rows; it is made as prompts are, and not kept.

    Raises:
        PromptError: the source cannot be read.
    """
    survey = Survey()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        indexes = refresh(folder, [source], partitioning)
        rows = indexes[source.name].rows
        yield survey, rows
        for key in partition_keys(indexes):
            survey.add(make_partition(key, source, read_partition(folder, source, key, max_row_bytes), tokenizer, limits))
            yield survey, rows
