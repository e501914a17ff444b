"""One dump after another, chunk by chunk: take the room, write the rows, and commit when the last one is there."""

from __future__ import annotations

import errno
import hashlib
import os
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field

from hs_assets.capture.room import Room
from hs_assets.wire.dump import TOKEN_BYTES, WORD_BYTES, DumpLayout
from hs_assets.wire.records import CommitRecord, FailureRecord
from hs_assets.wire.rid import Kind, Rid
from hs_assets.wire.spool import DumpFiles


@dataclass(frozen=True, slots=True)
class DumpFacts:
    """What all dumps of a server have in common. ``dtype`` is the safetensors name."""

    server: str
    state_fingerprint: str
    residual_ids: tuple[int, ...]
    hidden_size: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of one request as bytes in host memory.

    ``token_ids`` int32 [rows], ``checksums`` int32 [rows], ``states`` the server's dtype [rows, K+1, H].
    """

    token_ids: memoryview
    checksums: memoryview
    states: memoryview
    begins: bool = True
    """Whether it is the first part of its prefill batch, or one more of the same."""


@dataclass(slots=True)
class _Open:
    """A dump being written; the checksums run over what was written so far."""

    files: DumpFiles
    rid: Rid
    layout: DumpLayout
    descriptor: int
    rows: int = 0
    chunks: int = 0
    checksums_crc32: int = 0
    ids_sha256: hashlib._Hash = field(default_factory=hashlib.sha256)


class Assembly:
    """The dumps that one writer has open. Not thread-safe: a request always goes to the same writer.

    What it did so far is counted: ``dumps``, their ``tokens`` and ``bytes``, and ``failures`` by reason.
    """

    def __init__(self, facts: DumpFacts, room: Room) -> None:
        self._facts = facts
        self._room = room
        self._open: dict[str, _Open] = {}
        self.dumps = self.tokens = self.bytes = 0
        self.failures: Counter[str] = Counter()

    def add(self, files: DumpFiles, rid: Rid, prefix: int, chunk: Chunk) -> None:
        """Write the rows of one chunk; commit the dump with the last one.

        A chunk with prefix 0 begins the dump anew (a retracted request is prefilled again). One that does not continue
        where the last ended fails the dump: nothing is ever written with a gap. A sample that nobody claims is not
        written: its client is gone.

        Arguments:
            files: where the dump lies.
            rid: the request, with the length of the whole prompt.
            prefix: number of prompt tokens before this chunk.

        Raises:
            OSError: the spool is full or cannot be written; the caller calls `fail`.
        """
        if not _awaited(files, rid):
            self._discard(files.rid)
            return
        rows = len(chunk.token_ids) // TOKEN_BYTES
        if prefix == 0:
            self._discard(files.rid)
            self._begin(files, rid)
        dump = self._open.get(files.rid)
        if dump is None or dump.rows != prefix or prefix + rows > dump.layout.tokens:
            had = "no rows" if dump is None else f"{dump.rows} rows"
            self.fail(
                files, rid, "rows_out_of_order", f"a chunk of tokens {prefix}..{prefix + rows} of {rid.length} came after {had}"
            )
            return
        sizes = len(chunk.token_ids), len(chunk.checksums), len(chunk.states)
        if sizes != (rows * TOKEN_BYTES, rows * WORD_BYTES, rows * dump.layout.row_bytes):
            self.fail(files, rid, "capture_error", f"ids, checksums and states came with {sizes} bytes for {rows} rows")
            return
        if os.fstat(dump.descriptor).st_nlink == 0:
            self._discard(files.rid)
            return
        _write_all(dump.descriptor, chunk.states, dump.layout.row_offset(prefix))
        _write_all(dump.descriptor, chunk.token_ids, dump.layout.token_ids_offset + prefix * TOKEN_BYTES)
        dump.checksums_crc32 = zlib.crc32(chunk.checksums, dump.checksums_crc32)
        dump.ids_sha256.update(chunk.token_ids)
        dump.rows += rows
        dump.chunks += chunk.begins
        if dump.rows == dump.layout.tokens:
            self._commit(dump)

    def fail(self, files: DumpFiles, rid: Rid, reason: str, detail: str) -> None:
        """Leave a failure record instead of a dump, and free what was written; a dump that is committed stays."""
        if not _awaited(files, rid):
            self._discard(files.rid)
            return
        self.failures[reason] += 1
        self._discard(files.rid)
        files.data.unlink(missing_ok=True)
        FailureRecord(files.rid, reason, detail).write(files.failure)

    def sweep(self) -> None:
        """Close the dumps whose files the client removed: their requests were given up."""
        for rid, dump in list(self._open.items()):
            if os.fstat(dump.descriptor).st_nlink == 0:
                self._discard(rid)

    def _begin(self, files: DumpFiles, rid: Rid) -> None:
        facts = self._facts
        layout = DumpLayout(rid.length, facts.residual_ids, facts.hidden_size, facts.dtype)
        descriptor = os.open(files.data, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self._open[files.rid] = _Open(files, rid, layout, descriptor)
        if rid.kind is Kind.SAMPLE:
            self._room.reserve(descriptor, layout.file_bytes)
        else:
            os.ftruncate(descriptor, layout.file_bytes)
        os.pwrite(descriptor, layout.header(files.rid), 0)

    def _commit(self, dump: _Open) -> None:
        facts, layout = self._facts, dump.layout
        self._discard(dump.files.rid)
        CommitRecord(
            rid=dump.files.rid,
            server=facts.server,
            state_fingerprint=facts.state_fingerprint,
            residual_ids=facts.residual_ids,
            tokens=layout.tokens,
            hidden_size=layout.hidden_size,
            dtype=layout.dtype,
            bytes=layout.file_bytes,
            row_checksums_crc32=dump.checksums_crc32,
            token_sha256=dump.ids_sha256.hexdigest(),
            chunks=dump.chunks,
            committed_at=time.time(),
        ).write(dump.files.commit)
        self.dumps += 1
        self.tokens += layout.tokens
        self.bytes += layout.file_bytes

        if not _claimed(dump.files, dump.rid):  # its client went away at this very moment
            dump.files.commit.unlink(missing_ok=True)
            dump.files.data.unlink(missing_ok=True)

    def _discard(self, rid: str) -> None:
        dump = self._open.pop(rid, None)
        if dump is None:
            return
        os.close(dump.descriptor)
        if not _claimed(dump.files, dump.rid):
            dump.files.data.unlink(missing_ok=True)


def _claimed(files: DumpFiles, rid: Rid) -> bool:
    """Whether somebody waits for the dump; the canary claims nothing."""
    return rid.kind is Kind.CANARY or files.claim.exists()


def _awaited(files: DumpFiles, rid: Rid) -> bool:
    """Whether somebody waits for the dump, and was not told yet."""
    return _claimed(files, rid) and not files.commit.exists() and not files.failure.exists()


def failure_reason(error: Exception) -> str:
    """The ledger's name for an exception raised while a dump was written."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "spool_full" if full else "capture_error"


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)
