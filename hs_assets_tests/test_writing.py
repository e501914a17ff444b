"""A writer process, told what to write as a scheduler tells it: blocks, lines, and the end of either side."""

from __future__ import annotations

import errno
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hs_assets.capture.messages import BlockLayout, Filled, Lost, Part, WritingStats, WritingTask, decode, encode
from hs_assets.capture.writing import Writing
from hs_assets.wire.dump import DumpLayout
from hs_assets.wire.records import FailureRecord
from hs_assets.wire.rid import Kind, Rid
from hs_assets.wire.spool import Spool
from hs_assets_tests.dump_material import (
    FACTS,
    checksums,
    claimed,
    made_spool,
    make_rid,
    make_rows,
    names_in,
    tiny_tmpfs,
    wait_until,
)
from hs_assets_tests.test_assembly import assert_whole, open_files

BLOCKS, BLOCK_BYTES = 3, 4096
ROW_BYTES = DumpLayout(1, FACTS.residual_ids, FACTS.hidden_size, FACTS.dtype).row_bytes
LAYOUT = BlockLayout(BLOCK_BYTES, ROW_BYTES)


class Blocks:
    """The memory that is shared: puts rows into it, and gives the message that says what lies there."""

    def __init__(self, spool: Spool, spool_bytes: int = 1 << 30) -> None:
        self.spool = spool
        self.descriptor = os.memfd_create("test")
        os.ftruncate(self.descriptor, BLOCKS * BLOCK_BYTES)
        self.memory = mmap.mmap(self.descriptor, BLOCKS * BLOCK_BYTES)
        probe_facts = replace(FACTS, residual_ids=FACTS.residual_ids[:-1])
        self.task = WritingTask(0, 2, BLOCKS, BLOCK_BYTES, str(spool.root), spool_bytes, FACTS, probe_facts)

    def fill(self, block: int, *parts: tuple[Rid, np.ndarray, np.ndarray, int, int]) -> Filled:
        """Put rows begin .. end of requests into a block, one after another."""
        said, at = [], 0
        for rid, ids, states, begin, end in parts:
            rows = at, at + end - begin
            for where, array in (
                (LAYOUT.states(*rows), states[begin:end]),
                (LAYOUT.token_ids(*rows), ids[begin:end]),
                (LAYOUT.checksums(*rows), checksums(states[begin:end])),
            ):
                raw = np.ascontiguousarray(array).tobytes()
                assert len(raw) == where.stop - where.start
                self.memory[block * BLOCK_BYTES + where.start : block * BLOCK_BYTES + where.stop] = raw
            said.append(Part(str(rid), begin, at, end - begin, begins=True))
            at = rows[1]
        return Filled(block, False, tuple(said))

    def close(self) -> None:
        os.close(self.descriptor)


class Scheduler(Blocks):
    """The other side of the lines to a writer process, without a model."""

    def __init__(self, spool: Spool, spool_bytes: int) -> None:
        super().__init__(spool, spool_bytes)
        self.lines, lines = socket.socketpair()
        self.stats, stats = socket.socketpair()
        taken = self.descriptor, lines.fileno(), stats.fileno()
        command = [sys.executable, "-m", "hs_assets.capture.writing", *map(str, taken), self.task.as_json()]
        self.process = subprocess.Popen(command, pass_fds=taken)
        for one in (lines, stats):
            one.close()

    def send(self, message: Filled | Lost) -> None:
        self.lines.sendall(encode(message))

    def end(self) -> int:
        """Say that nothing more comes; returns the exit status."""
        self.lines.shutdown(socket.SHUT_WR)
        return self.process.wait(20)

    def said(self) -> list[WritingStats]:
        """All that it said of itself, once it ended."""
        with self.stats.makefile("rb") as lines:
            return [WritingStats(**json.loads(line)) for line in lines]


@contextmanager
def running(spool: Spool, spool_bytes: int = 1 << 30) -> Iterator[Scheduler]:
    scheduler = Scheduler(spool, spool_bytes)
    try:
        yield scheduler
    finally:
        scheduler.process.kill()
        scheduler.process.wait()
        for one in (scheduler.lines, scheduler.stats, scheduler):
            one.close()


@pytest.fixture
def scheduler(tmp_path) -> Iterator[Scheduler]:
    with running(made_spool(tmp_path / "spool")) as scheduler:
        yield scheduler


def request(blocks: Blocks, row: int, tokens: int) -> tuple[Rid, np.ndarray, np.ndarray]:
    rid = make_rid(tokens, row)
    claimed(blocks.spool, rid)
    return (rid, *make_rows(tokens, row))


def test_rows_of_a_block_do_not_overlap():
    assert LAYOUT.rows == BLOCK_BYTES // (ROW_BYTES + 8)
    whole = 0, LAYOUT.rows
    ends = [LAYOUT.states(*whole), LAYOUT.token_ids(*whole), LAYOUT.checksums(*whole)]
    assert [one.start for one in ends] == [0, *(one.stop for one in ends[:-1])]
    assert ends[-1].stop <= BLOCK_BYTES


@pytest.mark.parametrize(
    "message", [Filled(2, True, (Part("a", 3, 0, 7, False), Part("b", 0, 7, 1, True))), Lost("a", "why", "so")]
)
def test_messages_come_back_as_they_were_sent(message):
    line = encode(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode(line) == message


def test_a_task_comes_back_as_it_was_sent(tmp_path):
    task = WritingTask(1, 2, 3, 4, str(tmp_path), 5, FACTS, FACTS)
    assert WritingTask.from_json(task.as_json()) == task


def test_dumps_are_written_from_blocks_that_are_handed_back(scheduler):
    many = [request(scheduler, row, 40) for row in range(6)]
    for begin, end in ((0, 15), (15, 40)):
        for first in range(0, 6, 2):
            block = first // 2
            scheduler.send(scheduler.fill(block, *[(*many[row], begin, end) for row in (first, first + 1)]))
        handed_back = b""
        while len(handed_back) < BLOCKS:
            handed_back += scheduler.lines.recv(16)
        assert sorted(handed_back) == list(range(BLOCKS))
    for rid, ids, states in many:
        files = scheduler.spool.dump(str(rid))
        wait_until(files.commit.exists, "the dump is committed")
        assert_whole(files, ids, states, chunks=2)
    assert scheduler.end() == 0


def test_what_it_was_sent_is_written_though_the_scheduler_dies_at_once(scheduler):
    rid, ids, states = request(scheduler, 0, 20)
    scheduler.send(scheduler.fill(1, (rid, ids, states, 0, 20)))
    for one in (scheduler.lines, scheduler.stats):
        one.close()
    assert scheduler.process.wait(20) == 0
    assert_whole(scheduler.spool.dump(str(rid)), ids, states, chunks=1)


def test_signals_to_the_group_do_not_end_it(scheduler):
    assert scheduler.stats.recv(1)  # it runs
    for number in (signal.SIGTERM, signal.SIGINT):
        scheduler.process.send_signal(number)
    time.sleep(0.2)
    rid, ids, states = request(scheduler, 0, 20)
    scheduler.send(scheduler.fill(0, (rid, ids, states, 0, 20)))
    assert scheduler.end() == 0
    assert_whole(scheduler.spool.dump(str(rid)), ids, states, chunks=1)


def test_what_is_lost_is_told_after_the_rows_before_it(scheduler):
    rid, ids, states = request(scheduler, 0, 20)
    scheduler.send(scheduler.fill(0, (rid, ids, states, 0, 10)))
    scheduler.send(Lost(str(rid), "capture_backlog", "too much waits"))
    scheduler.send(scheduler.fill(1, (rid, ids, states, 10, 20)))
    assert scheduler.end() == 0
    files = scheduler.spool.dump(str(rid))
    assert FailureRecord.read(files.failure) == FailureRecord(str(rid), "capture_backlog", "too much waits")
    assert names_in(scheduler.spool.dumps) == sorted([files.claim.name, files.failure.name])


def test_a_canary_goes_to_the_folder_of_its_rank_and_its_probe_beside_it(scheduler):
    rid = Rid(Kind.CANARY, "0123abcd", "canary", 0, 20)
    (scheduler.spool.canary / "rank-0").mkdir()
    ids, states = make_rows(20)
    message = scheduler.fill(0, (rid, ids, states, 0, 20))
    scheduler.send(message)
    rows, probe = (0, 20), BlockLayout(BLOCK_BYTES, ROW_BYTES // len(FACTS.residual_ids) * (len(FACTS.residual_ids) - 1))
    seen = np.ascontiguousarray(states[:, :-1])
    for where, array in ((probe.states(*rows), seen), (probe.token_ids(*rows), ids), (probe.checksums(*rows), checksums(seen))):
        scheduler.memory[BLOCK_BYTES + where.start : BLOCK_BYTES + where.stop] = array.tobytes()
    scheduler.send(replace(message, block=1, probe=True))
    assert scheduler.end() == 0
    assert_whole(scheduler.spool.canary_dump(0, str(rid)), ids, states, chunks=1)
    folder = scheduler.spool.canary / "rank-0"
    assert (folder / f"{rid}.probe.commit.json").exists()
    assert seen.tobytes() in (folder / f"{rid}.probe.safetensors").read_bytes()


def test_it_counts_what_it_did(scheduler):
    rid, ids, states = request(scheduler, 0, 20)
    lost, *_ = request(scheduler, 1, 20)
    scheduler.send(scheduler.fill(0, (rid, ids, states, 0, 20)))
    scheduler.send(Lost(str(lost), "capture_error", "made"))
    assert scheduler.end() == 0
    stats = scheduler.said()[-1]
    size = scheduler.spool.dump(str(rid)).data.stat().st_size
    assert (stats.dumps, stats.tokens, stats.bytes, stats.failures) == (1, 20, size, {"capture_error": 1})
    assert stats.spool_high_water_bytes == size
    assert 0 < stats.writer_seconds < 10


def test_a_full_spool_fails_one_sample_and_hands_the_block_back(tmp_path):
    with running(
        made_spool(tmp_path / "spool"), spool_bytes=DumpLayout(50, FACTS.residual_ids, FACTS.hidden_size, FACTS.dtype).file_bytes
    ) as scheduler:
        big, small = request(scheduler, 0, 100), request(scheduler, 1, 10)
        scheduler.send(scheduler.fill(0, (*big, 0, 30)))
        scheduler.send(scheduler.fill(1, (*small, 0, 10)))
        assert scheduler.end() == 0
        assert sorted(scheduler.lines.recv(16)) == [0, 1]
        assert FailureRecord.read(scheduler.spool.dump(str(big[0])).failure).reason == "spool_full"
        assert_whole(scheduler.spool.dump(str(small[0])), small[1], small[2], chunks=1)


@pytest.fixture
def blocks(tmp_path) -> Iterator[Blocks]:
    made = Blocks(made_spool(tmp_path / "spool"))
    yield made
    made.close()


def do(writing: Writing, *messages: Filled | Lost) -> list[int]:
    """What a writer process does of each message, in this process; returns the blocks that were handed back."""
    handed_back: list[int] = []
    for message in messages:
        writing.do(message, handed_back.append)
    return handed_back


def writing_of(blocks: Blocks) -> Writing:
    return Writing(blocks.task, memoryview(blocks.memory))


def test_an_error_fails_its_sample_alone(blocks, monkeypatch):
    bad, good = (request(blocks, row, 12) for row in range(2))
    files, write = blocks.spool.dump(str(bad[0])), os.pwrite

    def broken(descriptor: int, data: bytes, offset: int) -> int:
        if Path(f"/proc/self/fd/{descriptor}").readlink() == files.data and len(data) == 8 * ROW_BYTES:
            raise RuntimeError("the write went wrong")
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", broken)
    messages = blocks.fill(0, (*bad, 0, 4)), blocks.fill(1, (*bad, 4, 12), (*good, 0, 12))
    assert do(writing_of(blocks), *messages) == [0, 1]
    error = "RuntimeError('the write went wrong')"
    assert FailureRecord.read(files.failure) == FailureRecord(files.rid, "capture_error", error)
    assert not files.data.exists()
    assert_whole(blocks.spool.dump(str(good[0])), good[1], good[2], chunks=1)


def test_rows_out_of_order_are_told(blocks):
    one = request(blocks, 0, 12)
    messages = [blocks.fill(number, (*one, *rows)) for number, rows in enumerate([(0, 4), (8, 12), (4, 8)])]
    assert do(writing_of(blocks), *messages) == [0, 1, 2]
    files = blocks.spool.dump(str(one[0]))
    assert FailureRecord.read(files.failure).reason == "rows_out_of_order"
    assert names_in(blocks.spool.dumps) == sorted([files.claim.name, files.failure.name])


def test_a_request_comes_again_after_its_commit(blocks):
    one = request(blocks, 0, 12)
    message = blocks.fill(0, (*one, 0, 12))
    assert do(writing_of(blocks), message, message) == [0, 0]
    assert_whole(blocks.spool.dump(str(one[0])), one[1], one[2], chunks=1)


def test_dumps_that_were_given_up_are_closed(blocks):
    one, writing = request(blocks, 0, 12), writing_of(blocks)
    do(writing, blocks.fill(0, (*one, 0, 4)))
    files = blocks.spool.dump(str(one[0]))
    assert open_files(blocks.spool.dumps) == [str(files.data)]
    files.free()
    writing.stats()
    assert open_files(blocks.spool.dumps) == []
    assert names_in(blocks.spool.dumps) == []


@pytest.mark.parametrize("what", ["the data", "not even its failure"])
def test_a_disk_without_room(tmp_path, monkeypatch, what):
    with tiny_tmpfs(tmp_path / "shm") as mounted:
        blocks, hog = Blocks(made_spool(tmp_path / "shm" / "spool")), tmp_path / "shm" / "hog"
        lost, kept = request(blocks, 0, 12), request(blocks, 1, 12)
        if not mounted:
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            def no_room(*_: object) -> None:
                if hog.exists():
                    raise full

            pwrite, write = os.pwrite, FailureRecord.write
            monkeypatch.setattr(os, "pwrite", lambda *a: no_room() or pwrite(*a))
            if what != "the data":
                monkeypatch.setattr(FailureRecord, "write", lambda *a: no_room() or write(*a))
            hog.touch()
        else:
            with pytest.raises(OSError, match="No space left"):
                hog.write_bytes(bytes(2 << 20))
            if what == "the data":
                hog.write_bytes(bytes(hog.stat().st_size - 8192))  # room for a record, not for the dump
        writing = writing_of(blocks)
        assert do(writing, blocks.fill(0, (*lost, 0, 12))) == [0]
        files = blocks.spool.dump(str(lost[0]))
        assert files.failure.exists() == (what == "the data")
        assert not files.commit.exists()
        hog.unlink()
        assert do(writing, blocks.fill(1, (*kept, 0, 12))) == [1]
        assert_whole(blocks.spool.dump(str(kept[0])), kept[1], kept[2], chunks=1)
        blocks.close()
