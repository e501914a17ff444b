"""The server's own limit: what does not fit is refused alone, what clients removed is room again."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from hs_assets.capture.room import Room
from hs_assets_tests.dump_material import FACTS, add_chunks, claimed, made_spool, make_assembly, make_rid, make_rows


def reserve(room: Room, folder: Path, name: str, size: int) -> Path:
    path = folder / f"{name}.safetensors"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        room.reserve(descriptor, size)
    finally:
        os.close(descriptor)
    return path


def test_up_to_the_limit_and_no_further(tmp_path):
    room = Room(tmp_path, 1000)
    first = reserve(room, tmp_path, "first", 600)
    assert first.stat().st_size == 600
    reserve(room, tmp_path, "second", 400)
    with pytest.raises(OSError, match="1 bytes do not fit: 1000 of 1000 are taken") as caught:
        reserve(room, tmp_path, "third", 1)
    assert caught.value.errno == errno.EDQUOT
    assert room.high_water_bytes == 1000


def test_what_was_removed_is_room_again(tmp_path):
    room = Room(tmp_path, 1000)
    reserve(room, tmp_path, "first", 600).unlink()
    assert reserve(room, tmp_path, "second", 900).stat().st_size == 900


def test_what_lay_there_before_counts(tmp_path):
    reserve(Room(tmp_path, 1000), tmp_path, "of an earlier server", 600)
    room = Room(tmp_path, 1000)
    room.look()
    with pytest.raises(OSError, match="600 of 1000 are taken"):
        reserve(room, tmp_path, "new", 500)


def test_many_threads_never_exceed_it(tmp_path):
    room, refused = Room(tmp_path, 1000), []

    def work(number: int) -> None:
        for turn in range(50):
            try:
                reserve(room, tmp_path, f"{number}-{turn}", 300).unlink()
            except OSError:
                refused.append(turn)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) < 300
    assert room.high_water_bytes <= 1000


def test_a_dump_that_does_not_fit_fails_with_its_reason(tmp_path):
    spool, rid = made_spool(tmp_path / "spool"), make_rid(10)
    with pytest.raises(OSError, match="do not fit") as caught:
        add_chunks(make_assembly(FACTS, spool.dumps, limit=100), claimed(spool, rid), rid, *make_rows(10), [10])
    assert caught.value.errno == errno.EDQUOT
