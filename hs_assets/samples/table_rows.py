"""Rows of Parquet and Arrow files → JSON, a batch at a time.

Arrow gives every object of a column the fields of all others, and null where a row had none: a field that is null is left
out. So the arguments of a tool call gain nothing; an argument that was null on purpose is lost too (write arguments as JSON
strings, which Arrow leaves alone). The JSON is canonical: fields in the order of the table's columns, no white space.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hs_assets.errors import PromptError
from hs_assets.samples.conversations import Dropped

_BATCH = 256
_NO_PYTHON = (ValueError, OverflowError, KeyError)
"""What Arrow raises on values that Python cannot hold: nanoseconds, years past 9999, time zones that nobody knows, objects
with a field twice, text that is not UTF-8."""


def table_rows(path: Path, start: int = 0, end: int | None = None) -> Iterator[bytes | Dropped]:
    """The rows `start` to `end` of a Parquet file, or of an Arrow file or stream, as canonical JSON.

    Only the row groups and batches that hold them are read.

    Raises:
        PromptError: the file is damaged, or not what its name says.
    """
    import pyarrow as pa

    try:
        batches = _parquet(path, start, end) if path.suffix == ".parquet" else _arrow(path)
        first = next(batches, 0)
        seen = first if isinstance(first, int) else 0
        for batch in batches:
            if not isinstance(batch, pa.RecordBatch):
                continue
            count = batch.num_rows
            low, high = max(0, start - seen), count if end is None else min(count, end - seen)
            if repeated := sorted(name for name, times in Counter(batch.schema.names).items() if times > 1):
                remedy = "name each column once"
                raise PromptError("a source cannot be read: columns of the same name", where=path, got=repeated, remedy=remedy)
            if low < high:
                yield from _rows(batch.slice(low, high - low))
            seen += count
            if end is not None and seen >= end:
                return
    except (pa.ArrowException, OSError) as error:
        raise PromptError("a source cannot be read", where=path, got=error, remedy="write the file again") from error


def _parquet(path: Path, start: int, end: int | None) -> Iterator[Any]:
    """The number of the first row that is read, then the batches of the row groups from there."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        groups, first, seen = [], 0, 0
        for number in range(file.num_row_groups):
            rows = file.metadata.row_group(number).num_rows
            if seen + rows <= start:
                first = seen + rows
            elif end is None or seen < end:
                groups.append(number)
            seen += rows
        yield first
        yield from file.iter_batches(batch_size=_BATCH, row_groups=groups)


def _arrow(path: Path) -> Iterator[Any]:
    import pyarrow as pa

    yield 0
    with pa.memory_map(str(path)) as mapped:
        start = mapped.read(6)
        mapped.seek(0)
        if start == b"ARROW1":
            with pa.ipc.open_file(mapped) as file:
                for number in range(file.num_record_batches):
                    yield file.get_batch(number)
        else:
            with pa.ipc.open_stream(mapped) as stream:
                yield from stream


def _rows(batch: Any) -> Iterator[bytes | Dropped]:
    try:
        values: list[Any] = batch.to_pylist()
    except _NO_PYTHON:
        values = [_value(batch.slice(number, 1)) for number in range(batch.num_rows)]
    for value in values:
        yield value if isinstance(value, Dropped) else _canonical(value)


def _value(row: Any) -> dict[str, Any] | Dropped:
    try:
        return dict(row.to_pylist()[0])
    except UnicodeDecodeError as error:
        return Dropped("invalid_unicode", f"not UTF-8: {error.reason} at byte {error.start} of a column")
    except _NO_PYTHON as error:
        return Dropped("unreadable_value", f"{type(error).__name__} in a column: {error}")


def _canonical(value: dict[str, Any]) -> bytes:
    return json.dumps(_without_nulls(value), ensure_ascii=False, separators=(",", ":")).encode()


def _without_nulls(value: Any) -> Any:
    """Plain JSON: null fields left out, bytes as an object with their hash (text they are not), times and such as text."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if not _null(item)}
    if isinstance(value, list | tuple):
        return [_without_nulls(item) for item in value]
    if isinstance(value, bytes):
        return {"sha256": hashlib.sha256(value).hexdigest()}
    if _null(value):
        return None
    return value if isinstance(value, str | int | float | bool) else str(value)


def _null(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))
