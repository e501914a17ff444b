"""Whether somebody captures into a spool, by what lies there: of a time that is now, and of this version."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from hs_assets.serving.liveness import capturing
from hs_assets.wire.records import CountersRecord
from hs_assets.wire.spool import Spool


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    made = Spool(tmp_path / "spool")
    made.make()
    return made


def leave(spool: Spool, at: float) -> Path:
    """Counters of that time."""
    numbers = dict.fromkeys(("dumps", "tokens", "bytes", "pending_bytes", "pending_high_water_bytes"), 0)
    numbers |= dict.fromkeys(("device_high_water_bytes", "spool_high_water_bytes", "workers", "workers_alive"), 0)
    rates = dict.fromkeys(("tokens_per_second", "bytes_per_second", "writer_seconds", "scheduler_seconds"), 0.0)
    CountersRecord(server="one", rank=0, at=at, failures={}, **numbers, **rates).write(spool.counters(0))
    os.utime(spool.counters(0), (at, at))
    return spool.counters(0)


def test_nobody_without_counters(spool: Spool) -> None:
    assert capturing(spool) is None


@pytest.mark.parametrize(("ago", "name"), [(1, "one"), (-1, "one"), (60, None), (-3600, None)])
def test_counters_of_now_and_of_a_clock_that_was_set_back_since(spool: Spool, ago: float, name: str | None) -> None:
    leave(spool, time.time() - ago)
    assert capturing(spool) == name


@pytest.mark.parametrize(("ago", "known"), [(1, True), (60, False)])
def test_what_another_version_left_keeps_no_server_from_being_started(spool: Spool, ago: float, known: bool) -> None:
    path = leave(spool, time.time() - ago)
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 1}))
    os.utime(path, (time.time() - ago,) * 2)
    assert capturing(spool) == ("a server of another version of hs-assets" if known else None)
