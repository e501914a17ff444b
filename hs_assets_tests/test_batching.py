"""Whatever SGLang does with a batch, each sample has exactly its rows, and the same ones: the real server, in float32.

A chunk is 64 tokens, and the server holds 4096 tokens in all: prompts are cut, wait for each other, and are put out of
memory again.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from hs_assets.config import Project
from hs_assets.samples.eagle3 import load_sample
from hs_assets.samples.prompts import Prompt
from hs_assets.serving.client import CaptureClient, Captured, ClientSettings, Failed
from hs_assets.serving.launch import resolve
from hs_assets.serving.state import ServerFolder, ServerState
from hs_assets.wire.dump import DumpLayout, read_layout
from hs_assets.wire.records import ClaimRecord, CommitRecord
from hs_assets.wire.rid import new_rid
from hs_assets.wire.spool import DumpFiles, Spool
from hs_assets_tests.conftest import DEMO_TEXTS, running_server, say, temporary_home, write_project

CHUNK, POOL, VOCABULARY = 64, 4096, 2048
TOLERANCE = 1e-4


class Batching:
    """A server, and what can be asked of it."""

    def __init__(self, project: Project, state: ServerState) -> None:
        self.project = project
        self.state = state
        self.spool = Spool(project.spool_path)
        self.layout = resolve(project).layout

    def capture(self, prompts: Sequence[Prompt], in_flight: int) -> tuple[list[np.ndarray], list[Failed]]:
        """The states of each prompt, in their order, checked as the pipeline checks a dump; and those that failed."""
        states: dict[int, np.ndarray] = {}
        failed = []
        folder, settings = ServerFolder(self.project.home.server), ClientSettings(in_flight, 300, 60)
        with CaptureClient(folder, self.state, self.layout, settings, say) as client:
            for outcome in client.capture("batching", prompts):
                if isinstance(outcome, Captured):
                    sample = load_sample(outcome.prompt, outcome.files)
                    assert sample.token_ids.tolist() == outcome.prompt.input_ids.tolist()
                    assert outcome.files.data.stat().st_size == self.layout_of(outcome.prompt).file_bytes
                    states[outcome.prompt.row] = sample.states.copy()
                    outcome.files.free()
                elif outcome is not None:
                    failed.append(outcome)
        assert list(self.spool.dumps.glob("*.batching.*")) == []
        return [states[prompt.row] for prompt in prompts if prompt.row in states], failed

    def layout_of(self, prompt: Prompt) -> DumpLayout:
        return dataclasses.replace(self.layout, tokens=len(prompt.input_ids))

    def claim(self, length: int, row: int = 0) -> tuple[str, DumpFiles]:
        rid = str(new_rid("raw", row, length))
        files = self.spool.dump(rid)
        ClaimRecord(rid, 0, os.getpid(), 0.0).write(files.claim)
        return rid, files

    def post(self, rid: str, ids: list[int], timeout: float = 120, **sampling: object) -> httpx.Response:
        body = {"rid": rid, "input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0, **sampling}}
        return httpx.post(f"{self.state.url}/generate", json=body, timeout=timeout, trust_env=False)

    def wait(self, files: DumpFiles) -> CommitRecord:
        deadline = time.monotonic() + 30
        while not files.commit.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return CommitRecord.read(files.commit)


@pytest.fixture(scope="module")
def server(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Batching]:
    settings = f'dtype = "float32"\nchunk_tokens = {CHUNK}\nspool_bytes = 200_000_000\nargs = ["--max-total-tokens", "{POOL}"]'
    with temporary_home(tmp_path_factory.mktemp("batching") / "home") as home:
        project = write_project(home, checkpoint("llama"), DEMO_TEXTS, top="layers = [2, 4]", server=settings)
        with running_server(project) as state:
            yield Batching(project, state)


def make_prompts(lengths: Sequence[int], seed: int = 1, shared: int = 0) -> list[Prompt]:
    """Prompts of these lengths; the first `shared` tokens are the same in all."""
    random = np.random.default_rng(seed)
    prefix = random.integers(9, VOCABULARY, shared)
    return [
        Prompt.supervised(row, np.concatenate([prefix, random.integers(9, VOCABULARY, length - shared)]))
        for row, length in enumerate(lengths)
    ]


def assert_close(ours: list[np.ndarray], others: list[np.ndarray]) -> None:
    assert [len(states) for states in ours] == [len(states) for states in others]
    assert max(float(np.abs(one - other).max()) for one, other in zip(ours, others, strict=True)) <= TOLERANCE


def test_together_and_alone_in_reverse_order_are_the_same(server: Batching) -> None:
    lengths = [520, 600, 513, 530, 700, 555, 521, 640, 514, 800, 576, 577, 512 + 64, 650, 515, 900]
    prompts = make_prompts(lengths, shared=512)
    together, failed = server.capture(prompts, in_flight=16)
    assert failed == []
    alone, _ = server.capture(prompts[::-1], in_flight=1)
    assert_close(together, alone[::-1])


def test_lengths_around_a_chunk_with_48_in_flight(server: Batching) -> None:
    lengths = [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, 3, 100, 7, 190] * 4
    prompts = make_prompts(lengths)
    together, failed = server.capture(prompts, in_flight=48)
    assert failed == []
    assert [len(states) for states in together] == lengths
    alone, _ = server.capture(prompts[:12], in_flight=1)
    assert_close(together[:12], alone)


def test_identical_prompts_get_all_their_rows_each(server: Batching) -> None:
    (one,) = make_prompts([1500])
    same = [Prompt(row, one.input_ids, one.loss_mask, one.token_sha256) for row in range(16)]
    states, failed = server.capture(same, in_flight=16)
    assert failed == []
    assert [len(rows) for rows in states] == [1500] * 16
    assert_close(states, [states[0]] * 16)


def test_one_prompt_that_the_server_cannot_take_fails_alone(server: Batching) -> None:
    prompts = make_prompts([100, 100, POOL + 500, 100, 100])
    states, failed = server.capture(prompts, in_flight=5)
    assert [len(rows) for rows in states] == [100] * 4
    assert [(outcome.prompt.row, outcome.reason) for outcome in failed] == [(2, "server_error")]
    assert "HTTP 400" in failed[0].detail


def test_requests_whose_client_went_away_leave_nothing_and_harm_nobody(server: Batching) -> None:
    gone, kept = make_prompts([1200] * 8, seed=5), make_prompts([300] * 8, seed=6)
    claims = [server.claim(1200, prompt.row) for prompt in gone]

    def give_up(prompt: Prompt) -> bool:
        """Whether the answer had not come when the client went away."""
        try:
            server.post(claims[prompt.row][0], prompt.input_ids.tolist(), timeout=0.1)
        except httpx.ReadTimeout:
            return True
        finally:
            claims[prompt.row][1].free()
        return False

    with ThreadPoolExecutor(16) as pool:
        abandoned = [pool.submit(give_up, prompt) for prompt in gone]
        states, failed = server.capture(kept, in_flight=8)
        assert sum(future.result() for future in abandoned) >= 4, "the server was too fast to be left alone"
    assert failed == []
    alone, _ = server.capture(kept, in_flight=1)
    assert_close(states, alone)
    deadline = time.monotonic() + 20
    while list(server.spool.dumps.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert list(server.spool.dumps.iterdir()) == []


def test_whoever_stops_taking_does_not_wait_for_the_rest(server: Batching) -> None:
    prompts = make_prompts([1500] * 24, seed=9)
    folder, settings = ServerFolder(server.project.home.server), ClientSettings(24, 300, 60)
    with CaptureClient(folder, server.state, server.layout, settings, say) as client:
        first = next(outcome for outcome in client.capture("stopped", prompts) if outcome)
        began = time.monotonic()
    assert time.monotonic() - began < 8, "it waited for all answers"
    assert isinstance(first, Captured)
    first.files.free()
    states, failed = server.capture(make_prompts([100] * 3), in_flight=3)
    assert (len(states), failed) == (3, [])
    deadline = time.monotonic() + 20
    while list(server.spool.dumps.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert list(server.spool.dumps.iterdir()) == []


def test_a_retried_request_is_captured_once(server: Batching) -> None:
    (prompt,) = make_prompts([150], seed=7)
    rid, files = server.claim(150)
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: server.post(rid, prompt.input_ids.tolist()).status_code, range(2)))
    first = server.wait(files)
    assert 200 in answers
    assert server.post(rid, prompt.input_ids.tolist()).status_code == 200
    time.sleep(0.5)
    assert CommitRecord.read(files.commit) == first
    assert not files.failure.exists()
    assert read_layout(files.data).tokens == 150
    files.free()


def test_retracted_requests_keep_the_rows_of_their_prompt(server: Batching) -> None:
    """Long answers put others out of memory; they are prefilled again, with what they had answered."""
    prompts = make_prompts([200] * 12, seed=8)
    claims = [server.claim(200, prompt.row) for prompt in prompts]

    def answer_at_length(prompt: Prompt) -> httpx.Response:
        return server.post(claims[prompt.row][0], prompt.input_ids.tolist(), max_new_tokens=400, ignore_eos=True)

    with ThreadPoolExecutor(12) as pool:
        assert {response.status_code for response in pool.map(answer_at_length, prompts)} == {200}
    assert "etract" in Path(server.state.log).read_text(errors="replace"), "nothing was retracted"
    alone, _ = server.capture(prompts, in_flight=1)
    for prompt, (_, files) in zip(prompts, claims, strict=True):
        commit = server.wait(files)
        assert commit.tokens == 200
        raw = files.data.read_bytes()[4096 : 4096 + 200 * server.layout.row_bytes]
        assert_close([np.frombuffer(raw, "<f4").reshape(200, 3, -1)], [alone[prompt.row]])
        files.free()
