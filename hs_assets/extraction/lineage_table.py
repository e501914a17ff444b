"""The lineage of all rows as one Parquet table, for DuckDB, pandas, or whatever else reads it."""

from __future__ import annotations

import dataclasses
import itertools
import stat
from pathlib import Path

from hs_assets.errors import ExportError
from hs_assets.store.lineage import LineageRow, Question, lineage_rows
from hs_assets.store.reader import Store
from hs_assets.wire.records import replacing

_ROWS_AT_ONCE = 10_000
_COLUMNS = {
    "str": "string",
    "str | None": "string",
    "int": "int64",
    "int | None": "int64",
    "list[str]": "list<string>",
    "list[int]": "list<int64>",
    "list[list[int]]": "list<list<int64>>",
}


def write_lineage_table(store: Store, path: Path, question: Question | None = None) -> int:
    """Write the rows that a question asks for, one by one; returns their number. The file is there whole or not at all.

    Columns are the fields of `LineageRow`; ``captured_at`` is a list of UTC times.

    Raises:
        StoreError: a manifest cannot be read; nothing is written then.
        ExportError: what is at `path` is no file: a device or a pipe would be replaced by one.
    """
    if path.exists() and not path.is_file():
        problem, remedy = "a table can replace only a file", "name a file, or a place where nothing is"
        raise ExportError(problem, where=path, got=stat.filemode(path.stat().st_mode), remedy=remedy)
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {"string": pa.string(), "int64": pa.int64()}
    types |= {f"list<{name}>": pa.list_(kind) for name, kind in types.items()}
    types["list<list<int64>>"] = pa.list_(pa.list_(pa.int64()))
    kinds = {
        field.name: types[_COLUMNS[str(field.type)]] for field in dataclasses.fields(LineageRow) if field.name != "captured_at"
    }
    schema = pa.schema([*kinds.items(), ("captured_at", pa.list_(pa.timestamp("us", tz="UTC")))])
    count = 0
    with replacing(path) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        rows = lineage_rows(store, question)
        while some := list(itertools.islice(rows, _ROWS_AT_ONCE)):
            records = [row.as_dict() | {"captured_at": [round(t * 1e6) for t in row.captured_at]} for row in some]
            writer.write_table(pa.Table.from_pylist(records, schema))
            count += len(some)
    return count
