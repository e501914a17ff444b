"""Faults in the capture of a real server on two ranks: the canary sees wrong states, the client every lost sample."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from hs_assets.config import Project
from hs_assets.errors import HandshakeError, ServerDiedError, WireError
from hs_assets.samples.eagle3 import load_sample
from hs_assets.samples.prompts import Prompt
from hs_assets.serving.canary import run_canary
from hs_assets.serving.client import CaptureClient, Captured, ClientSettings, Failed, ask
from hs_assets.serving.launch import make_launch_plan, resolve
from hs_assets.serving.server import describe, lease_server, stop_server
from hs_assets.serving.state import FAILED, LaunchPlan, ServerFolder, ServerState, lives
from hs_assets.wire.dump import DumpLayout
from hs_assets.wire.records import ClaimRecord, CountersRecord, ReadyRecord
from hs_assets.wire.rid import new_rid
from hs_assets.wire.spool import DumpFiles, Spool
from hs_assets_tests import faulty_capture
from hs_assets_tests.conftest import DEMO_TEXTS, say, temporary_home, write_project
from hs_assets_tests.plugins import make_plugin

TOKENS = 40
AUX = (1, 2, 3, 4, 5, 6)
MIB = 1 << 20


class Faulty:
    """A project whose server has the faulty plugin; ``fault`` names what is wrong with it from now on."""

    def __init__(self, project: Project, file: Path) -> None:
        self.project = project
        self.file = file
        self.folder = ServerFolder(project.home.server)
        self.spool = Spool(project.spool_path)

    def put_in(self, fault: str) -> None:
        self.file.write_text(fault)

    def up(self) -> ServerState:
        """The server, started if need be."""
        with lease_server(self.folder, make_launch_plan(self.project, resolve(self.project)), "test", say) as state:
            return state

    def canary(self) -> str:
        state, plan = self.up(), LaunchPlan.read(self.folder.plan)
        return run_canary(plan, state, [ReadyRecord.read(self.spool.ready_record(rank)) for rank in range(2)])

    def client(self, in_flight: int = 8, state: ServerState | None = None) -> CaptureClient:
        settings = ClientSettings(in_flight, request_seconds=60, commit_seconds=30)
        return CaptureClient(self.folder, state or self.up(), self.layout, settings, say)

    @property
    def layout(self) -> DumpLayout:
        return resolve(self.project).layout


@pytest.fixture(scope="module")
def faulty(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    folder = tmp_path_factory.mktemp("faulty")
    path = make_plugin(folder / "plugin", Path(faulty_capture.__file__))
    env = f'env = {{ PYTHONPATH = "{path}", {faulty_capture.FAULT_ENV} = "{folder / "fault"}" }}'
    sizes = f"chunk_tokens = 1024\nspool_bytes = {64 * MIB}\nwriters = 2"
    server = f'tensor_parallel = 2\ndtype = "float32"\nidle_stop_seconds = 600\n{sizes}\n{env}'
    with temporary_home(folder / "home") as home:
        project = write_project(home, checkpoint("llama"), DEMO_TEXTS, top=f"layers = {list(AUX)}", server=server)
        yield Faulty(project, folder / "fault")


@pytest.fixture(autouse=True)
def healthy_again(faulty: Faulty) -> Iterator[None]:
    faulty.put_in("")
    yield
    faulty.put_in("")


def make_prompts(count: int, tokens: int = TOKENS) -> list[Prompt]:
    random = np.random.default_rng(3)
    return [Prompt.supervised(row, random.integers(9, 2000, tokens)) for row in range(count)]


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        ("partial_sums", "probe"),
        ("other_layers", "probe"),
        ("swapped_slots", "probe"),
        ("fewer_layers", "capture_error"),
        ("post_norm", "logprob"),
        ("raise", "capture_error"),
    ],
)
def test_the_canary_sees_states_that_are_not_those_asked_for(faulty: Faulty, fault: str, rule: str) -> None:
    assert "passed on 2 rank(s)" in faulty.canary()
    faulty.put_in(fault)
    with pytest.raises(HandshakeError, match=f"the canary failed on {rule}"):
        faulty.canary()
    faulty.put_in("")
    assert "passed on 2 rank(s)" in faulty.canary(), "the server did not survive"


def test_ranks_that_differ_are_seen_without_the_probe(faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plain hook sees under a fused all-reduce looks like any state; only the ranks tell."""
    monkeypatch.setattr("hs_assets.serving.canary._compare_probe", lambda *_: None)
    faulty.canary()
    faulty.put_in("partial_sums")
    with pytest.raises(HandshakeError, match=r"the canary failed on equal_ranks(.|\n)*rank 1 differs from rank 0"):
        faulty.canary()


def test_one_rank_writes_and_both_are_counted(faulty: Faulty) -> None:
    faulty.up()
    ready = [ReadyRecord.read(faulty.spool.ready_record(rank)) for rank in range(2)]
    assert [record.writes for record in ready] == [True, False]
    assert ready[0].device_bytes_per_token == (2 * len(AUX) + 1) * 128 * 4 + 4
    time.sleep(2.5)  # writers count twice a second, and counters are written every second
    before = [CountersRecord.read(faulty.spool.counters(rank)) for rank in range(2)]
    with faulty.client() as client:
        outcomes = [outcome for outcome in client.capture("counted", make_prompts(20)) if outcome]
        assert all(isinstance(outcome, Captured) for outcome in outcomes)
        time.sleep(2.5)
        after = [CountersRecord.read(faulty.spool.counters(rank)) for rank in range(2)]
        for outcome in outcomes:
            outcome.files.free()
    assert [record.workers_alive for record in after] == [3, 2]
    assert (after[0].dumps - before[0].dumps, after[0].tokens - before[0].tokens) == (20, 20 * TOKENS)
    assert after[0].bytes - before[0].bytes == 20 * client_bytes(faulty)
    assert after[0].pending_bytes == 0
    assert after[0].spool_high_water_bytes >= 20 * client_bytes(faulty)
    assert after[0].writer_seconds > before[0].writer_seconds
    assert after[0].scheduler_seconds > before[0].scheduler_seconds
    assert after[1].dumps == before[1].dumps, "rank 1 wrote a sample"


def client_bytes(faulty: Faulty, tokens: int = TOKENS) -> int:
    return dataclasses.replace(faulty.layout, tokens=tokens).file_bytes


def test_a_bit_that_changes_on_the_way_is_seen(faulty: Faulty) -> None:
    faulty.put_in("flipped_byte")
    damaged = []
    with faulty.client() as client:
        for outcome in client.capture("flipped", make_prompts(6)):
            assert outcome is None or isinstance(outcome, Captured)
            if outcome is not None:
                try:
                    load_sample(outcome.prompt, outcome.files)
                except WireError as error:
                    damaged.append((outcome.prompt.row, error.problem))
                outcome.files.free()
    assert damaged == [(3, "the checksums of a dump differ from those in its commit record")]


def test_a_slow_writer_and_a_small_spool_hold_the_client_back(faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MB, 200 dumps of 1 MB: never more than the limit, nothing fails, and the waiting is said."""
    monkeypatch.setattr("hs_assets.serving.admission._SAY_SECONDS", 0.2)
    state = faulty.up()
    tokens = MIB // faulty.layout.row_bytes
    said: list[str] = []
    seen, most = 0, 0
    settings = ClientSettings(32, request_seconds=60, commit_seconds=60)
    faulty.put_in("slow_writer")
    with CaptureClient(faulty.folder, state, faulty.layout, settings, said.append) as client:
        for outcome in client.capture("slow", make_prompts(200, tokens)):
            most = max(most, sum(path.stat().st_size for path in faulty.spool.dumps.glob("*.safetensors")))
            assert outcome is None or isinstance(outcome, Captured), outcome
            if outcome is None:
                continue
            if not seen:  # the consumer does nothing until the spool is full
                deadline = time.monotonic() + 60
                while not client.admission.blocked and time.monotonic() < deadline:
                    time.sleep(0.05)
                time.sleep(0.5)
                faulty.put_in("")  # 2 threads, a fifth of a second a chunk: all of it would take too long
            seen += 1
            outcome.files.free()
        assert client.admission.waited_seconds > 0.3
        assert 60 * MIB < client.admission.high_water_bytes <= 64 * MIB
    assert seen == 200
    assert most <= 64 * MIB
    assert any("the spool is full: a request has waited" in line for line in said)
    assert list(faulty.spool.dumps.iterdir()) == []
    assert "passed" in faulty.canary()


def claim_and_ask(faulty: Faulty, state: ServerState, prompts: list[Prompt]) -> list[DumpFiles]:
    """Requests whose HTTP answers are there, and whose dumps may not be."""

    def one(prompt: Prompt) -> DumpFiles:
        rid = str(new_rid("raw", prompt.row, len(prompt.input_ids)))
        files = faulty.spool.dump(rid)
        ClaimRecord(rid, 0, os.getpid(), 0.0).write(files.claim)
        ask(http, state.url, rid, prompt.input_ids.tolist())
        return files

    with httpx.Client(timeout=60, trust_env=False) as http, ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, prompts))


@pytest.mark.parametrize("how", ["the server is stopped", "a scheduler gets SIGTERM"])
def test_what_was_captured_is_written_before_the_end(faulty: Faulty, how: str) -> None:
    state = faulty.up()
    scheduler = ReadyRecord.read(faulty.spool.ready_record(0)).pid
    faulty.put_in("slow_writer")
    files = claim_and_ask(faulty, state, make_prompts(30))
    written = [one for one in files if one.commit.exists()]
    assert len(written) < 20, "nothing was left to be drained"
    if how == "the server is stopped":
        stop_server(faulty.folder, say, force=True)
    else:
        os.kill(scheduler, signal.SIGTERM)
    deadline = time.monotonic() + 60
    while lives(state.pid, state.pid_created) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not lives(state.pid, state.pid_created)
    assert [one.rid for one in files if not one.commit.exists()] == []
    for one in files:
        one.free()


def test_a_writer_that_ends_ends_the_server(faulty: Faulty) -> None:
    state = faulty.up()
    faulty.put_in("dead_writer")
    began, outcomes = time.monotonic(), []

    def take_all() -> None:
        with faulty.client(4, state) as client:
            for outcome in client.capture("dead", make_prompts(40)):
                if isinstance(outcome, Captured):
                    outcome.files.free()
                outcomes.append(outcome)

    # The writer, and the thread that copies once it notices.
    with pytest.raises(ServerDiedError, match=r"capture is broken(.|\n)*[12] of its 3 workers ended"):
        take_all()
    assert time.monotonic() - began < 30, "it took the whole deadline to notice"
    assert [outcome for outcome in outcomes if isinstance(outcome, Failed)] == []
    assert 12 <= sum(isinstance(outcome, Captured) for outcome in outcomes) < 40
    deadline = time.monotonic() + 60
    while describe(faulty.folder.read_state()) != FAILED and time.monotonic() < deadline:
        time.sleep(0.1)
    assert list(faulty.spool.dumps.iterdir()) == []
