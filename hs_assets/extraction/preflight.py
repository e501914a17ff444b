"""What extracting partitions would take of store and spool, and whether it fits, before anything is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, field

from hs_assets.config import Project
from hs_assets.errors import SpoolError
from hs_assets.extraction.plan import compare, free_bytes
from hs_assets.extraction.status import source_indexes
from hs_assets.samples.prompts import table_path
from hs_assets.samples.source_index import read_entries
from hs_assets.samples.sources import partition_key
from hs_assets.serving.launch import Target, spool_budget
from hs_assets.store.layout import StorePaths
from hs_assets.wire.dump import ITEM_BYTES

_BYTES_PER_TOKEN = 4


@dataclass(slots=True)
class Need:
    """What is missing of some partitions.

    ``estimated``: partitions whose prompts are not made yet; a token for every four bytes of their rows is counted for them.
    """

    partitions: int = 0
    estimated: int = 0
    samples: int = 0
    tokens: int = 0
    store_bytes: int = 0
    largest_dump_bytes: int = 0
    larger_than_spool: int = 0
    """Samples whose dump is larger than the whole budget of the spool."""
    store_free_bytes: int = 0
    spool_bytes: int | None = None
    """The budget of the spool; None where there is no room for one."""
    problems: list[str] = field(default_factory=list)
    """Why it cannot be done as it is; empty if it can."""

    def as_json(self) -> dict[str, object]:
        return dataclasses.asdict(self)


def predict(project: Project, target: Target, keys: Collection[str] | None = None) -> Need:
    """What extracting these partitions would take; all by default. Nothing is made, started or asked for."""
    need, paths = Need(), StorePaths(project.store_path)
    need.store_free_bytes = free_bytes(paths.root)
    try:
        need.spool_bytes = spool_budget(project)
    except SpoolError as error:
        need.problems.append(str(error))
    for name, index in source_indexes(project).items():
        for number, (start, end) in enumerate(zip(index.starts, (*index.starts[1:], index.rows), strict=True)):
            key = partition_key(name, number)
            if keys is not None and key not in keys:
                continue
            need.partitions += 1
            if table_path(project.home.prompts, key).exists():
                plan = compare(project, target, paths, key)
                need.store_bytes += plan.store_bytes
                _count(need, target, [len(prompt.input_ids) for prompt in plan.to_capture])
            else:
                need.estimated += 1
                entries = read_entries(project.home.prompts / "index", name, start, end)
                most = min(project.settings.prompts.max_tokens, target.facts.context_length)
                lengths = [min(entry.bytes // _BYTES_PER_TOKEN, most) for entry in entries if entry.duplicate_of is None]
                layout = target.layout
                states = len(layout.residual_ids) * layout.hidden_size * ITEM_BYTES[layout.dtype]
                need.store_bytes += sum(lengths) * states
                _count(need, target, lengths)
    if need.store_bytes > need.store_free_bytes:
        need.problems.append(
            f"the store's disk cannot hold it: {need.store_bytes:,} bytes are needed, {need.store_free_bytes:,} are free in "
            f"{project.store_path}; free some room, or set store.path"
        )
    if need.larger_than_spool:
        need.problems.append(
            f"the dumps of {need.larger_than_spool} samples are larger than the spool: the largest has "
            f"{need.largest_dump_bytes:,} bytes, the spool {need.spool_bytes:,}; raise server.spool_bytes (docker run "
            "--shm-size), or lower prompts.max_tokens"
        )
    return need


def _count(need: Need, target: Target, lengths: list[int]) -> None:
    need.samples += len(lengths)
    need.tokens += sum(lengths)
    sizes = [dataclasses.replace(target.layout, tokens=length).file_bytes for length in lengths]
    need.largest_dump_bytes = max([need.largest_dump_bytes, *sizes])
    if need.spool_bytes is not None:
        need.larger_than_spool += sum(size > need.spool_bytes for size in sizes)
