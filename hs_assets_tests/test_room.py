"""The server's own limit: what does not fit is refused alone, what clients removed is room again."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from hs_assets.capture.room import Room
from hs_assets.wire.spool import Spool
from hs_assets_tests.dump_material import FACTS, add_chunks, claimed, made_spool, make_assembly, make_rid, make_rows


@pytest.fixture
def spool(tmp_path):
    return made_spool(tmp_path / "spool")


def reserve(room: Room, spool: Spool, name: str, size: int) -> Path:
    path = spool.dump(name).data
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        room.reserve(descriptor, size)
    finally:
        os.close(descriptor)
    return path


def test_up_to_the_limit_and_no_further(spool):
    room = Room(spool, 1000)
    first = reserve(room, spool, "first", 600)
    assert first.stat().st_size == 600
    reserve(room, spool, "second", 400)
    with pytest.raises(OSError, match="1 bytes do not fit: 1000 of 1000 are taken") as caught:
        reserve(room, spool, "third", 1)
    assert caught.value.errno == errno.EDQUOT
    assert room.high_water_bytes == 1000


def test_what_was_removed_is_room_again(spool):
    room = Room(spool, 1000)
    reserve(room, spool, "first", 600).unlink()
    assert reserve(room, spool, "second", 900).stat().st_size == 900


def test_what_lay_there_before_counts(spool):
    reserve(Room(spool, 1000), spool, "of an earlier server", 600)
    room = Room(spool, 1000)
    room.look()
    with pytest.raises(OSError, match="600 of 1000 are taken"):
        reserve(room, spool, "new", 500)


def test_many_threads_never_exceed_it(spool):
    room, refused = Room(spool, 1000), []

    def work(number: int) -> None:
        for turn in range(50):
            try:
                reserve(room, spool, f"{number}-{turn}", 300).unlink()
            except OSError:
                refused.append(turn)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) < 300
    assert room.high_water_bytes <= 1000


def test_a_dump_that_does_not_fit_fails_with_its_reason(spool):
    rid = make_rid(10)
    with pytest.raises(OSError, match="do not fit") as caught:
        add_chunks(make_assembly(FACTS, spool, limit=100), claimed(spool, rid), rid, *make_rows(10), [10])
    assert caught.value.errno == errno.EDQUOT
