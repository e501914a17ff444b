"""Our own Parquet files: replaced whole or not at all, and named where they are damaged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hs_assets.errors import PromptError
from hs_assets.wire.records import replacing

if TYPE_CHECKING:
    import pyarrow as pa


def replace_table(path: Path, table: pa.Table) -> None:
    """Write a Parquet file, so that a reader finds the old one or the new one, whoever else writes it too."""
    import pyarrow.parquet as pq

    with replacing(path) as temporary:
        pq.write_table(table, temporary)


@contextmanager
def readable(path: Path, what: str, remedy: str) -> Iterator[None]:
    """Raise PromptError, with `what` the file is, where it cannot be read, or is something else."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:  # Arrow's own are some of them
        raise PromptError(f"{what} cannot be read", where=path, got=repr(error), remedy=remedy) from error
