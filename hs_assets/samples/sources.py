"""A JSONL file → rows and partitions, kept in an index so that loading the definitions reads no source again.

Rows are split at the byte ``\\n`` alone. A partition is a run of rows; appending rows renames none. Exact duplicates
(equal bytes) are decided here, over all sources: the first that was indexed wins, and stays it.

    <home>/prompts/index/<source>.json      file, size, time, rows, first row of each partition
    <home>/prompts/index/<source>.parquet   a line a row: offset, bytes, sha256, the row it repeats
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hs_assets.errors import PromptError
from hs_assets.wire.records import write_atomic

if TYPE_CHECKING:
    import pyarrow as pa

INDEX_VERSION = 1
_BYTES_PER_TOKEN = 4
_ROW_GROUP = 8192


@dataclass(frozen=True, slots=True)
class Source:
    """A source file and the name its partition keys begin with."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class Partitioning:
    """How rows become partitions: at most ``rows`` of them, or fewer by a budget of tokens (four bytes each)."""

    rows: int
    tokens: int


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A row where it stands. ``duplicate_of`` names the row ``<source>:<number>`` that it repeats byte for byte."""

    number: int
    raw: bytes
    sha256: str
    duplicate_of: str | None


@dataclass(frozen=True, slots=True)
class SourceIndex:
    """What is known of a source: ``starts`` are the first rows of its partitions, ``repeats`` other sources it repeats."""

    version: int
    path: str
    size: int
    mtime_ns: int
    rows: int
    partition_rows: int
    partition_tokens: int
    starts: tuple[int, ...]
    repeats: tuple[str, ...]


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


def read_partition(folder: Path, source: Source, key: str) -> list[SourceRow]:
    """The rows of a partition, read from the source file at the places that the index names.

    Raises:
        PromptError: there is no such partition, or the file changed since the index was made.
    """
    index = _read_index(folder, source)
    numbers = {partition_key(source.name, number): number for number in range(len(index.starts))} if index else {}
    if index is None or key not in numbers:
        remedy = "reload the definitions, which reads the sources again"
        raise PromptError("no such partition in the index", where=key, expected=f"a partition of {source.name}", remedy=remedy)
    start, end = index.starts[numbers[key]], (*index.starts[1:], index.rows)[numbers[key]]
    rows = []
    try:
        with source.path.open("rb") as file:
            for line, (offset, size, sha256, duplicate_of) in enumerate(_entries(folder, source, start, end), start):
                file.seek(offset)
                rows.append(SourceRow(line, file.read(size), sha256, duplicate_of))
    except OSError as error:
        raise _changed(source, "the file") from error
    for row in rows:
        if hashlib.sha256(row.raw).hexdigest() != row.sha256:
            raise _changed(source, f"row {row.number}")
    return rows


def _changed(source: Source, what: str) -> PromptError:
    remedy = "reload the definitions, then materialise prompts again"
    return PromptError("a source changed since it was indexed", where=f"{source.path}, {what}", remedy=remedy)


def _entries(folder: Path, source: Source, start: int, end: int) -> Iterator[tuple[int, int, str, str | None]]:
    """Offset, bytes, sha256 and repeated row of the rows `start` to `end`."""
    import pyarrow.parquet as pq

    groups = range(start // _ROW_GROUP, (end - 1) // _ROW_GROUP + 1)
    with pq.ParquetFile(_table(folder, source)) as file:
        table = file.read_row_groups(list(groups)).slice(start - groups.start * _ROW_GROUP, end - start)
    for entry in table.to_pylist():
        yield entry["offset"], entry["bytes"], entry["sha256"], entry["duplicate_of"]


def replace_table(path: Path, table: pa.Table) -> None:
    """Write a Parquet file, so that a reader finds the old one or the new one, whoever else writes it too."""
    import pyarrow.parquet as pq

    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    pq.write_table(table, temporary, row_group_size=_ROW_GROUP)
    temporary.replace(path)


def _current(folder: Path, source: Source, partitioning: Partitioning) -> SourceIndex | None:
    """The index on disk, if it still describes the file."""
    index = _read_index(folder, source)
    try:
        stat = source.path.stat()
    except OSError as error:
        raise PromptError("a source cannot be read", where=source.path, got=error, remedy="check prompts.sources") from error
    if not source.path.is_file():
        raise PromptError("a source cannot be read", where=source.path, expected="a JSONL file", remedy="check prompts.sources")
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
    same = (index.path, index.size, index.mtime_ns) == (str(source.path), stat.st_size, stat.st_mtime_ns)
    return index if same else None


def _read_index(folder: Path, source: Source) -> SourceIndex | None:
    path = folder / f"{source.name}.json"
    if not path.exists():
        return None
    fields = json.loads(path.read_text())
    if (version := fields.get("version")) != INDEX_VERSION:
        raise PromptError(
            "a source index of another version", where=path, expected=INDEX_VERSION, got=version, remedy="delete it"
        )
    return SourceIndex(**{**fields, "starts": tuple(fields["starts"]), "repeats": tuple(fields["repeats"])})


def _table(folder: Path, source: Source) -> Path:
    return folder / f"{source.name}.parquet"


def _hashes(folder: Path, source: Source) -> tuple[list[str], list[str | None]]:
    """For each row its sha256, and the row that it repeats."""
    import pyarrow.parquet as pq

    table = pq.read_table(_table(folder, source), columns=["sha256", "duplicate_of"])
    return table["sha256"].to_pylist(), table["duplicate_of"].to_pylist()


def _repeats_hold(folder: Path, source: Source, sources: Sequence[Source]) -> bool:
    """Whether each row that repeats another still does, and that other row repeats none."""
    first_of = _first_rows(folder, sources)
    return all(repeats is None or first_of.get(sha) == repeats for sha, repeats in zip(*_hashes(folder, source), strict=True))


def _first_rows(folder: Path, sources: Sequence[Source]) -> dict[str, str]:
    """sha256 of each row that repeats no other → where it stands."""
    first_of: dict[str, str] = {}
    for source in sources:
        columns = enumerate(zip(*_hashes(folder, source), strict=True))
        first_of |= {sha: f"{source.name}:{number}" for number, (sha, repeats) in columns if repeats is None}
    return first_of


def _build(folder: Path, source: Source, partitioning: Partitioning, sources: Sequence[Source]) -> SourceIndex:
    """Read the whole source once, and note which rows repeat one of any source; empty rows repeat nothing."""
    import pyarrow as pa

    others = [other for other in sources if other != source and _read_index(folder, other) is not None]
    first_of = _first_rows(folder, others)
    stat = source.path.stat()
    offsets: list[int] = []
    sizes: list[int] = []
    hashes: list[str] = []
    repeats: list[str | None] = []
    starts: list[int] = []
    rows_here = tokens_here = 0
    for offset, raw in _lines(source.path):
        number, sha = len(offsets), hashlib.sha256(raw).hexdigest()
        tokens = len(raw) // _BYTES_PER_TOKEN
        if not starts or rows_here == partitioning.rows or tokens_here + tokens > partitioning.tokens:
            starts.append(number)
            rows_here = tokens_here = 0
        rows_here, tokens_here = rows_here + 1, tokens_here + tokens
        name = f"{source.name}:{number}"
        first = first_of.setdefault(sha, name) if raw.strip() else name
        offsets.append(offset)
        sizes.append(len(raw))
        hashes.append(sha)
        repeats.append(None if first == name else first)
    table = pa.table(
        {
            "offset": pa.array(offsets, pa.int64()),
            "bytes": pa.array(sizes, pa.int64()),
            "sha256": pa.array(hashes, pa.string()),
            "duplicate_of": pa.array(repeats, pa.string()),
        }
    )
    replace_table(_table(folder, source), table)
    named = {repeated.rpartition(":")[0] for repeated in repeats if repeated} - {source.name}
    index = SourceIndex(
        INDEX_VERSION,
        str(source.path),
        stat.st_size,
        stat.st_mtime_ns,
        len(offsets),
        partitioning.rows,
        partitioning.tokens,
        tuple(starts),
        tuple(sorted(named)),
    )
    write_atomic(folder / f"{source.name}.json", json.dumps(asdict(index)))
    return index


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of every line; line ends are taken off, and a mark at the beginning of the file."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            raw = line.removesuffix(b"\n").removesuffix(b"\r")
            mark = len(b"\xef\xbb\xbf") if offset == 0 and raw.startswith(b"\xef\xbb\xbf") else 0
            yield offset + mark, raw[mark:]
            offset += len(line)
