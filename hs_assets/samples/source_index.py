"""What is known of a source, on disk: its files, its partitions, and for each row where it stands and what it repeats.

<home>/prompts/index/<source>.json      files, sizes, times, rows, first row of each partition
<home>/prompts/index/<source>.parquet   a line a row: file, offset, bytes, sha256, the row it repeats
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from hs_assets.errors import PromptError
from hs_assets.samples.files import DataFile
from hs_assets.samples.tables import readable
from hs_assets.wire.records import replacing, write_atomic

INDEX_VERSION = 2
_ROW_GROUP = 8192
_NUMBER_BITS = 48


@dataclass(frozen=True, slots=True)
class SourceIndex:
    """What is known of a source: ``starts`` are the first rows of its partitions, ``repeats`` other sources it repeats."""

    version: int
    path: str
    files: tuple[DataFile, ...]
    rows: int
    partition_rows: int
    partition_tokens: int
    starts: tuple[int, ...]
    repeats: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the index. ``offset``: of a table, the number of the row in its file."""

    file: int
    offset: int
    bytes: int
    sha256: str
    duplicate_of: str | None


def read_entries(folder: Path, source: str, start: int, end: int) -> list[Entry]:
    """The lines of the rows `start` to `end`."""
    import pyarrow.parquet as pq

    groups = range(start // _ROW_GROUP, (end - 1) // _ROW_GROUP + 1)
    with _readable(path := _table(folder, source)), pq.ParquetFile(path) as file:
        table = file.read_row_groups(list(groups)).slice(start - groups.start * _ROW_GROUP, end - start)
    return [Entry(**entry) for entry in table.to_pylist()]


def read_index(folder: Path, source: str) -> SourceIndex | None:
    """The index of a source, if there is one.

    Raises:
        PromptError: it was made by another version, or is damaged.
    """
    path = folder / f"{source}.json"
    if not path.exists():
        return None
    with _readable(path):
        fields = json.loads(path.read_text())
        if (version := fields["version"]) != INDEX_VERSION:
            raise PromptError(
                "a source index of another version", where=path, expected=INDEX_VERSION, got=version, remedy="delete it"
            )
        fields["files"] = tuple(DataFile(**file) for file in fields["files"])
        return SourceIndex(**{**fields, "starts": tuple(fields["starts"]), "repeats": tuple(fields["repeats"])})


def _readable(path: Path) -> AbstractContextManager[None]:
    return readable(path, "a source index", f"delete {path.with_suffix('.json')}: the source is read again")


def write_index(folder: Path, source: str, index: SourceIndex) -> None:
    """Replace the index of a source."""
    write_atomic(folder / f"{source}.json", json.dumps(asdict(index)))


def _table(folder: Path, source: str) -> Path:
    return folder / f"{source}.parquet"


def read_hashes(folder: Path, source: str) -> Iterator[tuple[int, str, str | None]]:
    """For each row its number, its sha256, and the row that it repeats."""
    import pyarrow.parquet as pq

    number = 0
    with _readable(path := _table(folder, source)), pq.ParquetFile(path) as file:
        for batch in file.iter_batches(_ROW_GROUP, columns=["sha256", "duplicate_of"]):
            for entry in batch.to_pylist():
                yield number, entry["sha256"], entry["duplicate_of"]
                number += 1


class FirstRows:
    """sha256 of each row that repeats no other → where it stands; some 200 bytes of memory a row."""

    def __init__(self, folder: Path, sources: Sequence[str]) -> None:
        self._names: list[str] = []
        self._places: dict[bytes, int] = {}
        """A place is the source's number and the row's, in one number."""
        for source in sources:
            self.begin(source)
            for number, sha, repeats in read_hashes(folder, source):
                if repeats is None:
                    self._places[bytes.fromhex(sha)] = self._place(number)

    def begin(self, source: str) -> None:
        """From here on rows are those of `source`."""
        self._names.append(source)

    def name(self, sha256: str) -> str | None:
        """The row ``<source>:<number>`` that is known by a hash."""
        place = self._places.get(bytes.fromhex(sha256))
        return None if place is None else self._named(place)

    def repeated(self, sha256: str, number: int) -> str | None:
        """The row that row `number` repeats; it is the first of its hash where there is none."""
        mine = self._place(number)
        place = self._places.setdefault(bytes.fromhex(sha256), mine)
        return None if place == mine else self._named(place)

    def _place(self, number: int) -> int:
        return (len(self._names) - 1) << _NUMBER_BITS | number

    def _named(self, place: int) -> str:
        return f"{self._names[place >> _NUMBER_BITS]}:{place & ((1 << _NUMBER_BITS) - 1)}"


@contextmanager
def writing_entries(folder: Path, source: str) -> Iterator[Callable[[Entry], None]]:
    """Gives what writes a line of the index; the file replaces the last one when all are written."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {"file": pa.int32(), "offset": pa.int64(), "bytes": pa.int64(), "sha256": pa.string(), "duplicate_of": pa.string()}
    waiting: list[Entry] = []
    with (
        replacing(_table(folder, source)) as temporary,
        pq.ParquetWriter(temporary, pa.schema(list(kinds.items()))) as writer,
    ):

        def flush() -> None:
            columns = {name: pa.array([getattr(entry, name) for entry in waiting], kind) for name, kind in kinds.items()}
            writer.write_table(pa.table(columns), row_group_size=_ROW_GROUP)
            waiting.clear()

        def write(entry: Entry) -> None:
            waiting.append(entry)
            if len(waiting) == _ROW_GROUP:
                flush()

        yield write
        flush()
