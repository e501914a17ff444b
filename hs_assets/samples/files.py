"""Which files a source is: one of JSON, JSON lines, Parquet or Arrow, or a folder of such as Hugging Face's tools leave."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hs_assets.errors import PromptError
from hs_assets.samples.conversations import Dropped
from hs_assets.samples.table_rows import table_rows
from hs_assets.samples.text_rows import Place, is_values, places, sha256_of

_LINES, _TABLES, _VALUES = (".jsonl", ".ndjson"), (".parquet", ".arrow"), ".json"
_PACKED = (".gz", ".zst", ".xz", ".bz2", ".zip", ".tar")
_SHEETS = (".csv", ".tsv", ".xls", ".xlsx", ".ods")
_METADATA = ("dataset_info.json", "dataset_infos.json")
_REMEDY = "check prompts.sources"


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of a source as it stood when it was looked at."""

    path: str
    size: int
    mtime_ns: int

    @property
    def is_table(self) -> bool:
        return self.path.endswith(_TABLES)


def data_files(path: Path) -> tuple[DataFile, ...]:
    """The files of a source, in the order of their rows: a folder's by name, a saved data set's as it lists them.

    Raises:
        PromptError: there are none, or it is not sure which of them belong together.
    """
    try:
        files = _in_folder(path) if path.is_dir() else [path]
        found = []
        for file in files:
            stat = file.stat()
            if file.suffix in _PACKED:
                raise PromptError(
                    "a source cannot be read: it is packed", where=file, remedy="unpack it, and name what comes out"
                )
            if file.suffix.lower() in _SHEETS:
                raise PromptError(
                    "a source cannot be read: it is a sheet of cells",
                    where=file,
                    expected="JSON lines, JSON, Parquet or Arrow",
                    got=file.suffix,
                    remedy='convert it, and name the columns as its format has them: python -c "import pandas; '
                    f"pandas.read_csv('{file.name}').to_json('{file.stem}.jsonl', orient='records', lines=True)\"",
                )
            if not file.is_file():
                raise PromptError("a source cannot be read", where=file, expected="a file or a folder", remedy=_REMEDY)
            found.append(DataFile(str(file), stat.st_size, stat.st_mtime_ns))
    except OSError as error:
        raise PromptError("a source cannot be read", where=path, got=error, remedy=_REMEDY) from error
    return tuple(found)


def _in_folder(folder: Path) -> list[Path]:
    if (folder / "dataset_dict.json").exists():
        splits = _json(folder / "dataset_dict.json").get("splits")
        raise PromptError(
            "a source cannot be read: a folder of several splits", where=folder, got=splits, remedy='name one: path = "…/train"'
        )
    if (folder / "state.json").exists():
        state = _json(folder / "state.json")
        if state.get("_indices_data_files"):
            remedy = "flatten_indices() before save_to_disk()"
            raise PromptError("a source cannot be read: its rows are selected by indices", where=folder, remedy=remedy)
        return [folder / str(entry["filename"]) for entry in state.get("_data_files", ())]
    known = (*_LINES, *_TABLES, _VALUES)
    for place in (folder, folder / "data"):
        files = sorted(file for file in place.glob("*") if file.suffix in known and file.name not in _METADATA)
        splits = sorted({file.name.split("-")[0] for file in files if "-of-" in file.name})
        if len(splits) > 1:
            remedy = "a source for each file, or a folder for each split"
            raise PromptError("a source cannot be read: files of several splits", where=place, got=splits, remedy=remedy)
        if len({file.suffix for file in files}) > 1:
            kinds = sorted({file.suffix for file in files})
            raise PromptError("a source cannot be read: files of several kinds", where=place, got=kinds, remedy=_REMEDY)
        if files:
            return files
    raise PromptError("a source cannot be read: no data in the folder", where=folder, expected=", ".join(known), remedy=_REMEDY)


def _json(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_text())
    except ValueError as error:
        raise PromptError("a source cannot be read", where=path, got=error, remedy="save the data set again") from error
    return body if isinstance(body, dict) else {}


def find_rows(file: DataFile) -> Iterator[Place]:
    """The place of every row. Of a table: the row's number in it, and the bytes and the sha256 of its canonical JSON.

    A row of a table that cannot be read is marked as blank, so that it repeats no other: nobody knows what is in it.

    Raises:
        PromptError: a table is damaged.
    """
    path = Path(file.path)
    if not file.is_table:
        yield from places(path, values=path.suffix == _VALUES and is_values(path))
        return
    for number, row in enumerate(table_rows(path)):
        raw = row.detail.encode() if isinstance(row, Dropped) else row
        yield number, len(raw), hashlib.sha256(raw).hexdigest(), isinstance(row, Dropped)


def read_rows(file: DataFile, found: list[Place], max_bytes: int) -> Iterator[tuple[bytes | Dropped, str]]:
    """Rows of a file by their places, in order, each with its sha256 as it is now.

    A row of more than `max_bytes` is not read into memory as a whole (one of a table is, by its row group).

    Raises:
        OSError: the file cannot be read.
        PromptError: a table is damaged.
    """
    path = Path(file.path)
    if file.is_table:
        for row in table_rows(path, found[0][0], found[-1][0] + 1):
            raw = row.detail.encode() if isinstance(row, Dropped) else row
            yield _too_large(len(raw), max_bytes) or row, hashlib.sha256(raw).hexdigest()
        return
    with path.open("rb") as opened:
        for offset, size, _, _ in found:
            if (too_large := _too_large(size, max_bytes)) is not None:
                yield too_large, sha256_of(opened, offset, size)
            else:
                opened.seek(offset)
                raw = opened.read(size)
                yield raw, hashlib.sha256(raw).hexdigest()


def _too_large(size: int, max_bytes: int) -> Dropped | None:
    return (
        Dropped("row_too_large", f"{size:,} bytes, at most {max_bytes:,} (prompts.max_row_bytes)") if size > max_bytes else None
    )
