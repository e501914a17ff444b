"""What tests of dumps share: a server's facts, made-up states cut into chunks, and a spool on a disk of one megabyte."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from hs_assets.capture.assembly import Assembly, Chunk, DumpFacts
from hs_assets.capture.room import Room
from hs_assets.wire.records import ClaimRecord
from hs_assets.wire.rid import Kind, Rid
from hs_assets.wire.spool import DumpFiles, Spool

RESIDUAL_IDS, HIDDEN_SIZE = (3, 31, 61), 4
FACTS = DumpFacts("server-1", "fingerprint-1", RESIDUAL_IDS, HIDDEN_SIZE, "F32")
SLOTS = len(RESIDUAL_IDS)


def make_rid(length: int, row: int = 0, nonce: str = "0123abcd") -> Rid:
    return Rid(Kind.SAMPLE, nonce, "demo-00000", row, length)


def make_rows(tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Token ids int32 [T] and states float32 [T, K+1, H]; no two rows are alike."""
    random = np.random.default_rng(seed)
    return (
        random.integers(0, 160_000, tokens).astype("<i4"),
        random.standard_normal((tokens, SLOTS, HIDDEN_SIZE)).astype("<f4"),
    )


def raw(array: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(array).tobytes())


def checksums(states: np.ndarray) -> np.ndarray:
    """The checksum of each row, uint32 [T], by its definition and without an overflow."""
    words = np.ascontiguousarray(states).reshape(len(states), -1).view("<u4").astype(np.uint64)
    return ((words * (2 * np.arange(words.shape[1], dtype=np.uint64) + 1)).sum(axis=1) % 2**32).astype("<u4")


def checksums_crc32(states: np.ndarray) -> int:
    """What the commit record says of the states."""
    return zlib.crc32(checksums(states).tobytes())


def make_chunk(token_ids: np.ndarray, states: np.ndarray) -> Chunk:
    return Chunk(raw(token_ids), raw(checksums(states)), raw(states))


def make_assembly(facts: DumpFacts, spool: Spool, limit: int = 1 << 40) -> Assembly:
    return Assembly(facts, Room(spool, limit))


def add_chunks(
    assembly: Assembly, files: DumpFiles, rid: Rid, token_ids: np.ndarray, states: np.ndarray, ends: Sequence[int], begin: int = 0
) -> None:
    """Give an assembly the rows `begin` .. ends[-1], a chunk up to each of `ends`."""
    for end in ends:
        assembly.add(files, rid, begin, make_chunk(token_ids[begin:end], states[begin:end]))
        begin = end


def made_spool(root: Path) -> Spool:
    spool = Spool(root)
    spool.make()
    return spool


def claimed(spool: Spool, rid: Rid) -> DumpFiles:
    """The files of a request that a client waits for."""
    files = spool.dump(str(rid))
    ClaimRecord(files.rid, 0, os.getpid(), 0.0).write(files.claim)
    return files


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def tiny_tmpfs(folder: Path) -> Iterator[bool]:
    """A tmpfs of one megabyte at `folder` as long as this is entered; False where this user or system may mount none."""
    folder.mkdir()
    command = [shutil.which("mount") or "false", "-t", "tmpfs", "-o", "size=1m", "none", folder]
    mounted = subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", folder], check=True)


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Poll until `condition()` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {seconds:.0f} s for: {what}")
        time.sleep(0.002)
