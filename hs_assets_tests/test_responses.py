"""Asset `responses` in a real Dagster instance: with a fake server, and once with the real SGLang and its greedy answers."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import httpx
import numpy as np
from transformers import AutoTokenizer

from hs_assets.config import Project
from hs_assets.defs.build import build_definitions
from hs_assets.defs.extraction import RAW_DUMPS, SAMPLES
from hs_assets.defs.responses import RESPONSES
from hs_assets.samples.answers import Answered
from hs_assets.samples.prompts import page_path, read_partition_table
from hs_assets.samples.responses import read_responses
from hs_assets.store import open_store
from hs_assets_tests.conftest import running_server, write_project
from hs_assets_tests.fake_server import echo_last_words, fake_server
from hs_assets_tests.test_definitions import LEDGER, PROMPTS, RULES, Runs, check_of, failure_of, instance  # noqa: F401
from hs_assets_tests.test_respond import KEY, RUN, log_lines, turns_of, write_questions

ROWS, MAX_TOKENS = 12, 10


def make_project(home: Path, model: Path, folder: Path, *, server: str = "", enabled: bool = True) -> Project:
    responses = f'enabled = {str(enabled).lower()}\nmax_tokens = {MAX_TOKENS}\ncut = "keep"'
    return write_project(
        home,
        model,
        write_questions(folder / "rows.jsonl", ROWS),
        top="layers = [2, 4]",
        prompts="max_dropped_share = 1.0",
        responses=responses,
        server="spool_bytes = 200_000_000\nmax_in_flight = 2\n" + server,
    )


def test_the_asset_is_there_where_it_is_enabled(home: Path, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    model = checkpoint("llama")
    graph = build_definitions(make_project(home, model, tmp_path)).resolve_asset_graph()
    assert graph.get(PROMPTS).parent_keys == {RESPONSES}
    assert graph.get(RESPONSES).pools == {"sglang"}
    off = build_definitions(make_project(home, model, tmp_path, enabled=False)).resolve_asset_graph()
    assert RESPONSES not in off.get_all_asset_keys()
    assert off.get(PROMPTS).parent_keys == set()


def test_from_questions_to_samples_and_what_failed_alone_again(
    home: Path,
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    instance: dg.DagsterInstance,  # noqa: F811
) -> None:
    project = make_project(home, checkpoint("llama"), tmp_path)
    runs = Runs(project, instance)
    with fake_server(project) as server:
        assert runs.record().success
        assert "the responses of this partition are not complete" in failure_of(runs.extract(KEY, PROMPTS))
        server.generate = lambda ids, parameters: 503 if len(server.asked) == 3 else echo_last_words(ids, parameters)
        failed = runs.extract(KEY)
        assert "1 rows failed: server_error" in failure_of(failed)
        assert (runs.filled(RESPONSES), runs.filled(PROMPTS), server.rows) == (set(), set(), [])
        server.generate, asked = echo_last_words, len(log_lines(project))
        result = runs.extract(KEY)
        assert result.success
        (made,) = result.asset_materializations_for_node("responses")
        assert made.metadata["requests"].value == turns_of(ROWS) - asked
        assert made.metadata["finish reasons"].value == {"stop": turns_of(ROWS)}
        assert made.metadata["dropped"].value == {"duplicate": 1, "invalid_json": 1}
        (prompts,) = result.asset_materializations_for_node("prompts")
        assert Path(str(prompts.metadata["page"].value)) == page_path(project.home.prompts, KEY)
        assert page_path(project.home.prompts, KEY).read_text().startswith("<!DOCTYPE html>")
        assert sorted(server.rows) == list(range(ROWS))


def test_the_real_server_answers_greedily_and_a_killed_run_goes_on(
    home: Path,
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    instance: dg.DagsterInstance,  # noqa: F811
) -> None:
    model = checkpoint("llama")
    project = make_project(home, model, tmp_path, server='dtype = "float32"\nchunk_tokens = 512')
    runs = Runs(project, instance)
    with running_server(project) as state:
        assert runs.record().success
        path = project.home.responses / f"{KEY}.jsonl"
        process = subprocess.Popen([sys.executable, "-c", RUN, str(home)])
        deadline = time.monotonic() + 300
        while not path.exists() or path.read_bytes().count(b"\n") < 4:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        before = log_lines(project)

        result = runs.extract(KEY)
        assert result.success, failure_of(result)
        (made,) = result.asset_materializations_for_node("responses")
        assert len(before) < turns_of(ROWS)
        assert made.metadata["requests"].value == turns_of(ROWS) - len(before)
        lines = log_lines(project)
        assert lines[: len(before)] == before
        by_prompt = {line["prompt_sha256"]: line for line in lines}
        assert len(by_prompt) == len(lines) == turns_of(ROWS)

        # Each answer is what the server says to what Hugging Face renders of the user's words and the earlier answers.
        tokenizer = AutoTokenizer.from_pretrained(model)
        stop = json.loads((model / "config.json").read_text())["eos_token_id"]
        checked = 0
        for row in read_responses(project.home.responses, KEY).rows:
            turns = row.content.turns if isinstance(row.content, Answered) else ()
            for turn in turns:
                messages = row.content.conversation.messages  # type: ignore[union-attr]
                chat = [{"role": message.role, "content": message.content} for message in messages]
                ids = list(tokenizer.apply_chat_template(chat[: turn.turn], add_generation_prompt=True)["input_ids"])
                line = by_prompt[hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()]
                drawn = {"temperature": 0, "max_new_tokens": MAX_TOKENS, "stop_token_ids": [stop]}
                body = {"input_ids": ids, "sampling_params": drawn}
                answer = httpx.post(f"{state.url}/generate", json=body, timeout=120, trust_env=False).json()
                assert line["output_ids"] == answer["output_ids"]
                assert turn.finish == line["finish"] == answer["meta_info"]["finish_reason"]["type"]
                words = line["output_ids"][:-1] if line["output_ids"][-1] == stop else line["output_ids"]
                assert chat[turn.turn]["content"] == tokenizer.decode(words)
                checked += 1
        assert checked == turns_of(ROWS)

    raw, samples = result.asset_materializations_for_node("extraction")
    prompts = read_partition_table(project.home.prompts, KEY)
    assert (raw.asset_key, samples.asset_key) == (RAW_DUMPS, SAMPLES)
    # Only prompts were captured, none of the answers' own requests.
    assert raw.metadata["requests"].value == len(prompts.prompts) >= ROWS // 2
    assert (check_of(runs, LEDGER, KEY), check_of(runs, RULES, KEY)) == (True, True)
    assert list((project.spool_path / "dumps").iterdir()) == []
    view = open_store(project.store_path).layer_set("r2-4-8")
    assert [sample.sample_id for sample in view] == [
        row.sample_id for row in prompts.rows if row.sample_id in {s.sample_id for s in view}
    ]
    assert len(view) == len(prompts.prompts)
