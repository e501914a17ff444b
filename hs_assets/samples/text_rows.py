"""Rows of a JSON file by their place in it, so that one is found again without reading the others.

Lines (JSONL) end at the byte ``\\n`` alone. Values (JSON) are the elements of the array that the file is, or, where it is
none, the values that stand in it one after another. A row of any size takes some memory of `_PIECE` bytes to find.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_PIECE = 1 << 20
_BOM = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n"
_OUTSIDE = re.compile(rb'["\[\]{},]')
_INSIDE = re.compile(rb'["\\]')

Place = tuple[int, int, str, bool]
"""Offset and bytes of a row in its file, its sha256, and whether there is nothing but white space in it."""


def places(path: Path, *, values: bool) -> Iterator[Place]:
    """The places of all rows of a file."""
    with path.open("rb") as file:
        yield from _values(file) if values else _lines(file)


def is_values(path: Path) -> bool:
    """Whether a ``.json`` file is an array, or a value over several lines: else it has a JSON value in each line."""
    with path.open("rb") as file:
        start = file.read(_PIECE).removeprefix(_BOM).lstrip(_SPACE)
    if start.startswith(b"["):
        return b"\0" not in start[:4]  # as in UTF-16, which has no rows to tell apart
    line, _, rest = start.partition(b"\n")
    if not rest.strip():
        return False
    try:
        json.loads(line)
    except ValueError:
        return True
    except RecursionError:
        return False
    return False


def sha256_of(file: BinaryIO, offset: int, size: int) -> str:
    """The sha256 of some bytes of a file."""
    digest = hashlib.sha256()
    file.seek(offset)
    while size > 0 and (piece := file.read(min(size, _PIECE))):
        digest.update(piece)
        size -= len(piece)
    return digest.hexdigest()


def _lines(file: BinaryIO) -> Iterator[Place]:
    offset = 0
    while piece := file.readline(_PIECE):
        mark = len(_BOM) if offset == 0 and piece.startswith(_BOM) else 0
        if piece.endswith(b"\n") or len(piece) < _PIECE:
            raw = piece[mark:].removesuffix(b"\n").removesuffix(b"\r")
            yield offset + mark, len(raw), hashlib.sha256(raw).hexdigest(), not raw.strip()
            offset += len(piece)
            continue
        size, end = len(piece), piece[-2:]
        while not end.endswith(b"\n") and (piece := file.readline(_PIECE)):
            size, end = size + len(piece), (end + piece)[-2:]
        ending = len(end) - len(end.removesuffix(b"\n").removesuffix(b"\r"))
        row = offset + mark, size - mark - ending
        yield *row, sha256_of(file, *row), False
        offset += size
        file.seek(offset)


def _values(file: BinaryIO) -> Iterator[Place]:
    """The places of values; what stands between them and does not belong there is a row too, and not JSON."""
    for start, end in _value_spans(file):
        if (span := _stripped(file, start, end)) is not None:
            yield *span, sha256_of(file, *span), False


def _stripped(file: BinaryIO, start: int, end: int) -> tuple[int, int] | None:
    """Offset and bytes without the white space around, or None where there is nothing else."""
    while start < end:
        file.seek(start)
        piece = file.read(min(_PIECE, end - start))
        if kept := piece.lstrip(_SPACE):
            start += len(piece) - len(kept)
            break
        start += len(piece)
    while start < end:
        first = max(start, end - _PIECE)
        file.seek(first)
        if kept := file.read(end - first).rstrip(_SPACE):
            return start, first + len(kept) - start
        end = first
    return None


def _value_spans(file: BinaryIO) -> Iterator[tuple[int, int]]:
    """The spans between the commas of the outer array, or of each object where there is none; what is left is one more."""
    base = first = depth = 0
    in_array = closed = quoted = False
    while piece := _read(file, base):
        at = len(_BOM) if base == 0 and piece.startswith(_BOM) else 0
        if base == 0:
            first, in_array = at, piece[at:].lstrip(_SPACE).startswith(b"[")
        while match := (_INSIDE if quoted else _OUTSIDE).search(piece, at):
            byte, at, here = match.group(), match.end(), base + match.start()
            if byte == b"\\":
                at += 1
            elif byte == b'"':
                quoted = not quoted
            elif byte in b"[{":
                first = here + 1 if in_array and not closed and depth == 0 else first
                depth += 1
            elif byte in b"]}":
                depth = max(0, depth - 1)
                if depth == 0 and not closed:
                    yield first, here + (not in_array)
                    first, closed = here + 1, in_array
            elif in_array and not closed and depth == 1:
                yield first, here
                first = here + 1
        base += max(at, len(piece))
    yield first, base


def _read(file: BinaryIO, offset: int) -> bytes:
    file.seek(offset)
    return file.read(_PIECE)
