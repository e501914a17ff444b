"""The client by itself, against a server that speaks the real protocol: nothing hangs, nothing is left, every prompt is told."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hs_assets.config import Project
from hs_assets.samples.prompts import Prompt
from hs_assets.serving import client as client_module
from hs_assets.serving.admission import Admission
from hs_assets.serving.client import CaptureClient, Captured, ClientSettings, Failed
from hs_assets.serving.launch import resolve
from hs_assets.serving.state import ServerFolder
from hs_assets.wire.rid import Rid
from hs_assets.wire.spool import Spool
from hs_assets_tests.conftest import DEMO_TEXTS, say, write_project
from hs_assets_tests.fake_server import FakeServer, fake_server


@pytest.fixture
def project(home: Path, checkpoint: Callable[[str], Path]) -> Project:
    return write_project(home, checkpoint("llama"), DEMO_TEXTS, top="layers = [2, 4]", server="spool_bytes = 200_000_000")


@pytest.fixture
def server(project: Project) -> Iterator[FakeServer]:
    with fake_server(project) as running:
        yield running


def connect(project: Project, in_flight: int = 4, commit_seconds: float = 30) -> CaptureClient:
    folder = ServerFolder(project.home.server)
    state = folder.read_state()
    assert state
    return CaptureClient(folder, state, resolve(project).layout, ClientSettings(in_flight, 30, commit_seconds), say)


def make_prompts(count: int, tokens: int = 20) -> list[Prompt]:
    random = np.random.default_rng(0)
    return [Prompt.supervised(row, random.integers(9, 2000, tokens)) for row in range(count)]


def left(project: Project) -> list[str]:
    return [path.name for path in Spool(project.spool_path).dumps.iterdir()]


def test_every_prompt_has_one_outcome(project: Project, server: FakeServer) -> None:
    with connect(project, in_flight=7) as client:
        outcomes = [outcome for outcome in client.capture("p", make_prompts(50)) if outcome]
        assert sorted(outcome.prompt.row for outcome in outcomes) == list(range(50))
        for outcome in outcomes:
            assert isinstance(outcome, Captured)
            assert outcome.files.whole
            outcome.files.free()
    assert sorted(server.rows) == list(range(50))
    assert left(project) == []


def test_whoever_stops_taking_leaves_nothing_but_what_was_taken(project: Project, server: FakeServer) -> None:
    server.seconds_each = 0.05
    with connect(project) as client:
        outcomes = client.capture("p", make_prompts(100))
        taken = next(outcome for outcome in outcomes if outcome)
        assert isinstance(taken, Captured)
    assert len(server.rows) < 100
    time.sleep(0.3)
    assert {name.partition(".T20")[0] for name in left(project)} == {taken.files.rid.partition(".T20")[0]}


def test_an_error_that_nobody_thought_of_is_that_prompts_failure(
    project: Project, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = client_module.ask

    def broken(http: object, url: str, rid: str, ids: list[int]) -> object:
        if ".0003." in rid:
            raise RuntimeError("nobody thought of it")
        return ask(http, url, rid, ids)  # type: ignore[arg-type]

    monkeypatch.setattr(client_module, "ask", broken)
    with connect(project) as client:
        outcomes = [outcome for outcome in client.capture("p", make_prompts(8)) if outcome]
        failed = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
        for outcome in outcomes:
            outcome.files.free() if isinstance(outcome, Captured) else None
    assert len(outcomes) == 8
    assert [(one.prompt.row, one.reason) for one in failed] == [(3, "client_error")]
    assert "nobody thought of it" in failed[0].detail
    assert sorted(server.rows) == [0, 1, 2, 4, 5, 6, 7]
    assert left(project) == []


def test_no_room_for_a_claim_is_that_prompts_failure(
    project: Project, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = Admission._try_claim

    def full(self: Admission, files: object, size: int) -> bool:
        if ".0002." in files.rid:  # type: ignore[attr-defined]
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return claim(self, files, size)  # type: ignore[arg-type]

    monkeypatch.setattr(Admission, "_try_claim", full)
    with connect(project) as client:
        outcomes = [outcome for outcome in client.capture("p", make_prompts(5)) if outcome]
        for outcome in outcomes:
            outcome.files.free() if isinstance(outcome, Captured) else None
    failed = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
    assert [(one.prompt.row, one.reason) for one in failed] == [(2, "spool_full")]
    assert len(outcomes) == 5
    assert len(server.rows) == 4
    assert left(project) == []


def test_a_dump_that_never_comes_fails_at_its_deadline(project: Project, server: FakeServer) -> None:
    def none_for_row_1(rid: Rid, states: np.ndarray) -> np.ndarray | None:
        return None if rid.row == 1 else states

    server.fault = none_for_row_1
    began = time.monotonic()
    with connect(project, commit_seconds=2) as client:
        outcomes = [outcome for outcome in client.capture("p", make_prompts(4)) if outcome]
        for outcome in outcomes:
            outcome.files.free() if isinstance(outcome, Captured) else None
    failed = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
    assert [(one.prompt.row, one.reason) for one in failed] == [(1, "no_dump")]
    assert 2 <= time.monotonic() - began < 10
    assert left(project) == []
