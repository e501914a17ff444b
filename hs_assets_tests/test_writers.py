"""The writer threads: each request in the order of its rows, each failure told, and no thread lost to any of them."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from hs_assets.capture import writers as writers_module
from hs_assets.capture.writers import Failed, Rows, Writers
from hs_assets.wire.records import CommitRecord, FailureRecord
from hs_assets.wire.rid import Rid
from hs_assets.wire.spool import DumpFiles, Spool
from hs_assets_tests.dump_material import (
    FACTS,
    claimed,
    made_spool,
    make_assembly,
    make_chunk,
    make_rid,
    make_rows,
    names_in,
    tiny_tmpfs,
    wait_until,
)
from hs_assets_tests.test_assembly import assert_whole, open_files

TOKENS = 12


@pytest.fixture
def spool(tmp_path):
    return made_spool(tmp_path / "spool")


class Chunks:
    """Makes the jobs of one request, and notes which thread wrote them and how often their memory was handed back."""

    def __init__(self, files: DumpFiles, rid: Rid, seed: int = 0) -> None:
        self.files, self.rid = files, rid
        self.token_ids, self.states = make_rows(rid.length, seed)
        self.threads: list[str] = []
        self.released: list[int] = []

    def job(self, begin: int, end: int) -> Rows:
        chunk = make_chunk(self.token_ids[begin:end], self.states[begin:end])

        def release() -> None:
            self.threads.append(threading.current_thread().name)
            self.released.append(begin)

        return Rows(self.files, self.rid, begin, chunk, release)


def make_writers(threads: int, spool: Spool) -> Writers:
    return Writers(threads, lambda: make_assembly(FACTS, spool))


def answered(files: DumpFiles) -> bool:
    return files.commit.exists() or files.failure.exists()


def test_many_requests_over_four_threads(spool):
    writers = make_writers(4, spool)
    requests = []
    for row in range(40):
        rid = make_rid(TOKENS, row)
        requests.append(Chunks(claimed(spool, rid), rid, row))
    for begin, end in ((0, 5), (5, 6), (6, TOKENS)):
        for request in requests:
            writers.put(request.job(begin, end))
    wait_until(lambda: all(len(request.released) == 3 for request in requests), "all chunks are written")
    for request in requests:
        assert_whole(request.files, request.token_ids, request.states, chunks=3)
        assert request.released == [0, 5, 6]
        assert len(set(request.threads)) == 1, "a request went to more than one thread"
    assert {request.threads[0] for request in requests} == {f"hs-assets-writer-{number}" for number in range(4)}


def test_a_failure_keeps_its_place_among_the_rows(spool):
    rid = make_rid(TOKENS)
    request = Chunks(claimed(spool, rid), rid)
    writers = make_writers(2, spool)
    writers.put(request.job(0, 4))
    writers.put(Failed(request.files, rid, "capture_backlog", "too much waits"))
    writers.put(request.job(4, TOKENS))
    wait_until(lambda: request.released == [0, 4], "both chunks are handed back")
    assert FailureRecord.read(request.files.failure) == FailureRecord(str(rid), "capture_backlog", "too much waits")
    assert names_in(spool.dumps) == sorted([request.files.claim.name, request.files.failure.name])


def test_an_error_fails_its_sample_and_the_thread_lives_on(spool, monkeypatch):
    rids = [make_rid(TOKENS, row) for row in range(2)]
    bad, good = (Chunks(claimed(spool, rid), rid, rid.row) for rid in rids)
    write = os.pwrite

    def broken(descriptor: int, data: bytes, offset: int) -> int:
        if Path(f"/proc/self/fd/{descriptor}").readlink() == bad.files.data and len(data) == bad.states[4:].nbytes:
            raise RuntimeError("the write went wrong")
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", broken)
    writers = make_writers(1, spool)
    for job in (bad.job(0, 4), bad.job(4, TOKENS), good.job(0, TOKENS)):
        writers.put(job)
    wait_until(lambda: good.released == [0], "the next sample is written")
    assert FailureRecord.read(bad.files.failure) == FailureRecord(
        str(bad.rid), "capture_error", "RuntimeError('the write went wrong')"
    )
    assert bad.released == [0, 4]
    assert not bad.files.data.exists()
    assert_whole(good.files, good.token_ids, good.states, chunks=1)


def test_rows_out_of_order_are_told(spool):
    rid = make_rid(TOKENS)
    request = Chunks(claimed(spool, rid), rid)
    writers = make_writers(1, spool)
    for begin, end in ((0, 4), (8, TOKENS), (4, 8)):
        writers.put(request.job(begin, end))
    wait_until(lambda: request.released == [0, 8, 4], "all chunks are handed back")
    assert FailureRecord.read(request.files.failure).reason == "rows_out_of_order"
    assert names_in(spool.dumps) == sorted([request.files.claim.name, request.files.failure.name])


def test_a_spool_that_was_removed(tmp_path, spool):
    gone, here = make_rid(TOKENS, 0), make_rid(TOKENS, 1)
    lost, kept = Chunks(DumpFiles(tmp_path / "gone", str(gone)), gone), Chunks(claimed(spool, here), here)
    writers = make_writers(1, spool)
    writers.put(lost.job(0, TOKENS))
    writers.put(kept.job(0, TOKENS))
    wait_until(lambda: kept.released == [0], "the next sample is written")
    assert lost.released == [0]
    assert not (tmp_path / "gone").exists()
    assert_whole(kept.files, kept.token_ids, kept.states, chunks=1)


def test_a_full_disk(tmp_path, monkeypatch):
    big, small = make_rid(40_000, 0), make_rid(TOKENS, 1)
    with tiny_tmpfs(tmp_path / "shm") as mounted:
        if not mounted:
            write = os.pwrite

            def refuse(descriptor: int, data: bytes, offset: int) -> int:
                if offset > 1 << 20:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return write(descriptor, data, offset)

            monkeypatch.setattr(os, "pwrite", refuse)
        spool = made_spool(tmp_path / "shm" / "spool")
        lost, kept = Chunks(claimed(spool, big), big), Chunks(claimed(spool, small), small)
        writers = make_writers(1, spool)
        writers.put(lost.job(0, 30_000))
        writers.put(lost.job(30_000, 40_000))
        writers.put(kept.job(0, TOKENS))
        wait_until(lambda: kept.released == [0], "the next sample is written")
        failure = FailureRecord.read(lost.files.failure)
        assert failure.reason == "spool_full"
        assert "No space left on device" in failure.detail
        assert lost.released == [0, 30_000]
        assert not lost.files.data.exists()
        assert_whole(kept.files, kept.token_ids, kept.states, chunks=1)


def test_a_spool_without_room_for_a_record_costs_no_thread(tmp_path, monkeypatch):
    """Not even the failure can be told; once there is room again the thread must still be there to write."""
    first, second = make_rid(TOKENS, 0), make_rid(TOKENS, 1)
    with tiny_tmpfs(tmp_path / "shm") as mounted:
        spool = made_spool(tmp_path / "shm" / "spool")
        lost, kept = Chunks(claimed(spool, first), first), Chunks(claimed(spool, second), second)
        hog = tmp_path / "shm" / "hog"
        if mounted:
            with pytest.raises(OSError, match="No space left"):
                hog.write_bytes(bytes(2 << 20))
        else:
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            def no_room(*_: object) -> None:
                if hog.exists():
                    raise full

            pwrite, write = os.pwrite, FailureRecord.write
            monkeypatch.setattr(os, "pwrite", lambda *a: no_room() or pwrite(*a))
            monkeypatch.setattr(FailureRecord, "write", lambda *a: no_room() or write(*a))
            hog.touch()
        writers = make_writers(1, spool)
        writers.put(lost.job(0, TOKENS))
        wait_until(lambda: lost.released == [0], "the first sample is given up")
        writers.put(Failed(lost.files, first, "capture_error", "once more"))
        hog.unlink()
        writers.put(kept.job(0, TOKENS))
        wait_until(lambda: kept.released == [0], "the next sample is written", seconds=2)
        assert_whole(kept.files, kept.token_ids, kept.states, chunks=1)
        assert not lost.files.commit.exists()


def test_idle_threads_close_the_dumps_that_were_given_up(spool, monkeypatch):
    monkeypatch.setattr(writers_module, "_SWEEP_SECONDS", 0.01)
    rid = make_rid(TOKENS)
    request = Chunks(claimed(spool, rid), rid)
    writers = make_writers(1, spool)
    writers.put(request.job(0, 4))
    wait_until(lambda: request.released == [0], "the first chunk is written")
    assert open_files(spool.dumps) == [str(request.files.data)]
    request.files.free()
    wait_until(lambda: open_files(spool.dumps) == [], "the dump is closed")
    assert names_in(spool.dumps) == []


def test_a_request_comes_again_after_its_commit(spool):
    rid = make_rid(TOKENS)
    request = Chunks(claimed(spool, rid), rid)
    writers = make_writers(1, spool)
    writers.put(request.job(0, TOKENS))
    writers.put(request.job(0, TOKENS))
    wait_until(lambda: request.released == [0, 0], "both prefills are handed back")
    assert CommitRecord.read(request.files.commit).chunks == 1
    assert_whole(request.files, request.token_ids, request.states, chunks=1)
