"""Bytes in flight stay below the budget, over threads and processes, and what dead processes left is found."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest

from hs_assets.errors import SpoolError
from hs_assets.serving.admission import KEPT, Admission, adopt, spool_use, sweep
from hs_assets.serving.state import lives, started
from hs_assets.wire.records import ClaimRecord
from hs_assets.wire.rid import new_rid
from hs_assets.wire.spool import DumpFiles, Spool


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    made = Spool(tmp_path)
    made.make()
    return made


def dump(spool: Spool, row: int) -> DumpFiles:
    return spool.dump(str(new_rid("p", row, 10)))


def fill(files: DumpFiles) -> None:
    """The files of a whole dump, as far as admission looks at them."""
    for path in (files.commit, files.answer):
        path.write_text("{}")


def claim_many(root: str, budget: int, size: int, count: int, seen: list[int]) -> None:
    spool = Spool(Path(root))
    admission = Admission(spool, budget, budget, lambda _: None)
    for row in range(count):
        files = dump(spool, row)
        admission.claim(files, size, threading.Event())
        seen.append(spool_use(spool.root)[1])
        time.sleep(0.001)
        files.free()


def test_many_processes_never_exceed_the_budget(spool: Spool) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        seen = manager.list()
        workers = [context.Process(target=claim_many, args=(str(spool.root), 1000, 300, 25, seen)) for _ in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
            assert worker.exitcode == 0
        assert len(seen) == 75
        assert max(seen) <= 1000
    assert spool_use(spool.root) == (0, 0)


def test_a_full_spool_waits_says_so_and_goes_on(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hs_assets.serving.admission._SAY_SECONDS", 0.1)
    said: list[str] = []
    admission = Admission(spool, 1000, 1000, said.append)
    first, second = dump(spool, 0), dump(spool, 1)
    admission.claim(first, 800, threading.Event())
    waiting = threading.Thread(target=admission.claim, args=(second, 300, threading.Event()))
    waiting.start()
    time.sleep(0.4)
    assert admission.blocked
    first.free()
    waiting.join(5)
    assert not waiting.is_alive()
    assert not admission.blocked
    assert "the spool is full: a request has waited" in said[0]
    assert "for 300 bytes; 800 of 1,000 are taken, 800 of 1,000 not written yet" in said[0]
    assert admission.waited_seconds > 0.3
    assert admission.high_water_bytes == 800


def test_dumps_that_are_written_fill_the_spool_until_they_are_freed(spool: Spool) -> None:
    """As where whoever stores them is slower than the server."""
    admission, entered = Admission(spool, 1000, 1000, print), threading.Event()
    first, second = dump(spool, 0), dump(spool, 1)
    admission.claim(first, 800, threading.Event())
    fill(first)

    def claim_second() -> None:
        admission.claim(second, 300, threading.Event())
        entered.set()

    waiting = threading.Thread(target=claim_second)
    waiting.start()
    assert not entered.wait(0.3)
    assert spool_use(spool.root) == (1, 800)
    first.free()
    assert entered.wait(5)
    waiting.join()
    assert spool_use(spool.root) == (1, 300)


def test_what_a_claim_says_counts_and_the_size_of_a_dump_that_nobody_claims(spool: Spool) -> None:
    claimed, orphan = dump(spool, 0), dump(spool, 1)
    Admission(spool, 1000, 1000, print).claim(claimed, 100, threading.Event())
    claimed.data.write_bytes(bytes(60))
    assert spool_use(spool.root) == (1, 100)
    orphan.data.write_bytes(bytes(640))
    assert spool_use(spool.root) == (2, 740)


def test_what_is_not_written_yet_has_a_budget_of_its_own(spool: Spool) -> None:
    admission, entered = Admission(spool, 1000, 100, print), threading.Event()
    first, second, third = (dump(spool, row) for row in range(3))
    admission.claim(first, 400, entered)  # larger than the whole backlog: alone

    def claim_second() -> None:
        admission.claim(second, 50, threading.Event())
        entered.set()

    waiting = threading.Thread(target=claim_second)
    waiting.start()
    assert not entered.wait(0.3)
    fill(first)  # it is written, and still in the spool
    assert entered.wait(5)
    admission.claim(third, 50, threading.Event())
    assert spool_use(spool.root) == (3, 500)


def test_one_dump_larger_than_the_budget_is_refused_at_once(spool: Spool) -> None:
    with pytest.raises(SpoolError, match=r"larger than the spool(.|\n)*at most 1,000 bytes(.|\n)*1,001 bytes"):
        Admission(spool, 1000, 1000, print).claim(dump(spool, 0), 1001, threading.Event())


def test_who_gives_up_while_waiting_claims_nothing(spool: Spool) -> None:
    admission, give_up = Admission(spool, 100, 100, print), threading.Event()
    admission.claim(dump(spool, 0), 100, give_up)
    give_up.set()
    with pytest.raises(SpoolError, match="the run ended while a request waited"):
        admission.claim(dump(spool, 1), 1, give_up)
    assert spool_use(spool.root) == (1, 100)


def test_dumps_of_the_dead_are_freed_or_taken_over(spool: Spool) -> None:
    dead = 2**22 + 7  # above the largest pid
    half, whole, kept, mine, unclaimed = (dump(spool, row) for row in range(5))
    for files, pid in ((half, dead), (whole, dead), (kept, KEPT), (mine, os.getpid())):
        ClaimRecord(files.rid, 10, pid, 0.0).write(files.claim)
    for files in (whole, kept, unclaimed):
        fill(files)
    mine_claimed = Admission(spool, 1000, 1000, print)
    mine.claim.unlink()
    mine_claimed.claim(mine, 10, threading.Event())

    assert sweep(spool) == 2
    assert set(spool.rids()) == {whole.rid, kept.rid, mine.rid}
    assert adopt(spool, whole)
    assert adopt(spool, kept)
    assert ClaimRecord.read(whole.claim).pid == os.getpid()
    assert adopt(spool, whole, KEPT)
    assert ClaimRecord.read(whole.claim).pid == KEPT
    assert not adopt(spool, half)


def test_dumps_of_the_living_are_nobody_elses(spool: Spool) -> None:
    import psutil

    files = dump(spool, 0)
    parent = psutil.Process(os.getppid())
    ClaimRecord(files.rid, 10, parent.pid, started(parent.pid)).write(files.claim)
    fill(files)
    assert sweep(spool) == 0
    assert not adopt(spool, files)


def test_a_spool_in_which_nothing_moves_is_given_up(spool: Spool) -> None:
    """Dumps that a run left on purpose, say, and nobody takes."""
    admission = Admission(spool, 100, 100, print, patience=0.3)
    admission.claim(dump(spool, 0), 100, threading.Event())
    for most_seconds in (5, 0.25):  # the second one need not wait again
        began = time.monotonic()
        with pytest.raises(SpoolError, match=r"nobody makes room(.|\n)*100 of 100 are taken"):
            admission.claim(dump(spool, 1), 10, threading.Event())
        assert time.monotonic() - began < most_seconds
    time.sleep(0.5)
    dump(spool, 2).data.write_bytes(bytes(10))  # it moves again: now there is a reason to wait
    began = time.monotonic()
    with pytest.raises(SpoolError, match="nobody makes room"):
        admission.claim(dump(spool, 1), 10, threading.Event())
    assert time.monotonic() - began > 0.3


def test_room_that_the_dead_hold_is_found_while_waiting(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hs_assets.serving.admission._SAY_SECONDS", 0.2)
    dead = dump(spool, 0)
    ClaimRecord(dead.rid, 100, 2**22 + 7, 0.0).write(dead.claim)
    Admission(spool, 100, 100, print, patience=20).claim(dump(spool, 1), 50, threading.Event())
    assert spool_use(spool.root) == (1, 50)


def test_claims_of_another_version_count_by_their_dumps(spool: Spool) -> None:
    files = dump(spool, 0)
    files.claim.write_text('{"record": "claim", "version": 1}')
    files.data.write_bytes(bytes(70))
    assert spool_use(spool.root) == (1, 70)
    assert not adopt(spool, files)
    assert sweep(spool) == 1
    assert spool_use(spool.root) == (0, 0)


def test_a_process_is_known_by_its_start(tmp_path: Path) -> None:
    mine = started(os.getpid())
    assert lives(os.getpid(), mine)
    assert not lives(os.getpid(), mine + 1)
    assert not lives(2**22 + 7, mine)
    with pytest.raises(ProcessLookupError):
        started(2**22 + 7)
