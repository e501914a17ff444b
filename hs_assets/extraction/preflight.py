"""What extracting partitions would take of store and spool, and whether it fits, before anything is asked for."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from hs_assets.config import Project
from hs_assets.errors import PromptError, SpoolError, StoreError
from hs_assets.extraction.plan import compare, free_bytes
from hs_assets.extraction.status import some_of, source_indexes
from hs_assets.samples.prompts import table_path
from hs_assets.samples.source_index import Entry, read_entries
from hs_assets.samples.sources import partition_key
from hs_assets.serving.admission import bytes_of
from hs_assets.serving.launch import Target, spool_budget
from hs_assets.serving.spec import spec_differences
from hs_assets.store.layout import StorePaths
from hs_assets.wire.dump import ITEM_BYTES
from hs_assets.wire.rid import parse_rid
from hs_assets.wire.spool import Spool

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
    dump_bytes: int = 0
    """Of all dumps together; the spool has to hold them only where `kept`."""
    kept: bool = False
    """The dumps stay in the spool (`raw_dumps` alone)."""
    larger_than_spool: int = 0
    """Samples whose dump is larger than the whole budget of the spool."""
    store_free_bytes: int = 0
    spool_bytes: int | None = None
    """The budget of the spool; None where there is no room for one."""
    spool_left_bytes: int = 0
    """What of it is not taken by dumps of other partitions."""
    damaged: dict[str, str] = field(default_factory=dict)
    """Partitions whose manifests or prompts cannot be read, and why: nothing is counted for them."""
    problems: list[str] = field(default_factory=list)
    """Why it cannot be done as it is; empty if it can."""
    warnings: list[str] = field(default_factory=list)
    """What stands in no way, and should be known before."""

    def as_json(self) -> dict[str, object]:
        return dataclasses.asdict(self)


def predict(project: Project, target: Target, keys: Collection[str] | None = None, *, kept: bool = False) -> Need:
    """What extracting these partitions would take; all by default. Nothing is made, started or asked for.

    Arguments:
        kept: the dumps are to stay in the spool, and nothing goes into the store.
    """
    need, paths, sizes, specs = Need(kept=kept), StorePaths(project.store_path), list[int](), Counter[str]()
    changed = list[str]()
    for name, index in source_indexes(project).items():
        for number, (start, end) in enumerate(zip(index.starts, (*index.starts[1:], index.rows), strict=True)):
            key = partition_key(name, number)
            if keys is not None and key not in keys:
                continue
            need.partitions += 1
            entries = read_entries(project.home.prompts / "index", name, start, end)
            if table_path(project.home.prompts, key).exists():
                try:
                    plan = compare(project, target, paths, key)
                except (StoreError, PromptError) as error:
                    need.damaged[key] = str(error)
                    continue
                need.store_bytes += plan.store_bytes
                if {row.source_row: row.source_sha256 for row in plan.prompts.rows} != _hashes(entries, start):
                    changed.append(key)
                specs.update([_what_differs(target, plan.other_spec)] if plan.other_spec else ())
                lengths = [len(prompt.input_ids) for prompt in plan.to_capture]
            else:
                need.estimated += 1
                most = min(project.settings.prompts.max_tokens, target.facts.max_prompt_tokens)
                lengths = [min(entry.bytes // _BYTES_PER_TOKEN, most) for entry in entries if entry.duplicate_of is None]
                layout = target.layout
                need.store_bytes += sum(lengths) * len(layout.residual_ids) * layout.hidden_size * ITEM_BYTES[layout.dtype]
            need.samples += len(lengths)
            need.tokens += sum(lengths)
            sizes += [dataclasses.replace(target.layout, tokens=length).file_bytes for length in lengths]
    if changed:
        which = some_of(changed)
        need.warnings.append(f"the source has other rows now than the prompts were made of: materialise prompts of {which}")
    need.warnings += [
        f"{count} partitions are stored under another state spec, so all their states are asked for again: {differs}"
        for differs, count in specs.items()
    ]
    need.dump_bytes, need.largest_dump_bytes = sum(sizes), max(sizes, default=0)
    judge(project, need, keys)
    need.larger_than_spool = sum(size > need.spool_bytes for size in sizes) if need.spool_bytes is not None else 0
    return need


def _hashes(entries: Sequence[Entry], first: int) -> dict[int, str]:
    return {number: entry.sha256 for number, entry in enumerate(entries, first)}


def _what_differs(target: Target, stored: dict[str, Any]) -> str:
    return "; ".join(f"{one.name}: {one.expected} there, {one.got} now" for one in spec_differences(stored, target.spec))


def judge(project: Project, need: Need, keys: Collection[str] | None = None) -> None:
    """Compare what is needed with the room that there is now, and say in `need.problems` what does not fit."""
    need.problems.clear()
    need.store_free_bytes, need.spool_bytes = free_bytes(project.store_path), None
    try:
        need.spool_bytes = spool_budget(project)
    except SpoolError as error:
        need.problems.append(str(error))
    if not need.kept and need.store_bytes > need.store_free_bytes:
        need.problems.append(
            f"the store's disk cannot hold it: {need.store_bytes:,} bytes are needed, {need.store_free_bytes:,} are free in "
            f"{project.store_path}; free some room, or set store.path"
        )
    if need.spool_bytes is None:
        return
    need.spool_left_bytes = need.spool_bytes - _bytes_of_others(project, keys)
    if need.largest_dump_bytes > need.spool_bytes:
        need.problems.append(
            f"dumps are larger than the spool: the largest has {need.largest_dump_bytes:,} bytes, the spool "
            f"{need.spool_bytes:,}; raise server.spool_bytes (docker run --shm-size), or lower prompts.max_tokens"
        )
    elif need.kept and need.dump_bytes > need.spool_left_bytes:
        need.problems.append(
            f"the dumps cannot lie in the spool together: they have {need.dump_bytes:,} bytes, of the spool's "
            f"{need.spool_bytes:,} there are {need.spool_left_bytes:,} left; materialise raw_dumps and eagle3_samples "
            "together, which streams them, or raise server.spool_bytes"
        )


def _bytes_of_others(project: Project, keys: Collection[str] | None) -> int:
    """What dumps of other partitions than these take of the spool."""
    spool = Spool(project.spool_path)
    rids = [parse_rid(text) for text in spool.rids()] if spool.dumps.is_dir() else []
    others = [str(rid) for rid in rids if rid is not None and keys is not None and rid.partition not in keys]
    return sum(bytes_of(spool.dump(rid)) for rid in others)
