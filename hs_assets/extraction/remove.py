"""Partitions that are not wanted any more, removed: what is stored of them, and if asked for their prompts and answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from hs_assets.config import Project
from hs_assets.errors import StoreError
from hs_assets.samples.prompts import page_path, table_path
from hs_assets.samples.responses import responses_path
from hs_assets.store.disposal import Garbage, Kept, Kind, dispose, partition_lock, size_of
from hs_assets.store.gc import remove_partition, stored_partitions
from hs_assets.store.layout import StorePaths


def choose_partitions(project: Project, names: Sequence[str], *, prompts: bool) -> list[str]:
    """The partitions that some keys and sources name, each once.

    Arguments:
        prompts: those of which there are prompts or answers too, not only those of which something is stored.

    Raises:
        StoreError: a name is that of nothing, or of both a partition and a source.
    """
    keys = {*stored_partitions(StorePaths(project.store_path))}
    if prompts:
        folders = project.home.prompts, project.home.responses
        keys |= {path.stem for folder in folders for path in folder.glob("*.parquet")}
        keys |= {path.stem for path in project.home.responses.glob("*.jsonl")}
    chosen = dict[str, None]()
    for name in names:
        of_source = sorted(key for key in keys if key.rpartition("-")[0] == name)
        if name in keys and of_source:
            problem, remedy = "a partition and a source have the same name", "name the partitions of the source one by one"
            raise StoreError(problem, where=name, got=[name, *of_source][:5], remedy=remedy)
        if name not in keys and not of_source:
            raise StoreError(
                "nothing is stored of such a partition or source",
                where=project.store_path,
                expected=f"one of the sources {sorted({key.rpartition('-')[0] for key in keys})}, or a partition of one",
                got=name,
                remedy="hs-assets status lists the partitions" + ("" if prompts else "; --prompts removes prompts alone too"),
            )
        chosen |= dict.fromkeys(of_source or [name])
    return list(chosen)


def remove(
    project: Project, partitions: Sequence[str], *, prompts: bool, min_age: float, delete: bool
) -> Iterator[Garbage | Kept]:
    """Find all that there is of partitions, and with `delete` remove it; nothing of one that a run is at.

    Arguments:
        prompts: their prompts and the model's answers too; else those stay, and so can be extracted again.
        min_age: seconds for which data that no manifest ever named is kept.
    """
    paths, locks = StorePaths(project.store_path), project.home.locks
    for key in partitions:
        with partition_lock(locks / f"{key}.lock") as ours, partition_lock(locks / f"{key}.responses.lock") as answers_ours:
            if not (ours and answers_ours):
                yield Kept(key, paths.root, "a run is at work on it")
                continue
            yield from remove_partition(paths, key, min_age=min_age, delete=delete)
            for kind, path in _tables(project, key) if prompts else ():
                yield (found := Garbage(kind, key, path, "asked for with --prompts", size_of(path)))
                if delete:
                    dispose(found)


def _tables(project: Project, key: str) -> list[tuple[Kind, Path]]:
    """The files of a partition outside the store."""
    folder, answers = project.home.prompts, project.home.responses
    files: list[tuple[Kind, Path]] = [
        ("prompts", table_path(folder, key)),
        ("prompts", page_path(folder, key)),
        ("responses", responses_path(answers, key)),
        ("responses", answers / f"{key}.jsonl"),
    ]
    return [(kind, path) for kind, path in files if path.exists()]
