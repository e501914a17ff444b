"""Answers to a partition: all asked for once and for nothing twice, whatever the server does to single ones or to all."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hs_assets.extraction.progress
import hs_assets.extraction.respond
from hs_assets.config import Project
from hs_assets.errors import ConfigError, ExtractionError, PromptError
from hs_assets.extraction.generations import GenerationLog
from hs_assets.extraction.respond import RespondReport, choice, generation_spec, respond
from hs_assets.extraction.status import source_indexes, sources
from hs_assets.samples.answers import Answered, Generation, Turn
from hs_assets.samples.conversations import Conversation, Dropped, Message
from hs_assets.samples.filters import PromptLimits
from hs_assets.samples.prepare import make_partition
from hs_assets.samples.prompts import read_partition_table, write_partition
from hs_assets.samples.responses import GenerationSpec, ResponseRow, make_responses, read_responses, write_responses
from hs_assets.samples.sources import read_partition
from hs_assets.samples.tokenizer import load_tokenizer
from hs_assets.serving.generate import response_rid
from hs_assets.serving.launch import resolve
from hs_assets.serving.state import FAILED, ServerFolder
from hs_assets.wire.rid import MAX_PARTITION_CHARS, parse_rid
from hs_assets_tests.conftest import say, write_project
from hs_assets_tests.fake_server import FakeServer, echo_last_words, fake_server, generated
from hs_assets_tests.small_tokenizer import json_row

KEY = "rows-00000"
MAX_TOKENS = 16
RUN = """
import sys
from hs_assets.config import load_project
from hs_assets.extraction.respond import respond
from hs_assets.serving.launch import resolve
project = load_project(sys.argv[1])
respond(project, resolve(project), "rows-00000", print)
"""


def write_questions(path: Path, count: int) -> Path:
    """Rows of one question, and of two with the source's answers; and two bad ones at the end."""
    rows = []
    for i in range(count):
        first = ("user", f"Question {i}: what is {i} times {i + 1}?")
        more = [("assistant", f"SOURCE {i}"), ("user", f"And {i} plus one?"), ("assistant", f"SOURCE AGAIN {i}")]
        rows.append(json_row(first, *(more if i % 3 == 0 else [])))
    path.write_bytes(b"\n".join([*rows, rows[1], b"{"]) + b"\n")
    return path


def turns_of(count: int) -> int:
    return sum(2 if i % 3 == 0 else 1 for i in range(count))


@pytest.fixture
def make(home: Path, checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[..., Project]:
    def build(count: int = 12, responses: str = "", **settings: str) -> Project:
        source = write_questions(tmp_path / "rows.jsonl", count)
        server = "spool_bytes = 200_000_000\nmax_in_flight = 4\n" + settings.pop("server", "")
        chosen = f"enabled = true\nmax_tokens = {MAX_TOKENS}\n{responses}"
        top = "layers = [2, 4]"
        project = write_project(home, checkpoint("llama"), source, top=top, responses=chosen, server=server, **settings)
        source_indexes(project)
        return project

    return build


def run(project: Project) -> RespondReport:
    return respond(project, resolve(project), KEY, say)


def log_lines(project: Project) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (project.home.responses / f"{KEY}.jsonl").read_bytes().splitlines()]


def test_every_row_is_answered_or_has_a_reason_and_again_costs_nothing(make: Callable[..., Project]) -> None:
    project = make()
    with fake_server(project) as server:
        report = run(project)
        assert report.problems == []
        assert report.responses
        assert report.responses.dropped == {"duplicate": 1, "invalid_json": 1}
        assert (len(report.responses.rows), report.requests, len(server.asked)) == (14, turns_of(12), turns_of(12))
        tokenizer = load_tokenizer(project.settings.model.path)
        for row in report.responses.rows[:12]:
            assert isinstance(row.content, Answered)
            assert not any("SOURCE" in message.content for message in row.content.conversation.messages)
            assert row.content.conversation.messages[-1].role == "assistant"
        assert not any("SOURCE" in tokenizer.decode(ids) for ids in server.asked)
        write_responses(report.responses, project.home.responses)
        assert read_responses(project.home.responses, KEY) == report.responses
        again = run(project)
        assert (again.requests, again.server, len(server.asked)) == (0, None, turns_of(12))
        assert again.responses == report.responses


def test_what_is_asked_for_is_what_the_settings_say(make: Callable[..., Project]) -> None:
    seen: list[dict[str, Any]] = []

    def note(ids: list[int], parameters: dict[str, Any]) -> dict[str, object]:
        seen.append(parameters)
        return echo_last_words(ids, parameters)

    flag = 'args = ["--enable-deterministic-inference"]'
    project = make(6, "temperature = 0.7\ntop_p = 0.9\nseed = 5", server=flag)
    with fake_server(project) as server:
        server.generate = note
        run(project)
    stop = json.loads((project.settings.model.path / "config.json").read_text())["eos_token_id"]
    drawn = {(p["temperature"], p["top_p"], p["max_new_tokens"], *p["stop_token_ids"]) for p in seen}
    assert drawn == {(0.7, 0.9, MAX_TOKENS, stop)}
    seeds = [p["sampling_seed"] for p in seen]
    assert len(set(seeds)) == len(seeds) == turns_of(6)
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_a_seed_that_would_be_ignored_is_refused(make: Callable[..., Project]) -> None:
    with pytest.raises(ConfigError, match="ignore the seed") as error:
        run(make(2, "temperature = 0.7\nseed = 5"))
    assert "--enable-deterministic-inference" in str(error.value)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (500, "server_error"),
        ({"text": "no ids", "meta_info": {"finish_reason": {"type": "stop"}}}, "bad_answer"),
        ({"output_ids": [9], "meta_info": {"finish_reason": None}}, "bad_answer"),
        (generated([9], "abort", message="out of memory"), "aborted"),
    ],
)
def test_a_failure_fails_its_row_and_only_that_is_asked_again(
    fault: int | dict[str, object], reason: str, make: Callable[..., Project]
) -> None:
    project = make()
    tokenizer = load_tokenizer(project.settings.model.path)

    def fail_one(ids: list[int], parameters: dict[str, Any]) -> dict[str, object] | int:
        return fault if "Question 7:" in tokenizer.decode(ids) else echo_last_words(ids, parameters)

    with fake_server(project) as server:
        server.generate = fail_one
        report = run(project)
        assert report.responses is None
        assert ({row: why for row, (why, _) in report.failed.items()}, report.problems) == (
            {7: reason},
            [f"1 rows failed: {reason}"],
        )
        server.generate, server.asked = echo_last_words, []
        report = run(project)
        assert (report.problems, report.requests) == ([], 1)
        assert ["Question 7:" in tokenizer.decode(ids) for ids in server.asked] == [True]


def test_answers_that_are_cut_or_empty(make: Callable[..., Project]) -> None:
    tokenizer = load_tokenizer(make().settings.model.path)

    def cut_and_empty(ids: list[int], parameters: dict[str, Any]) -> dict[str, object]:
        text = tokenizer.decode(ids)
        if "Question 1:" in text:
            return generated(tokenizer.encode("it goes on")[:MAX_TOKENS], "length", length=MAX_TOKENS)
        return generated(parameters["stop_token_ids"], "stop") if "Question 2:" in text else echo_last_words(ids, parameters)

    dropping = make()
    with fake_server(dropping) as server:
        server.generate = cut_and_empty
        report = run(dropping)
        assert report.responses
        assert report.responses.dropped == {"response_cut": 1, "response_empty": 1, "duplicate": 1, "invalid_json": 1}
    keeping = make(responses='cut = "keep"')
    with fake_server(keeping) as server:
        kept = run(keeping)
        assert (kept.requests, server.asked) == (0, [])
        assert kept.responses
        assert kept.responses.dropped == {"response_empty": 1, "duplicate": 1, "invalid_json": 1}
        content = kept.responses.rows[1].content
        assert isinstance(content, Answered)
        assert [turn.finish for turn in content.turns] == ["length"]
        assert kept.responses.version != report.responses.version


def test_a_server_that_dies_fails_what_it_did_not_answer(make: Callable[..., Project]) -> None:
    project = make(12)
    with fake_server(project) as server:
        die_after(server, 6, project)
        report = run(project)
        assert "went away" in "\n".join(report.problems)
        assert report.responses is None
        assert {why for why, _ in report.failed.values()} <= {"server_died", "not_answered"}
        before = log_lines(project)
        assert 0 < len(before) < turns_of(12)
    with fake_server(project) as server:
        report = run(project)
        assert (report.problems, report.requests) == ([], turns_of(12) - len(before))


def die_after(server: FakeServer, answers: int, project: Project) -> None:
    """Have the server go away as a real one does: no connection is answered, and its state file says so."""
    folder = ServerFolder(project.home.server)
    count, lock = Counter[str](), threading.Lock()

    def generate(ids: list[int], parameters: dict[str, Any]) -> dict[str, object] | int:
        with lock:
            count["asked"] += 1
            if count["asked"] == answers:
                state = folder.read_state()
                assert state
                dataclasses.replace(state, phase=FAILED).write(folder.state)
        if count["asked"] >= answers:
            raise ConnectionAbortedError
        return echo_last_words(ids, parameters)

    server.generate = generate


def test_killed_in_the_middle_it_asks_for_nothing_twice(make: Callable[..., Project]) -> None:
    project = make(24)
    with fake_server(project) as server:
        server.seconds_each = 0.2
        process = subprocess.Popen([sys.executable, "-c", RUN, str(project.home.root)], env=dict(os.environ))
        path = project.home.responses / f"{KEY}.jsonl"
        deadline = time.monotonic() + 60
        while not path.exists() or path.read_bytes().count(b"\n") < 9:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(0.5)  # what was in flight has reached the server
        before = log_lines(project)
        with path.open("ab") as file:
            file.write(b'{"spec": "cut in the')
        server.seconds_each, server.asked = 0.0, []
        report = run(project)
        assert (report.problems, report.requests) == ([], turns_of(24) - len(before))
        assert len(server.asked) == report.requests
    after = log_lines(project)
    assert after[: len(before)] == before
    keys = [(line["source_sha256"], line["turn"], line["prompt_sha256"]) for line in after]
    assert len(set(keys)) == len(keys) == turns_of(24)


def test_interrupted_it_ends_what_is_in_flight_and_asks_for_no_more(
    make: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    project = make(24)
    for module in (hs_assets.extraction.respond, hs_assets.extraction.progress):
        monkeypatch.setattr(module, "SAY_SECONDS", 0.3)

    def interrupt(line: str) -> None:
        if "of 24 rows" in line:
            raise KeyboardInterrupt

    with fake_server(project) as server:
        server.seconds_each = 1.0
        with pytest.raises(KeyboardInterrupt):
            respond(project, resolve(project), KEY, interrupt)
        assert len(server.asked) == len(server.aborted) == 4 == project.settings.server.max_in_flight
        assert len(log_lines(project)) == 4


def test_other_settings_ask_again_and_the_old_answers_stay(make: Callable[..., Project]) -> None:
    project = make(6)
    with fake_server(project) as server:
        run(project)
        warmer = make(6, "temperature = 1.0")
        assert run(warmer).requests == turns_of(6)
        assert run(make(6)).requests == 0
        assert len(server.asked) == 2 * turns_of(6)


def test_a_line_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with GenerationLog(path, "spec") as log:
        log.add("row", 0, "prompt", Generation((1, 2), "stop", "server"))
    path.write_bytes(b"{}\n" + path.read_bytes())
    with pytest.raises(ExtractionError, match="cannot be read") as error:
        GenerationLog(path, "spec")
    assert str(error.value.where).endswith("line 1")


def test_a_table_of_responses_that_is_damaged_is_named(tmp_path: Path) -> None:
    spec = GenerationSpec("model", "weights", "bfloat16", "template", "tokenizer", 0.0, 1.0, 1, 8, (2,))
    content = Answered(Conversation((Message("user", "one"), Message("assistant", "two"))), (Turn(1, 3, 2, "stop", "", "s"),))
    made = make_responses(KEY, spec, "choice", (ResponseRow(0, "0" * 64, content), ResponseRow(1, "1" * 64, Dropped("a", "b"))))
    path = write_responses(made, tmp_path)
    assert read_responses(tmp_path, KEY) == made
    whole = path.read_bytes()
    for size in (0, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(PromptError, match="a table of responses cannot be read") as error:
            read_responses(tmp_path, KEY)
        assert error.value.where == path


def test_the_log_knows_its_own_spec_alone(tmp_path: Path) -> None:
    made = Generation((1, 2), "length", "server")
    with GenerationLog(tmp_path / "a.jsonl", "one") as log:
        log.add("row", 0, "prompt", made)
    with GenerationLog(tmp_path / "a.jsonl", "other") as other:
        assert other.find("row", 0, "prompt") is None
    with GenerationLog(tmp_path / "a.jsonl", "one") as log:
        assert (log.find("row", 0, "prompt"), log.find("row", 1, "prompt")) == (made, None)


def test_no_capture_takes_these_requests_for_its_own() -> None:
    assert parse_rid(response_rid(f"{'k' * MAX_PARTITION_CHARS}.0001.3.T512")) is None
    assert parse_rid(response_rid("hs.s.9f2c01ab.demo-00003.0017.T512")) is None


# What prompts makes of them


def test_prompts_are_made_of_the_answers_and_say_so(make: Callable[..., Project]) -> None:
    project = make(6)
    tokenizer = load_tokenizer(project.settings.model.path)
    limits = PromptLimits(400, 2048)
    source = sources(project)[0]
    rows = read_partition(project.home.prompts / "index", source, KEY)
    with fake_server(project):
        responses = run(project).responses
    assert responses
    responses.require(generation_spec(project, tokenizer), choice(project), rows)
    with_answers = make_partition(KEY, source, rows, tokenizer, limits, responses)
    without = make_partition(KEY, source, rows, tokenizer, limits)
    assert without.dropped["no_assistant_turn"] == 4
    assert with_answers.version != without.version
    assert len(with_answers.prompts) == 6
    write_partition(with_answers, project.home.prompts)
    read = read_partition_table(project.home.prompts, KEY)
    stop = tokenizer.decode([tokenizer.eos_token_id or 0])
    for row, answered in zip(read.rows[:6], responses.rows, strict=False):
        assert isinstance(answered.content, Answered)
        assert row.origin.answered_by == responses.answered_by
        assert row.origin.finish_reasons == ("stop",) * len(answered.content.turns)
        prompt = with_answers.prompts[row.row]
        own = [m.content for m in answered.content.conversation.messages if m.role == "assistant"]
        assert tokenizer.decode(prompt.input_ids[prompt.loss_mask].tolist()) == "".join(text + stop for text in own)
    assert {row.origin.answered_by for row in without.rows} == {"source"}


def test_answers_to_other_rows_or_of_another_configuration_are_refused(make: Callable[..., Project]) -> None:
    project = make(3)
    tokenizer = load_tokenizer(project.settings.model.path)
    rows = read_partition(project.home.prompts / "index", sources(project)[0], KEY)
    with fake_server(project):
        responses = run(project).responses
    assert responses
    with pytest.raises(PromptError, match="not those"):
        responses.require(generation_spec(project, tokenizer), choice(project), rows[1:])
    for changed in (make(3, "temperature = 1.0"), make(3, 'cut = "keep"'), make(3, "keep_thinking = false")):
        with pytest.raises(PromptError, match="not those"):
            responses.require(generation_spec(changed, tokenizer), choice(changed), rows)
    with pytest.raises(PromptError, match="not complete"):
        read_responses(project.home.responses, "rows-00009")
