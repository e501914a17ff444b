"""The server's own limit: what does not fit is refused alone, what clients removed is room again."""

from __future__ import annotations

import errno
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from hs_assets.capture.room import Room, forget
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
    assert room.high_water_bytes() == 1000


def test_what_was_removed_is_room_again(spool):
    room = Room(spool, 1000)
    reserve(room, spool, "first", 600).unlink()
    assert reserve(room, spool, "second", 900).stat().st_size == 900


def test_what_lay_there_before_counts(spool):
    reserve(Room(spool, 1000), spool, "of an earlier server", 600)
    room = Room(spool, 1000)
    with pytest.raises(OSError, match="600 of 1000 are taken"):
        reserve(room, spool, "new", 500)


def _fill_and_free(root: Path, name: int) -> int:
    """Reserve and free again and again; returns how often there was no room."""
    spool, refused = Spool(root), 0
    room = Room(spool, 1000)
    for turn in range(100):
        try:
            path = reserve(room, spool, f"{name}-{turn}", 300)
        except OSError:
            refused += 1
        else:
            assert sum(stat.st_size for stat in spool.data_stats()) <= 1000
            path.unlink()
    return refused


def test_many_processes_never_exceed_it(spool):
    with ProcessPoolExecutor(6, mp_context=multiprocessing.get_context("spawn")) as pool:
        refused = sum(pool.map(_fill_and_free, [spool.root] * 6, range(6)))
    assert refused < 600
    assert 0 < Room(spool, 1000).high_water_bytes() <= 1000


def test_another_server_begins_to_count_anew(spool):
    reserve(Room(spool, 1000), spool, "first", 600).unlink()
    forget(spool)
    assert Room(spool, 1000).high_water_bytes() == 0


def test_a_dump_that_does_not_fit_fails_with_its_reason(spool):
    rid = make_rid(10)
    with pytest.raises(OSError, match="do not fit") as caught:
        add_chunks(make_assembly(FACTS, spool, limit=100), claimed(spool, rid), rid, *make_rows(10), [10])
    assert caught.value.errno == errno.EDQUOT
