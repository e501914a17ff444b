"""Lineage both ways: a record for every row of every partition, and those of a source row, a run or a state spec."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from hs_assets.store.manifest import Manifest, StoredSample, UnstoredRow
from hs_assets.store.reader import Store
from hs_assets.store.removed import removed_manifests

REMOVED = "removed"
"""The outcome of a row whose partition was removed on purpose; the other fields are as they were."""


@dataclass(frozen=True, slots=True)
class LineageRow:
    """A row of a source in a layer set: stored, dropped, failed or removed.

    What a row without states cannot have is None or empty. Lists go together: entry i is of the i-th capture that made some of
    its states. ``captured_at`` in seconds since 1970.
    """

    sample_id: str
    layer_set: str
    partition: str
    outcome: str
    reason: str | None
    detail: str | None
    source_name: str
    source_path: str
    source_row: int
    source_sha256: str
    prompts_version: str
    template_sha256: str
    tokenizer_sha256: str
    tokens: int | None
    supervised_tokens: int | None
    token_sha256: str | None
    state_fingerprint: str
    state_spec: str
    residual_ids: list[list[int]]
    generations: list[str]
    offsets: list[int]
    dump_crc32: list[int]
    servers: list[str]
    run_ids: list[str]
    captured_at: list[float]

    def as_dict(self) -> dict[str, Any]:
        """Its fields by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class Question:
    """Which rows are asked for; what is None is not asked. ``spec`` is a state fingerprint or the beginning of one."""

    sample_id: str | None = None
    layer_set: str | None = None
    partition: str | None = None
    source: str | None = None
    """Name or path of a source."""
    source_row: int | None = None
    run_id: str | None = None
    spec: str | None = None

    def fits(self, row: LineageRow) -> bool:
        """Whether a row is an answer."""
        return (
            self.sample_id in (None, row.sample_id)
            and self.partition in (None, row.partition)
            and self.source in (None, row.source_name, row.source_path)
            and self.source_row in (None, row.source_row)
            and (self.run_id is None or self.run_id in row.run_ids)
            and row.state_fingerprint.startswith(self.spec or "")
        )


def lineage_rows(store: Store, question: Question | None = None) -> Iterator[LineageRow]:
    """All rows that a question asks for, by layer set, partition and place in the partition; then those of removed partitions.

    A removed partition is no answer where it is stored in that layer set again; of several removals the last one is.

    Raises:
        StoreError: a manifest cannot be read, or there is no such layer set.
    """
    question = question or Question()
    removed = {
        (one.manifest.layer_set, one.manifest.partition): one
        for one in removed_manifests(store.paths)
        if question.layer_set in (None, one.manifest.layer_set)
    }
    for layer_set in store.layer_sets() if question.layer_set is None else [question.layer_set]:
        for manifest in store.manifests(layer_set):
            removed.pop((manifest.layer_set, manifest.partition), None)
            yield from filter(question.fits, lineage_of(manifest))
    for one in removed.values():
        yield from filter(question.fits, map(partial(_as_removed, one.at), lineage_of(one.manifest)))


def _as_removed(at: float, row: LineageRow) -> LineageRow:
    """What becomes of a row as its partition is removed, `at` seconds since 1970."""
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
    before = row.outcome if row.reason is None else f"{row.outcome}, {row.reason}: {row.detail}"
    return replace(row, outcome=REMOVED, reason=REMOVED, detail=f"with its partition, {when}; before: {before}")


def lineage_of(manifest: Manifest) -> Iterator[LineageRow]:
    """A record for each row of a partition, in their order."""
    rows: list[StoredSample | UnstoredRow] = [*manifest.samples, *manifest.unstored]
    for row in sorted(rows, key=lambda row: row.sample_id):
        yield _row(manifest, row)


def _row(manifest: Manifest, row: StoredSample | UnstoredRow) -> LineageRow:
    stored = row if isinstance(row, StoredSample) else None
    lost = row if isinstance(row, UnstoredRow) else None
    parts, prompts = stored.parts if stored else (), manifest.prompts
    return LineageRow(
        sample_id=row.sample_id,
        layer_set=manifest.layer_set,
        partition=manifest.partition,
        outcome=lost.outcome if lost else "stored",
        reason=lost.reason if lost else None,
        detail=lost.detail if lost else None,
        source_name=prompts.source_name,
        source_path=prompts.source_path,
        source_row=row.source_row,
        source_sha256=row.source_sha256,
        prompts_version=prompts.version,
        template_sha256=prompts.template_sha256,
        tokenizer_sha256=prompts.tokenizer_sha256,
        tokens=stored.tokens if stored else None,
        supervised_tokens=stored.supervised_tokens if stored else None,
        token_sha256=stored.token_sha256 if stored else None,
        state_fingerprint=manifest.state_fingerprint,
        state_spec=json.dumps(manifest.state_spec, sort_keys=True),
        residual_ids=[list(part.residual_ids) for part in parts],
        generations=[part.generation for part in parts],
        offsets=[part.offset for part in parts],
        dump_crc32=[part.dump_crc32 for part in parts],
        servers=[part.server for part in parts],
        run_ids=[part.run_id for part in parts],
        captured_at=[part.captured_at for part in parts],
    )
