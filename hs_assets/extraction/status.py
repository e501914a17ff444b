"""The ledger of every partition, from the files alone: no Dagster, no server."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hs_assets.config import Project
from hs_assets.errors import PromptError, StoreError
from hs_assets.samples.model import read_model_facts
from hs_assets.samples.prompts import find_counts
from hs_assets.samples.source_index import SourceIndex
from hs_assets.samples.sources import Partitioning, Source, partition_key, refresh
from hs_assets.serving.launch import DTYPES
from hs_assets.store import open_store
from hs_assets.store.layout import StorePaths
from hs_assets.store.summary import find_summary
from hs_assets.wire.dump import DumpLayout
from hs_assets.wire.layers import LayerSet

_NAMED = 5

COMPLETE, INCOMPLETE, STALE, PREPARED, NEW = "complete", "incomplete", "stale", "prepared", "new"
DAMAGED, NOT_CONFIGURED = "damaged", "not configured"
"""STALE: stored in another layer set than the one that is looked at. DAMAGED: its manifest or its prompts cannot be read.
NOT_CONFIGURED: stored, and no configured source has such a partition."""


def some_of(partitions: Sequence[str]) -> str:
    """The first few of some partitions by name, and how many more there are."""
    more = f" and {len(partitions) - _NAMED} more" if len(partitions) > _NAMED else ""
    return ", ".join(partitions[:_NAMED]) + more


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """What became of a partition's rows: ``rows == stored + dropped + failed + pending``.

    Pending before extraction only, or where nobody knows: all rows of a damaged partition are.
    """

    partition: str
    layer_set: str
    state: str
    rows: int
    stored: int
    dropped: dict[str, int]
    failed: dict[str, int]
    pending: int
    tokens: int
    bytes: int
    """Of the stored states."""
    state_fingerprint: str | None
    problem: str | None = None
    """Why it cannot be read, where it is damaged."""

    def as_json(self) -> dict[str, object]:
        return {
            "partition": self.partition,
            "layer_set": self.layer_set,
            "state": self.state,
            "in": self.rows,
            "stored": self.stored,
            "dropped": self.dropped,
            "failed": self.failed,
            "pending": self.pending,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "state_fingerprint": self.state_fingerprint,
            "problem": self.problem,
        }


def source_indexes(project: Project) -> dict[str, SourceIndex]:
    """The index of every source, brought up to date."""
    prompts = project.settings.prompts
    partitioning = Partitioning(prompts.rows_per_partition, prompts.tokens_per_partition)
    return refresh(project.home.prompts / "index", sources(project), partitioning)


def sources(project: Project) -> list[Source]:
    """The configured sources."""
    return [Source(source.name, source.path, source.format) for source in project.settings.prompts.sources]


def source_of(project: Project, key: str) -> Source:
    """The source that a partition is of.

    Raises:
        PromptError: it is not configured any more.
    """
    named = {source.name: source for source in sources(project)}
    if (name := key.rpartition("-")[0]) not in named:
        problem = "a partition of a source that is not configured"
        remedy = "name the source again in prompts.sources; what is stored of it stays readable"
        raise PromptError(problem, where=key, expected=sorted(named), got=name, remedy=remedy)
    return named[name]


def status(project: Project, layer_set_id: str | None = None, keys: Collection[str] | None = None) -> list[PartitionStatus]:
    """The status of every partition, or of those of `keys`, in one layer set (by default the configured one).

    Partitions that are stored and that no configured source has come last; one that is not stored in that layer set is shown
    in the first one that has it.

    Raises:
        StoreError: the layer set is neither the configured one nor in the store.
    """
    facts = read_model_facts(project.settings.model.path)
    store = open_store(project.store_path) if project.store_path.exists() else None
    paths = store.paths if store else None
    configured = LayerSet.choose(project.settings.layers, facts.num_layers)
    known = {configured.id, *(store.layer_sets() if store else ())}
    if layer_set_id not in (None, *known):
        raise StoreError(
            "no such layer set",
            where=project.store_path,
            expected=" or ".join(sorted(known)),
            got=layer_set_id,
            remedy="name one of these, or leave --layer-set out for the configured one",
        )
    chosen = LayerSet.parse(layer_set_id) if layer_set_id else configured
    others, dtype = sorted(known - {chosen.id}), DTYPES[project.settings.server.dtype]
    shown = [chosen, *map(LayerSet.parse, others)]
    view = _View(project, paths, {one.id: DumpLayout(1, one.residual_ids, facts.hidden_size, dtype).row_bytes for one in shown})
    rows = {
        partition_key(name, number): end - start
        for name, index in source_indexes(project).items()
        for number, (start, end) in enumerate(zip(index.starts, (*index.starts[1:], index.rows), strict=True))
    }
    found = [view.configured(key, chosen.id, others, count) for key, count in rows.items() if keys is None or key in keys]
    stored = _stored_in(paths, [chosen.id, *others]) if paths else {}
    extra = sorted(key for key in stored if key not in rows and (keys is None or key in keys))
    return found + [view.unconfigured(key, stored[key]) for key in extra]


def _stored_in(paths: StorePaths, layer_sets: Sequence[str]) -> dict[str, str]:
    """Partition → the first of some layer sets that has a manifest of it."""
    stored: dict[str, str] = {}
    for layer_set in layer_sets:
        for path in paths.manifests(layer_set):
            stored.setdefault(path.stem, layer_set)
    return stored


@dataclass(frozen=True, slots=True)
class _View:
    """Looks partitions up, one by one; what cannot be read of one is its status."""

    project: Project
    paths: StorePaths | None
    row_bytes: dict[str, int]
    """Layer set → bytes of the states of a token."""

    def configured(self, key: str, layer_set: str, others: Sequence[str], rows: int) -> PartitionStatus:
        """A partition that has `rows` rows in its source now."""
        try:
            return self._stored(key, layer_set, rows) or self._not_stored(key, layer_set, others, rows)
        except (StoreError, PromptError) as error:
            return PartitionStatus(key, layer_set, DAMAGED, rows, 0, {}, {}, rows, 0, 0, None, str(error))

    def unconfigured(self, key: str, layer_set: str) -> PartitionStatus:
        """A partition that no configured source has."""
        try:
            found = self._stored(key, layer_set, 0)
        except StoreError as error:
            return PartitionStatus(key, layer_set, DAMAGED, 0, 0, {}, {}, 0, 0, 0, None, str(error))
        nothing = PartitionStatus(key, layer_set, NOT_CONFIGURED, 0, 0, {}, {}, 0, 0, 0, None)  # it was removed meanwhile
        return dataclasses.replace(found, state=NOT_CONFIGURED) if found else nothing

    def _stored(self, key: str, layer_set: str, rows: int) -> PartitionStatus | None:
        found = find_summary(self.paths, layer_set, key) if self.paths else None
        if found is None:
            return None
        ledger = found.ledger
        pending = max(0, rows - found.source_rows)  # rows that were appended since
        return PartitionStatus(
            partition=key,
            layer_set=layer_set,
            state=INCOMPLETE if ledger.failed or pending else COMPLETE,
            rows=ledger.rows + pending,
            stored=ledger.stored,
            dropped=ledger.dropped,
            failed=ledger.failed,
            pending=pending,
            tokens=found.tokens,
            bytes=found.tokens * self.row_bytes[layer_set],
            state_fingerprint=found.state_fingerprint,
        )

    def _not_stored(self, key: str, layer_set: str, others: Sequence[str], rows: int) -> PartitionStatus:
        made = find_counts(self.project.home.prompts, key)
        if made is None:
            return PartitionStatus(key, layer_set, NEW, rows, 0, {}, {}, rows, 0, 0, None)
        pending = made.prompts + max(0, rows - made.source_rows)
        total = pending + sum(made.dropped.values())
        stale = self.paths is not None and any(self.paths.manifest(other, key).exists() for other in others)
        return PartitionStatus(key, layer_set, STALE if stale else PREPARED, total, 0, made.dropped, {}, pending, 0, 0, None)
