"""A generation: the states of some samples, written aside shard by shard and published at once.

Memory: one shard of each array, whatever the number of samples. A shard is written once, whole and aligned; only the last
one of a generation is shorter. Each array has a thread of its own, so layers are checksummed, compressed and written together.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import zarr
from numcodecs import blosc
from zarr.codecs import BloscCodec, Crc32cCodec

import hs_assets.store.dtype  # noqa: F401  (zarr learns bfloat16)
from hs_assets.errors import StoreError
from hs_assets.store.arrays import BFLOAT16, CRC_BYTES, NO_CHUNK, crc32c
from hs_assets.store.layout import StorePaths, array_name, publish_folder, remove_tree

STAGING_PREFIX = ".staging-"
_BLOSC_BLOCK = 1 << 19


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """What all arrays of a generation have in common. ``dtype`` is BF16, F16 or F32; lengths are in tokens.

    ``compression``: ``blosc`` is zstd at level 1 behind a byte shuffle, in blocks of 512 KiB: about 0.7 of the size of real
    states, for about 3.5 CPU seconds a GB written and 1 read.
    """

    hidden_size: int
    dtype: str
    chunk_tokens: int
    shard_tokens: int
    compression: Literal["none", "blosc"] = "none"


class _Column:
    """One array [S, width] that grows at its end: a buffer of one shard, written when it is full.

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
        self._folder = folder
        self._chunk = chunk
        self._compressed = compressed
        self._stored = np.dtype(np.uint16) if dtype == BFLOAT16 else dtype
        self._fill = np.asarray(self._array.fill_value, dtype).view(self._stored)
        self._buffer = np.empty((shard, *tail), self._stored)
        self._filled = 0
        self._rows = 0

    def append(self, rows: np.ndarray) -> None:
        rows = rows.view(self._stored)
        while len(rows):
            take = min(len(rows), len(self._buffer) - self._filled)
            self._buffer[self._filled : self._filled + take] = rows[:take]
            self._filled += take
            rows = rows[take:]
            if self._filled == len(self._buffer):
                self.flush()

    def flush(self) -> None:
        """Write what is buffered. A column ends with this: a shard is never written twice."""
        if not self._filled:
            return
        rows = self.rows
        self._array.resize((rows, *self._array.shape[1:]))
        self._write_shard(self._folder / self.shard_paths[-1])
        self._rows, self._filled = rows, 0

    def _write_shard(self, path: Path) -> None:
        """The chunks, each with its crc32c; then (offset, bytes) of each, all ones where there is none; its crc32c."""
        count = -(-self._filled // self._chunk)
        self._buffer[self._filled : count * self._chunk] = self._fill
        index = np.full((len(self._buffer) // self._chunk, 2), NO_CHUNK, "<u8")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for number in range(count):
                chunk = self._buffer[number * self._chunk : (number + 1) * self._chunk]
                if self._compressed:
                    chunk = np.frombuffer(blosc.compress(chunk, b"zstd", 1, blosc.SHUFFLE, _BLOSC_BLOCK), np.uint8)
                index[number] = file.tell(), chunk.nbytes + CRC_BYTES
                file.write(chunk.data)
                file.write(crc32c(chunk))
            file.write(index.data)
            file.write(crc32c(index))

    @property
    def rows(self) -> int:
        return self._rows + self._filled

    @property
    def shard_paths(self) -> list[str]:
        """The keys of the shards that must be there once all is written."""
        zeros = "/0" * (self._array.ndim - 1)
        return [f"{self._array.basename}/c/{i}{zeros}" for i in range(-(-self.rows // len(self._buffer)))]


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
        self._dtype = dtype = {"BF16": BFLOAT16, "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}[shape.dtype]
        chunk, shard, compressed = shape.chunk_tokens, shape.shard_tokens, shape.compression != "none"
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
        list(self._threads.map(_Column.flush, columns))
        self._threads.shutdown()
        missing = [key for column in columns for key in column.shard_paths if not _has_bytes(self._staging / key)]
        if missing or {column.rows for column in columns} != {self._offsets[-1]}:
            raise StoreError(
                "a generation is not whole",
                where=self._staging,
                expected=f"{self._offsets[-1]} rows in every array",
                got=f"{[column.rows for column in columns]} rows, shards missing: {missing}",
            )
        publish_folder(self._staging, self._destination)
        self._release()
        return self.name

    def discard(self) -> None:
        """Remove what was written, where it was not published."""
        self._threads.shutdown()
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


def _has_bytes(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0
