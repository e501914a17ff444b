"""A generation: the states of some samples, written aside shard by shard and published at once.

Memory: one chunk of each array, whatever the number of samples. A shard is written once, from its first chunk to its index;
only the last one of a generation is shorter. Layers are checksummed, compressed and written by threads, beside each other.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import google_crc32c
import numpy as np
import zarr
from numcodecs import blosc
from zarr.codecs import BloscCodec, Crc32cCodec

import hs_assets.store.dtype  # noqa: F401  (zarr learns bfloat16)
from hs_assets.errors import StoreError
from hs_assets.store.arrays import BFLOAT16, CRC_BYTES, NO_CHUNK, open_array
from hs_assets.store.layout import StorePaths, array_name, publish_folder, remove_tree

STAGING_PREFIX = ".staging-"
DTYPES = {"BF16": BFLOAT16, "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}
_BLOSC_BLOCK = 1 << 19


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """What all arrays of a generation have in common. ``dtype`` is BF16, F16 or F32; lengths are in tokens.

    ``compression``: ``blosc`` is zstd at level 1 behind a byte shuffle, in blocks of 512 KiB: about 0.7 of the size of real
    states, for about 3 CPU seconds a GB written and 1 read.
    """

    hidden_size: int
    dtype: str
    chunk_tokens: int
    shard_tokens: int
    compression: Literal["none", "blosc"] = "none"

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's state."""
        return self.hidden_size * int(DTYPES[self.dtype].itemsize)

    @property
    def state_chunk(self) -> int:
        """Tokens of a chunk of states: `chunk_tokens`; where they are compressed, doubled until a block of 512 KiB is full.

        zstd codes 128 KiB at a time with one table. In less than such a block, exponents, which get smaller, and mantissas,
        which do not, come under the same table, and a tenth of what could be saved is lost.
        """
        tokens = self.chunk_tokens
        while self.compression != "none" and tokens * self.row_bytes < _BLOSC_BLOCK and self.shard_tokens % (2 * tokens) == 0:
            tokens *= 2
        return tokens


class _Column:
    """One array [S, width] that grows at its end: each chunk is written as soon as it is full.

    zarr makes the array and its metadata. Its shards are written here, byte for byte as zarr would (README.md), but without
    a copy of every chunk for every codec.
    """

    def __init__(
        self,
        group: zarr.Group,
        folder: Path,
        name: str,
        width: int | None,
        dtype: np.dtype[Any],
        chunk: int,
        shard: int,
        compressed: bool,
    ) -> None:
        tail = () if width is None else (width,)
        shuffled = BloscCodec(typesize=dtype.itemsize, cname="zstd", clevel=1, shuffle="shuffle", blocksize=_BLOSC_BLOCK)
        self._array = group.create_array(
            name,
            shape=(0, *tail),
            chunks=(chunk, *tail),
            shards=(shard, *tail),
            dtype=dtype,
            compressors=[*([shuffled] if compressed else []), Crc32cCodec()],
            fill_value=float("nan") if width is not None else 0,
            config={"write_empty_chunks": True},
        )
        self.folder = folder / name
        self._compressed = compressed
        self._stored = np.dtype(np.uint16) if dtype == BFLOAT16 else dtype
        self._fill = np.asarray(self._array.fill_value, dtype).view(self._stored)
        self._begun = np.empty((chunk, *tail), self._stored)  # a chunk that is not full yet
        self._begun_rows = 0
        self._chunks = 0
        self._chunks_a_shard = shard // chunk
        self._shard: io.FileIO | None = None
        self._index: list[tuple[int, int]] = []

    def append(self, rows: np.ndarray) -> None:
        rows = rows.view(self._stored)
        while len(rows):
            held = self._begun_rows
            take = min(len(rows), len(self._begun) - held)
            self._begun_rows = (held + take) % len(self._begun)
            if held + take == len(self._begun) and rows.flags.c_contiguous and (held == 0 or not self._compressed):
                self._write_chunk(self._begun[:held], rows[:take])
            else:
                self._begun[held : held + take] = rows[:take]
                if held + take == len(self._begun):
                    self._write_chunk(self._begun)
            rows = rows[take:]

    def finish(self) -> None:
        """Write what is left, and what zarr has to know."""
        rows = self._chunks * len(self._begun) + self._begun_rows
        if self._begun_rows:
            self._begun[self._begun_rows :] = self._fill
            self._begun_rows = 0
            self._write_chunk(self._begun)
        if self._shard is not None:
            self._end_shard(self._shard)
        self._array.resize((rows, *self._array.shape[1:]))

    def close(self) -> None:
        """Give up what was begun."""
        if self._shard is not None:
            self._shard.close()
            self._shard = None

    def _write_chunk(self, *pieces: np.ndarray) -> None:
        """A chunk, which may come in pieces where it is not compressed, and its crc32c, at the end of its shard."""
        if self._shard is None:
            path = Path(self.folder, "c", str(self._chunks // self._chunks_a_shard), *("0" for _ in self._begun.shape[1:]))
            path.parent.mkdir(parents=True, exist_ok=True)
            self._shard = path.open("xb", buffering=0)
        if self._compressed:
            pieces = (np.frombuffer(blosc.compress(pieces[-1], b"zstd", 1, blosc.SHUFFLE, _BLOSC_BLOCK), np.uint8),)
        self._index.append((self._shard.tell(), _write(self._shard, *pieces)))
        self._chunks += 1
        if len(self._index) == self._chunks_a_shard:
            self._end_shard(self._shard)

    def _end_shard(self, shard: io.FileIO) -> None:
        """The index: (offset, bytes) of each chunk, all ones where there is none; its crc32c."""
        index = np.full((self._chunks_a_shard, 2), NO_CHUNK, "<u8")
        index[: len(self._index)] = self._index
        _write(shard, index)
        shard.close()
        self._shard = None
        self._index.clear()


class GenerationWriter:
    """Writes one generation: `append` samples, then `publish` it or `discard` it.

    Example:
        writer = GenerationWriter(paths, fingerprint, partition, (2, 4), final=8, shape=shape)
        offset = writer.append(token_ids, {2: states_2, 4: states_4})
        name = writer.publish()
    """

    def __init__(
        self, paths: StorePaths, fingerprint: str, partition: str, residual_ids: tuple[int, ...], final: int, shape: ArrayShape
    ) -> None:
        self.name = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"
        self.samples = 0
        self.bytes = 0
        self._destination = paths.generation(fingerprint, partition, self.name)
        self._staging = self._destination.with_name(STAGING_PREFIX + self.name)
        self._staging.mkdir(parents=True)
        self._lock = _hold(self._staging)
        self._shape = shape
        self._group = zarr.create_group(
            self._staging,
            attributes={
                "state_fingerprint": fingerprint,
                "partition": partition,
                "residual_ids": list(residual_ids),
                "final": final,
                "writer": os.getpid(),
            },
        )
        self._dtype = dtype = DTYPES[shape.dtype]
        chunk, shard, compressed = shape.state_chunk, shape.shard_tokens, shape.compression != "none"
        self._states = {
            i: _Column(self._group, self._staging, array_name(i, final), shape.hidden_size, dtype, chunk, shard, compressed)
            for i in residual_ids
        }
        self._ids = _Column(self._group, self._staging, "input_ids", None, np.dtype(np.int32), shard, shard, False)
        self._threads = ThreadPoolExecutor(len(residual_ids), thread_name_prefix="store-writer")
        self._offsets = [0]

    def append(self, token_ids: np.ndarray, states: Mapping[int, np.ndarray]) -> int:
        """Add one sample; returns the row at which it begins.

        Arguments:
            token_ids: int32 [L].
            states: residual id → [L, H], in the dtype of the generation; exactly its residual ids.

        Raises:
            StoreError: other ids, shapes or dtypes.
        """
        wanted = (len(token_ids), self._shape.hidden_size), self._dtype
        ids_fit = token_ids.ndim == 1 and token_ids.dtype == np.int32
        if not ids_fit or states.keys() != self._states.keys() or any((s.shape, s.dtype) != wanted for s in states.values()):
            raise StoreError(
                "a sample does not fit its generation",
                where=self._destination,
                expected=f"int32 ids, and {wanted} for each of {sorted(self._states)}",
                got=f"{token_ids.dtype} ids, and { {i: (s.shape, s.dtype) for i, s in states.items()} }",
            )
        list(self._threads.map(lambda residual_id: self._states[residual_id].append(states[residual_id]), states))
        self.bytes += sum(rows.nbytes for rows in states.values())
        self._ids.append(token_ids)
        self._offsets.append(self._offsets[-1] + len(token_ids))
        self.samples += 1
        return self._offsets[-2]

    def publish(self) -> str:
        """Write the rest, check that all is there, and give the generation its name, which is returned.

        Raises:
            StoreError: a shard is missing or a length differs; nothing is published then.
        """
        offsets = self._group.create_array(
            "offsets", shape=(len(self._offsets),), dtype=np.dtype(np.int64), compressors=[Crc32cCodec()]
        )
        offsets[:] = np.array(self._offsets, np.int64)
        columns = [*self._states.values(), self._ids]
        list(self._threads.map(_Column.finish, columns))
        self._threads.shutdown()
        try:
            for column in columns:
                _read_back(column.folder, self._offsets[-1])
        except (OSError, LookupError, ValueError) as error:
            raise StoreError(
                "a generation is not whole", where=self._staging, expected=f"{self._offsets[-1]} rows in every array", got=error
            ) from error
        publish_folder(self._staging, self._destination)
        self._release()
        return self.name

    def discard(self) -> None:
        """Remove what was written, where it was not published."""
        self._threads.shutdown()
        for column in (*self._states.values(), self._ids):
            column.close()
        remove_tree(self._staging)
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _hold(folder: Path) -> int | None:
    """Lock a staging folder, as long as the file descriptor is open; None where the file system has no such locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _write(file: io.FileIO, *pieces: np.ndarray) -> int:
    """Pieces one after the other and their crc32c; all of it, or an error. Returns the number of bytes."""
    checksum = 0
    for piece in pieces:
        checksum = google_crc32c.extend(checksum, piece)
    parts = [piece.reshape(-1).view(np.uint8).data for piece in pieces if piece.nbytes]
    size = sum(piece.nbytes for piece in pieces) + CRC_BYTES
    if os.writev(file.fileno(), [*parts, checksum.to_bytes(CRC_BYTES, "little")]) != size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
    return size


def _read_back(folder: Path, rows: int) -> None:
    """Read the index and a chunk of each shard of an array, as every reader will."""
    array = open_array(folder)
    if array.rows != rows:
        raise ValueError(f"{folder} has {array.rows} rows")
    for shard in range(array.shards):
        array.read(shard * array.shard_rows, shard * array.shard_rows + 1)
