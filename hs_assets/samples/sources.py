"""A source → rows and partitions, kept in an index so that loading the definitions reads no source again.

A row is known by its number over all files of its source. A partition is a run of rows; appending rows renames none. Exact
duplicates (equal bytes; of tables, equal canonical JSON) are decided here, over all sources: the first that was indexed
wins, and stays it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from hs_assets.errors import PromptError
from hs_assets.samples.conversations import Dropped
from hs_assets.samples.files import data_files, find_rows, read_rows
from hs_assets.samples.source_index import (
    INDEX_VERSION,
    Entry,
    FirstRows,
    SourceIndex,
    read_entries,
    read_hashes,
    read_index,
    write_index,
    writing_entries,
)

MAX_ROW_BYTES = 64 << 20
_BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Source:
    """A file, or a folder of files, and the name its partition keys begin with; ``format`` is empty where rows tell it."""

    name: str
    path: Path
    format: str = ""


@dataclass(frozen=True, slots=True)
class Partitioning:
    """How rows become partitions: at most ``rows`` of them, or fewer by a budget of tokens (four bytes each)."""

    rows: int
    tokens: int


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A row where it stands: its JSON, or why it is not read.

    ``duplicate_of`` names the row ``<source>:<number>`` that it repeats byte for byte.
    """

    number: int
    raw: bytes | Dropped
    sha256: str
    duplicate_of: str | None


def partition_key(source: str, number: int) -> str:
    """``<source>-<number, 5 digits>``"""
    return f"{source}-{number:05d}"


def refresh(folder: Path, sources: Sequence[Source], partitioning: Partitioning) -> dict[str, SourceIndex]:
    """Bring the index of every source up to date; files that did not change since are not read.

    Raises:
        PromptError: a source cannot be read, or the index was made with another partitioning.
    """
    folder.mkdir(parents=True, exist_ok=True)
    indexes, rebuilt = {}, set()
    for source in sources:
        index = _current(folder, source, partitioning)
        if index is None:
            rebuilt.add(source.name)
            index = _build(folder, source, partitioning, sources)
        indexes[source.name] = index
    for source in sources:  # a row that repeated one which is gone is not a repetition any more
        named = set(indexes[source.name].repeats)
        if named and (named & rebuilt or not named <= indexes.keys()) and not _repeats_hold(folder, source, sources):
            indexes[source.name] = _build(folder, source, partitioning, sources)
    return indexes


def partition_keys(indexes: dict[str, SourceIndex]) -> list[str]:
    """All partition keys, in order."""
    return [partition_key(name, number) for name, index in indexes.items() for number in range(len(index.starts))]


def read_partition(folder: Path, source: Source, key: str, max_row_bytes: int = MAX_ROW_BYTES) -> list[SourceRow]:
    """The rows of a partition, read from the source's files at the places that the index names.

    A row of more than `max_row_bytes` comes as `row_too_large`.

    Raises:
        PromptError: there is no such partition, or a file changed since the index was made.
    """
    index = read_index(folder, source.name)
    numbers = {partition_key(source.name, number): number for number in range(len(index.starts))} if index else {}
    if index is None or key not in numbers:
        remedy = "reload the definitions, which reads the sources again"
        raise PromptError("no such partition in the index", where=key, expected=f"a partition of {source.name}", remedy=remedy)
    start, end = index.starts[numbers[key]], (*index.starts[1:], index.rows)[numbers[key]]
    entries = enumerate(read_entries(folder, source.name, start, end), start)
    rows = []
    try:
        for file, group in groupby(entries, lambda entry: entry[1].file):
            found = list(group)
            places = [(entry.offset, entry.bytes, entry.sha256, False) for _, entry in found]
            read = list(read_rows(index.files[file], places, max_row_bytes))
            for number, (line, entry) in enumerate(found):
                if number >= len(read) or read[number][1] != entry.sha256:
                    raise _changed(source, f"row {line}")
                rows.append(SourceRow(line, read[number][0], entry.sha256, entry.duplicate_of))
    except OSError as error:
        raise _changed(source, "the file") from error
    return rows


def _changed(source: Source, what: str) -> PromptError:
    remedy = "reload the definitions, then materialise prompts again"
    return PromptError("a source changed since it was indexed", where=f"{source.path}, {what}", remedy=remedy)


def _current(folder: Path, source: Source, partitioning: Partitioning) -> SourceIndex | None:
    """The index on disk, if it still describes the file."""
    index, files = read_index(folder, source.name), data_files(source.path)
    if index is None:
        return None
    if (index.partition_rows, index.partition_tokens) != (partitioning.rows, partitioning.tokens):
        raise PromptError(
            "the size of partitions changed, which would give old keys new rows",
            where=f"source {source.name}",
            expected=f"rows_per_partition = {index.partition_rows}, tokens_per_partition = {index.partition_tokens}",
            got=f"{partitioning.rows} and {partitioning.tokens}",
            remedy="set them back, or give the source a new name, which makes new partitions",
        )
    return index if (index.path, index.files) == (str(source.path), files) else None


def _repeats_hold(folder: Path, source: Source, sources: Sequence[Source]) -> bool:
    """Whether each row that repeats another still does, and that other row repeats none."""
    first_rows = FirstRows(folder, [one.name for one in sources])
    return all(repeats is None or first_rows.name(sha) == repeats for _, sha, repeats in read_hashes(folder, source.name))


def _build(folder: Path, source: Source, partitioning: Partitioning, sources: Sequence[Source]) -> SourceIndex:
    """Read the whole source once, and note which rows repeat one of any source; empty rows repeat nothing."""
    others = [other.name for other in sources if other != source and read_index(folder, other.name) is not None]
    first_rows = FirstRows(folder, others)
    first_rows.begin(source.name)
    files = data_files(source.path)
    starts: list[int] = []
    named: set[str] = set()
    number = rows_here = tokens_here = 0
    with writing_entries(folder, source.name) as write:
        for place, file in enumerate(files):
            for offset, size, sha, blank in find_rows(file):
                tokens = size // _BYTES_PER_TOKEN
                if not starts or rows_here == partitioning.rows or tokens_here + tokens > partitioning.tokens:
                    starts.append(number)
                    rows_here = tokens_here = 0
                rows_here, tokens_here = rows_here + 1, tokens_here + tokens
                repeats = None if blank else first_rows.repeated(sha, number)
                named |= {repeats.rpartition(":")[0]} if repeats else set()
                write(Entry(place, offset, size, sha, repeats))
                number += 1
    index = SourceIndex(
        INDEX_VERSION,
        str(source.path),
        files,
        number,
        partitioning.rows,
        partitioning.tokens,
        tuple(starts),
        tuple(sorted(named - {source.name})),
    )
    write_index(folder, source.name, index)
    return index
