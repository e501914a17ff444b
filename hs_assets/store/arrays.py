"""Reading rows of a store's arrays: a chunk with one ``preadv``, straight to where it is wanted, its crc32c checked.

Needs neither zarr nor a thread, and keeps no file open between calls: a reader may be forked, pickled, or used by threads.
"""

from __future__ import annotations

import json
import math
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
CRC_BYTES = 4
NO_CHUNK = 2**64 - 1
"""Offset and size of a chunk that was never written, in the index of a shard."""

_DTYPES = {"bfloat16": BFLOAT16} | {n: np.dtype(n) for n in ("bool", "int32", "int64", "uint16", "float16", "float32")}
_CHUNK_CODECS = (["bytes", "crc32c"], ["bytes", "blosc", "crc32c"])
_INDEX_CODECS = ["bytes", "crc32c"]
_scratch = threading.local()


class MissingRowsError(LookupError):
    """Rows that the array should have were never written, or their file is gone."""


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array [rows, *row_shape] on disk, cut along its rows: shards, if ``sharded``, of chunks; else chunks alone."""

    folder: Path
    rows: int
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_rows: int
    shard_rows: int
    sharded: bool
    compressed: bool

    @property
    def row_bytes(self) -> int:
        return math.prod(self.row_shape) * self.dtype.itemsize

    @property
    def shards(self) -> int:
        """How many files of rows it has."""
        return -(-self.rows // self.shard_rows)

    def shard_path(self, shard: int) -> Path:
        """The file of a shard; of a chunk where there are no shards."""
        return Path(self.folder, "c", str(shard), *("0" for _ in self.row_shape))

    def read(self, start: int = 0, stop: int | None = None, out: np.ndarray | None = None) -> np.ndarray:
        """Rows ``start .. stop``; only the chunks that hold them are read.

        Arguments:
            out: where they go, C-contiguous [stop - start, *row_shape] of the array's dtype; by default a new array.

        Raises:
            MissingRowsError: there are no such rows, or they are gone.
            ValueError: a checksum or a size is wrong, or `out` does not fit.
            OSError: a file cannot be read.
        """
        stop = self.rows if stop is None else stop
        if not 0 <= start <= stop <= self.rows:
            raise MissingRowsError(f"rows {start} to {stop} of {self.rows}")
        shape = (stop - start, *self.row_shape)
        out = np.empty(shape, self.dtype) if out is None else out
        if out.shape != shape or out.dtype != self.dtype or not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError(f"out must be a C-contiguous {self.dtype} {shape}, not {out.dtype} {out.shape}")
        wanted = out.reshape(-1).view(np.uint8)
        for shard in range(start // self.shard_rows, -(-stop // self.shard_rows) if stop > start else 0):
            low, high = max(start, shard * self.shard_rows), min(stop, (shard + 1) * self.shard_rows)
            rows = wanted[(low - start) * self.row_bytes : (high - start) * self.row_bytes]
            self._read_shard(shard, low - shard * self.shard_rows, high - shard * self.shard_rows, rows)
        return out

    def _read_shard(self, shard: int, low: int, high: int, out: np.ndarray) -> None:
        """Rows ``low .. high`` of a shard as bytes."""
        path = self.shard_path(shard)
        try:
            file = path.open("rb", buffering=0)
        except FileNotFoundError as error:
            if not self.sharded:  # zarr leaves a chunk out where all of it is the fill value, 0
                out[:] = 0
                return
            raise MissingRowsError(f"{path} is gone") from error
        with file:
            descriptor = file.fileno()
            size = os.fstat(descriptor).st_size
            index = self._read_index(descriptor, size, path) if self.sharded else [(0, size)]
            for chunk in range(low // self.chunk_rows, -(-high // self.chunk_rows)):
                begin = chunk * self.chunk_rows
                first, last = max(low, begin), min(high, begin + self.chunk_rows)
                rows = out[(first - low) * self.row_bytes : (last - low) * self.row_bytes]
                place, length = index[chunk]
                if place == NO_CHUNK:
                    raise MissingRowsError(f"chunk {chunk} of {path}")
                try:
                    read = _read_compressed if self.compressed else _read_plain
                    read(descriptor, place, length, (first - begin) * self.row_bytes, self.chunk_rows * self.row_bytes, rows)
                except ValueError as error:
                    raise ValueError(f"chunk {chunk} of {path}: {error}") from error

    def _read_index(self, descriptor: int, size: int, path: Path) -> list[tuple[int, int]]:
        """(offset, bytes) of each chunk of a shard."""
        length = self.shard_rows // self.chunk_rows * 16
        whole = length + CRC_BYTES <= size
        data = os.pread(descriptor, length + CRC_BYTES, size - length - CRC_BYTES) if whole else b""
        if not whole or data[length:] != crc32c(data[:length]):
            raise ValueError(f"the index of a shard is damaged: {path}")
        return [(int(place), int(n)) for place, n in np.frombuffer(data, "<u8", length // 8).reshape(-1, 2)]


def open_array(folder: Path) -> StoredArray:
    """The array in a folder.

    Raises:
        OSError, KeyError, ValueError, TypeError: its metadata cannot be read, or names a codec that is not read here.
    """
    try:
        return _described(folder, json.loads((folder / "zarr.json").read_text()))
    except AttributeError as error:  # something else where an object should be
        raise TypeError(f"{folder}: {error}") from error


def _described(folder: Path, metadata: dict[str, Any]) -> StoredArray:
    """The array that its metadata describe."""
    rows, *row_shape = metadata["shape"]
    shard_rows, *whole = metadata["chunk_grid"]["configuration"]["chunk_shape"]
    codecs, chunk_rows = metadata["codecs"], shard_rows
    sharded = [codec["name"] for codec in codecs] == ["sharding_indexed"]
    if sharded:
        settings = codecs[0]["configuration"]
        codecs = settings["codecs"]
        chunk_rows, *whole = settings["chunk_shape"]
        if _names(settings["index_codecs"]) != _INDEX_CODECS or settings.get("index_location", "end") != "end":
            raise ValueError(f"{folder}: a shard's index is not at its end, or not as bytes with crc32c")
    keys = metadata["chunk_key_encoding"]
    plain_keys = keys["name"] == "default" and keys.get("configuration", {}).get("separator", "/") == "/"
    if _names(codecs) not in _CHUNK_CODECS or not plain_keys or metadata["zarr_format"] != 3:
        raise ValueError(f"{folder}: codecs {_names(codecs)} are not read here, only {_CHUNK_CODECS}")
    sizes = [shard_rows, chunk_rows, *row_shape]
    if type(rows) is not int or rows < 0 or not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(f"{folder}: {rows} rows of {row_shape} in chunks of {chunk_rows} and shards of {shard_rows}")
    if list(whole) != row_shape or shard_rows % chunk_rows:
        raise ValueError(f"{folder}: chunks of {[chunk_rows, *whole]} do not hold whole rows of {row_shape}")
    dtype = _DTYPES[metadata["data_type"]]
    return StoredArray(folder, rows, tuple(row_shape), dtype, chunk_rows, shard_rows, sharded, "blosc" in _names(codecs))


def crc32c(data: bytes | np.ndarray) -> bytes:
    """The checksum as it lies behind a chunk."""
    checksum: int = google_crc32c.value(data)
    return checksum.to_bytes(CRC_BYTES, "little")


def _names(codecs: list[dict[str, Any]]) -> list[str]:
    """Names of codecs; big-endian bytes have a name of their own here, which nothing reads."""
    big = any(codec.get("configuration", {}).get("endian") == "big" for codec in codecs)
    return ["big-endian"] if big else [codec["name"] for codec in codecs]


def _read_plain(descriptor: int, place: int, length: int, skip: int, chunk: int, out: np.ndarray) -> None:
    """``out.nbytes`` bytes of a chunk of `chunk` bytes, behind the first `skip`; the others are read for the checksum."""
    if length != chunk + CRC_BYTES:
        raise ValueError(f"{length} bytes, not {chunk + CRC_BYTES}")
    beside = _buffer(length - out.nbytes)
    before, after, stored = beside[:skip], beside[skip:-CRC_BYTES], beside[-CRC_BYTES:]
    if os.preadv(descriptor, [piece.data for piece in (before, out, after, stored)], place) != length:
        raise ValueError("it is cut")
    crc = 0
    for piece in (before, out, after):
        crc = google_crc32c.extend(crc, piece)
    if stored.tobytes() != crc.to_bytes(CRC_BYTES, "little"):
        raise ValueError("its checksum is wrong")


def _read_compressed(descriptor: int, place: int, length: int, skip: int, chunk: int, out: np.ndarray) -> None:
    """As `_read_plain`; a chunk that is wanted whole is decompressed to where it is wanted."""
    from numcodecs import blosc

    data = _buffer(length)
    if os.preadv(descriptor, [data.data], place) != length or length <= CRC_BYTES:
        raise ValueError("it is cut")
    body = data[:-CRC_BYTES]
    if data[-CRC_BYTES:].tobytes() != crc32c(body):
        raise ValueError("its checksum is wrong")
    if (holds := int.from_bytes(body[4:8], "little")) != chunk:  # of blosc's header
        raise ValueError(f"it holds {holds} bytes, not {chunk}")
    if out.nbytes == chunk:
        blosc.decompress(body, out)
    else:
        out[:] = np.frombuffer(blosc.decompress(body), np.uint8)[skip : skip + out.nbytes]


def _buffer(size: int) -> np.ndarray:
    """Bytes that are used until the next call of the same thread."""
    held: np.ndarray | None = getattr(_scratch, "held", None)
    if held is None or held.nbytes < size:
        held = _scratch.held = np.empty(size, np.uint8)
    return held[:size]
