"""The writer process, told what to write as a scheduler tells it: blocks, lines, and the end of either side."""

from __future__ import annotations

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

import numpy as np
import pytest

from hs_assets.capture.messages import BlockLayout, Filled, Lost, Part, WritingStats, WritingTask, decode, encode
from hs_assets.wire.dump import DumpLayout
from hs_assets.wire.records import FailureRecord
from hs_assets.wire.rid import Kind, Rid
from hs_assets.wire.spool import Spool
from hs_assets_tests.dump_material import FACTS, checksums, claimed, made_spool, make_rid, make_rows, names_in, wait_until
from hs_assets_tests.test_assembly import assert_whole

BLOCKS, BLOCK_BYTES = 3, 4096
ROW_BYTES = DumpLayout(1, FACTS.residual_ids, FACTS.hidden_size, FACTS.dtype).row_bytes
LAYOUT = BlockLayout(BLOCK_BYTES, ROW_BYTES)


class Scheduler:
    """The other side of the line, without a model."""

    def __init__(self, spool: Spool, spool_bytes: int) -> None:
        self.spool = spool
        memory = os.memfd_create("test")
        os.ftruncate(memory, BLOCKS * BLOCK_BYTES)
        self.memory = mmap.mmap(memory, BLOCKS * BLOCK_BYTES)
        self.lines, lines = socket.socketpair()
        self.stats, stats = socket.socketpair()
        probe_facts = replace(FACTS, residual_ids=FACTS.residual_ids[:-1])
        task = WritingTask(0, BLOCKS, BLOCK_BYTES, 2, str(spool.root), spool_bytes, FACTS, probe_facts)
        taken = memory, lines.fileno(), stats.fileno()
        command = [sys.executable, "-m", "hs_assets.capture.writing", *map(str, taken), task.as_json()]
        self.process = subprocess.Popen(command, pass_fds=taken)
        for one in (lines, stats):
            one.close()
        os.close(memory)

    def fill(self, block: int, parts: list[tuple[Rid, np.ndarray, np.ndarray, int, int]]) -> Filled:
        """Put rows begin .. end of requests into a block, one after another; returns the message that says so."""
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
        for one in (scheduler.lines, scheduler.stats):
            one.close()


@pytest.fixture
def scheduler(tmp_path) -> Iterator[Scheduler]:
    with running(made_spool(tmp_path / "spool")) as scheduler:
        yield scheduler


def request(scheduler: Scheduler, row: int, tokens: int) -> tuple[Rid, np.ndarray, np.ndarray]:
    rid = make_rid(tokens, row)
    claimed(scheduler.spool, rid)
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
            scheduler.send(scheduler.fill(block, [(*many[row], begin, end) for row in (first, first + 1)]))
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
    scheduler.send(scheduler.fill(1, [(rid, ids, states, 0, 20)]))
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
    scheduler.send(scheduler.fill(0, [(rid, ids, states, 0, 20)]))
    assert scheduler.end() == 0
    assert_whole(scheduler.spool.dump(str(rid)), ids, states, chunks=1)


def test_what_is_lost_is_told_after_the_rows_before_it(scheduler):
    rid, ids, states = request(scheduler, 0, 20)
    scheduler.send(scheduler.fill(0, [(rid, ids, states, 0, 10)]))
    scheduler.send(Lost(str(rid), "capture_backlog", "too much waits"))
    scheduler.send(scheduler.fill(1, [(rid, ids, states, 10, 20)]))
    assert scheduler.end() == 0
    files = scheduler.spool.dump(str(rid))
    assert FailureRecord.read(files.failure) == FailureRecord(str(rid), "capture_backlog", "too much waits")
    assert names_in(scheduler.spool.dumps) == sorted([files.claim.name, files.failure.name])


def test_a_canary_goes_to_the_folder_of_its_rank_and_its_probe_beside_it(scheduler):
    rid = Rid(Kind.CANARY, "0123abcd", "canary", 0, 20)
    (scheduler.spool.canary / "rank-0").mkdir()
    ids, states = make_rows(20)
    message = scheduler.fill(0, [(rid, ids, states, 0, 20)])
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
    scheduler.send(scheduler.fill(0, [(rid, ids, states, 0, 20)]))
    scheduler.send(Lost(str(lost), "capture_error", "made"))
    assert scheduler.end() == 0
    stats = scheduler.said()[-1]
    size = scheduler.spool.dump(str(rid)).data.stat().st_size
    assert (stats.dumps, stats.tokens, stats.bytes, stats.failures) == (1, 20, size, {"capture_error": 1})
    assert (stats.pending_bytes, stats.pending_high_water_bytes, stats.spool_high_water_bytes) == (0, 20 * ROW_BYTES, size)
    assert stats.threads_alive == 2
    assert 0 < stats.writer_seconds < 10


def test_a_full_spool_fails_one_sample_and_hands_the_block_back(tmp_path):
    with running(
        made_spool(tmp_path / "spool"), spool_bytes=DumpLayout(50, FACTS.residual_ids, FACTS.hidden_size, FACTS.dtype).file_bytes
    ) as scheduler:
        big, small = request(scheduler, 0, 100), request(scheduler, 1, 10)
        scheduler.send(scheduler.fill(0, [(*big, 0, 30)]))
        scheduler.send(scheduler.fill(1, [(*small, 0, 10)]))
        assert scheduler.end() == 0
        assert sorted(scheduler.lines.recv(16)) == [0, 1]
        assert FailureRecord.read(scheduler.spool.dump(str(big[0])).failure).reason == "spool_full"
        assert_whole(scheduler.spool.dump(str(small[0])), small[1], small[2], chunks=1)
