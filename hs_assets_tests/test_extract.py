"""A partition end to end: every row accounted for, whatever the server does to single samples or to all."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hs_assets.config import Project, load_project
from hs_assets.errors import ExtractionError, PromptError, SpoolError
from hs_assets.extraction.extract import Report, capture_only, extract
from hs_assets.extraction.status import COMPLETE, INCOMPLETE, source_indexes, sources, status
from hs_assets.samples.conversations import Conversation, Dropped
from hs_assets.samples.filters import limits_of
from hs_assets.samples.masks import Rendered, Supervise, render_conversation
from hs_assets.samples.prepare import make_partition
from hs_assets.samples.prompts import write_partition
from hs_assets.samples.sources import read_partition
from hs_assets.samples.tokenizer import ChatTokenizer, load_tokenizer
from hs_assets.serving.launch import resolve
from hs_assets.serving.state import FAILED, ServerFolder
from hs_assets.store import open_store
from hs_assets.store.writer import GenerationWriter
from hs_assets.wire.rid import Rid
from hs_assets_tests.conftest import say, write_project
from hs_assets_tests.fake_server import fake_server, healthy

SYSTEM = "You are a careful assistant who answers in one short sentence."


def write_rows(path: Path, count: int) -> Path:
    """A source of conversations that share a system message; lengths differ."""
    rows = []
    for i in range(count):
        question, answer = f"Question {i}: " + "why? " * (i % 7 + 1), f"Answer {i}, " + "because. " * (i % 11 + 1)
        turns = [("system", SYSTEM), ("user", question), ("assistant", answer)]
        rows.append(json.dumps({"messages": [{"role": role, "content": text.strip()} for role, text in turns]}))
    path.write_text("\n".join(rows) + "\n")
    return path


def make_prompts(project: Project) -> None:
    """What the asset `prompts` does, for every partition."""
    tokenizer = load_tokenizer(project.settings.model.path)
    source = sources(project)[0]
    for number in range(len(source_indexes(project)[source.name].starts)):
        key = f"{source.name}-{number:05d}"
        rows = read_partition(project.home.prompts / "index", source, key)
        limits = limits_of(project.settings.prompts, resolve(project).facts)
        write_partition(make_partition(key, source, rows, tokenizer, limits), project.home.prompts)


def run(project: Project, key: str = "rows-00000") -> Report:
    return extract(project, resolve(project), key, "run", say)


@pytest.fixture
def make(home: Path, checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[..., Project]:
    """A project of `count` rows with its prompts made."""

    def build(count: int = 20, **settings: str) -> Project:
        source = write_rows(tmp_path / "rows.jsonl", count)
        settings = {"top": "layers = [2, 4]", "prompts": "rows_per_partition = 2000", **settings}
        settings["server"] = "spool_bytes = 200_000_000\n" + settings.get("server", "")
        project = write_project(home, checkpoint("llama"), source, **settings)
        make_prompts(project)
        return project

    return build


def test_one_nan_fails_one_sample_and_only_that_one_is_asked_again(make: Callable[..., Project]) -> None:
    project = make(50)

    def nan_at_13(rid: Rid, states: np.ndarray) -> np.ndarray:
        if rid.row == 13:
            states[7, 1, 5] = np.nan
        return states

    with fake_server(project, nan_at_13) as server:
        report = run(project)
        assert report.manifest
        assert report.manifest.ledger.as_json() == {"in": 50, "stored": 49, "dropped": {}, "failed": {"finite": 1}}
        (failed,) = report.manifest.unstored
        assert (failed.sample_id, failed.attempts) == ("rows-00000/0013", 1)
        assert "token 7, slot 1" in failed.detail
        assert report.problems == ["1 rows failed: finite"]
        server.rows.clear()
        server.fault = healthy
        report = run(project)
        assert server.rows == [13]
        assert report.problems == []
        assert report.manifest
        assert report.manifest.ledger.as_json() == {"in": 50, "stored": 50, "dropped": {}, "failed": {}}
    view = open_store(project.store_path).layer_set("r2-4-8")
    assert [sample.sample_id for sample in view] == [f"rows-00000/{i:04d}" for i in range(50)]


def test_states_whose_folder_is_gone_are_asked_for_again(make: Callable[..., Project]) -> None:
    project = make(6)
    with fake_server(project) as server:
        run(project)
        assert run(project).requests == 0
        for generation in (project.store_path / "data").glob("*/rows-00000/*"):
            shutil.rmtree(generation)
        server.rows.clear()
        assert run(project).problems == []
        assert sorted(server.rows) == list(range(6))
    assert len([sample.states for sample in open_store(project.store_path).layer_set("r2-4-8")]) == 6


def test_rows_that_give_several_samples_are_all_accounted_for(
    make: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two samples a row, of which one fails: the ledger counts samples, the source's rows appended since are still to come."""

    def twice(conversation: Conversation, tokenizer: ChatTokenizer, supervise: Supervise) -> tuple[Rendered, ...]:
        rendered = render_conversation(conversation, tokenizer, supervise)
        assert not isinstance(rendered, Dropped)
        return tuple(replace(row, turn=turn) for row in rendered for turn in (0, 2))

    monkeypatch.setattr("hs_assets.samples.prepare.render_conversation", twice)
    project = make(6)
    source = project.settings.prompts.sources[0].path

    def nan_at_3(rid: Rid, states: np.ndarray) -> np.ndarray:
        return states * np.nan if rid.row == 3 else states

    with fake_server(project, nan_at_3) as server:
        report = run(project)
        assert sorted(server.rows) == list(range(12))
        assert report.manifest
        assert report.manifest.ledger.as_json() == {"in": 12, "stored": 11, "dropped": {}, "failed": {"finite": 1}}
        assert [sample.source_row for sample in report.manifest.samples] == [0, 0, 1, 2, 2, 3, 3, 4, 4, 5, 5]
        server.fault = healthy
        assert run(project).problems == []
    (complete,) = status(project)
    assert (complete.state, complete.rows, complete.stored, complete.pending) == (COMPLETE, 12, 12, 0)
    write_rows(source, 8)
    (grown,) = status(project)
    assert (grown.state, grown.rows, grown.stored, grown.pending) == (INCOMPLETE, 14, 12, 2)


@pytest.mark.parametrize("value", [np.inf, 3.4e38])
def test_infinite_states_fail_their_sample(make: Callable[..., Project], value: float) -> None:
    """3.4e38 is finite in float32 and overflows in bf16."""
    project = make(4)

    def overflow(rid: Rid, states: np.ndarray) -> np.ndarray:
        if rid.row == 2:
            states[0, 0] = value
        return states

    with fake_server(project, overflow):
        report = run(project)
    assert report.manifest
    assert report.manifest.ledger.as_json() == {"in": 4, "stored": 3, "dropped": {}, "failed": {"finite": 1}}


def test_a_sample_that_fails_the_same_rule_twice_is_rejected(make: Callable[..., Project]) -> None:
    project = make(20)

    def always_bad(rid: Rid, states: np.ndarray) -> np.ndarray:
        return states * np.nan if rid.row == 3 else states

    with fake_server(project, always_bad) as server:
        assert run(project).problems == ["1 rows failed: finite"]
        report = run(project)
        assert report.problems == []
        assert report.manifest
        assert report.manifest.ledger.as_json() == {"in": 20, "stored": 19, "dropped": {"rejected(finite)": 1}, "failed": {}}
        server.rows.clear()
        again = run(project)
        assert server.rows == []
        assert not again.manifest_changed


def test_a_sample_that_fails_in_another_way_each_time_is_not_rejected(make: Callable[..., Project]) -> None:
    project = make(4, rules="max_rejected_share = 0.5")

    def other_final(states: np.ndarray) -> np.ndarray:
        states[:, -1] = states[:, 0]
        return states

    ways: list[tuple[str, Callable[[np.ndarray], np.ndarray | int]]] = [
        ("server_error", lambda _: 500),
        ("finite", lambda states: states * np.nan),
        ("logprob", other_final),
        ("finite", lambda states: states * np.nan),
    ]
    for reason, spoil in ways:
        with fake_server(project, lambda rid, states, spoil=spoil: spoil(states) if rid.row == 1 else states) as server:
            report = run(project)
        assert 1 in server.rows
        assert report.manifest
        assert report.manifest.ledger.as_json() == {"in": 4, "stored": 3, "dropped": {}, "failed": {reason: 1}}


def test_a_run_in_which_the_server_died_does_not_hide_what_failed_before(make: Callable[..., Project]) -> None:
    """No rule saw the sample in that run: the rule fails the second time in the run after it."""
    project = make(6, rules="max_rejected_share = 0.5")
    folder = ServerFolder(project.home.server)

    def bad(rid: Rid, states: np.ndarray) -> np.ndarray:
        return states * np.nan if rid.row == 3 else states

    def dies(rid: Rid, states: np.ndarray) -> np.ndarray:
        state = folder.read_state()
        assert state
        replace(state, phase=FAILED).write(folder.state)
        raise ConnectionAbortedError

    for fault, problem in ((bad, "1 rows failed: finite"), (dies, "the server went away"), (bad, None)):
        with fake_server(project, fault):
            report = run(project)
        assert report.manifest
        if problem is not None:
            assert problem in report.problems[0]
            assert report.manifest.ledger.as_json() == {"in": 6, "stored": 5, "dropped": {}, "failed": {"finite": 1}}
    assert report.problems == []
    assert report.manifest.ledger.as_json() == {"in": 6, "stored": 5, "dropped": {"rejected(finite)": 1}, "failed": {}}


def test_too_many_rejected_samples_fail_the_partition(make: Callable[..., Project]) -> None:
    project = make(10, rules="max_rejected_share = 0.1")

    def always_bad(rid: Rid, states: np.ndarray) -> np.ndarray:
        return states * np.nan if rid.row < 2 else states

    with fake_server(project, always_bad):
        run(project)
        assert run(project).problems == ["2 of 10 rows are rejected, more than the share of 0.1"]


def test_faults_of_single_requests_are_named(make: Callable[..., Project]) -> None:
    project = make(6, server="commit_timeout_seconds = 0.5")

    def faults(rid: Rid, states: np.ndarray) -> np.ndarray | int | None:
        return {0: 500, 1: None}.get(rid.row, states)

    with fake_server(project, faults):
        report = run(project)
    assert report.manifest
    assert report.manifest.ledger.as_json() == {"in": 6, "stored": 4, "dropped": {}, "failed": {"server_error": 1, "no_dump": 1}}
    assert "HTTP 500" in next(row.detail for row in report.manifest.unstored if row.reason == "server_error")
    assert list((project.spool_path / "dumps").iterdir()) == []


def test_post_norm_states_and_other_samples_states_fail_the_logprob_rule(make: Callable[..., Project]) -> None:
    project = make(6)

    def wrong_final(rid: Rid, states: np.ndarray) -> np.ndarray:
        if rid.row == 1:
            states[:, -1] = np.roll(states[:, -1], 1, axis=-1)
        if rid.row == 2:
            states[:, -1] = states[:, 0]
        return states

    with fake_server(project, wrong_final):
        report = run(project)
    assert report.manifest
    assert {row.sample_id[-4:]: row.reason for row in report.manifest.unstored} == {"0001": "logprob", "0002": "logprob"}


def test_rows_shifted_by_one_fail_the_shared_prefix_rule(make: Callable[..., Project]) -> None:
    project = make(6, server="max_in_flight = 1")

    def shifted(rid: Rid, states: np.ndarray) -> np.ndarray:
        if rid.row == 4:
            states[1:-1] = states[:-2].copy()
        return states

    with fake_server(project, shifted):
        report = run(project)
    assert report.manifest
    assert {row.sample_id[-4:]: row.reason for row in report.manifest.unstored} == {"0004": "shared_prefix"}


def test_every_one_of_1003_rows_is_accounted_for_once(make: Callable[..., Project]) -> None:
    project = make(1003, server="max_in_flight = 8", store="generation_bytes = 2_000_000")

    def some_fail(rid: Rid, states: np.ndarray) -> np.ndarray | int:
        return 500 if rid.row % 100 == 7 else states

    with fake_server(project, some_fail) as server:
        report = run(project)
    assert sorted(server.rows) == list(range(1003))
    assert report.manifest
    ledger = report.manifest.ledger
    assert (ledger.rows, ledger.stored, sum(ledger.dropped.values()), ledger.failed) == (1003, 993, 0, {"server_error": 10})
    assert report.intake
    assert len(report.intake.generations) > 1, "one generation only"
    ids = [*(s.sample_id for s in report.manifest.samples), *(row.sample_id for row in report.manifest.unstored)]
    assert sorted(ids) == [f"rows-00000/{i:04d}" for i in range(1003)]


def test_two_runs_of_one_partition_wait_for_each_other(make: Callable[..., Project]) -> None:
    project = make(30)
    with fake_server(project) as server, ThreadPoolExecutor(2) as pool:
        server.seconds_each = 0.02
        reports = list(pool.map(lambda _: run(project), range(2)))
        assert sorted(server.rows) == list(range(30)), "a row was asked for twice"
    assert [report.problems for report in reports] == [[], []]
    assert sorted(report.requests for report in reports) == [0, 30]
    assert len(open_store(project.store_path).layer_set("r2-4-8")) == 30


def test_a_full_disk_is_the_error_that_is_shown(make: Callable[..., Project], monkeypatch: pytest.MonkeyPatch) -> None:
    """The dumps stay in the spool, and the next run stores them without asking."""
    project = make(6)
    publish = GenerationWriter.publish

    def full(_: GenerationWriter) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with fake_server(project) as server:
        monkeypatch.setattr(GenerationWriter, "publish", full)
        with pytest.raises(OSError, match="No space left on device"):
            run(project)
        monkeypatch.setattr(GenerationWriter, "publish", publish)
        report = run(project)
        assert (report.adopted, report.requests, report.problems) == (6, 0, [])
        assert sorted(server.rows) == list(range(6))


def test_a_complete_partition_asks_nothing_and_writes_nothing(make: Callable[..., Project]) -> None:
    project = make(10)
    with fake_server(project) as server:
        run(project)
        before = {path: path.stat().st_mtime_ns for path in project.store_path.rglob("*")}
        server.rows.clear()
        report = run(project)
        assert server.rows == []
        assert report.server is None, "it took the server without need"
    assert {path: path.stat().st_mtime_ns for path in project.store_path.rglob("*")} == before
    assert (report.requests, report.manifest_changed, report.problems) == (0, False, [])


def test_subsets_ask_nothing_and_new_layers_store_only_themselves(make: Callable[..., Project]) -> None:
    project = make(8)
    with fake_server(project):
        run(project)
    subset = make(8, top="layers = [4]")
    with fake_server(subset) as server:
        report = run(subset)
        assert (server.rows, report.problems) == ([], [])
    more = make(8, top="layers = [2, 4, 6]")
    with fake_server(more) as server:
        report = run(more)
        assert len(server.rows) == 8
        assert report.intake
        (generation,) = report.intake.generations
    folder = more.store_path / "data" / resolve(more).spec.fingerprint / "rows-00000" / generation
    assert {path.name for path in folder.iterdir()} == {"zarr.json", "residual_006", "input_ids", "offsets"}
    store = open_store(more.store_path)
    assert store.layer_sets() == ["r2-4-6-8", "r2-4-8", "r4-8"]
    old, new = store.layer_set("r2-4-8")[3], store.layer_set("r2-4-6-8")[3]
    assert list(new.states) == [2, 4, 6, 8]
    assert all((old.states[i].view(np.uint16) == new.states[i].view(np.uint16)).all() for i in (2, 4, 8))


def test_changed_masks_ask_the_server_for_nothing(make: Callable[..., Project]) -> None:
    project = make(8)
    with fake_server(project) as server:
        first = run(project)
        # another template that renders the same text, marks included, gives the same tokens and another version
        model = Path(project.settings.model.path)
        copy = project.home.root / "model"
        copy.mkdir()
        for path in model.iterdir():
            (copy / path.name).write_bytes(path.read_bytes())
        template = copy / "chat_template.jinja"
        marked = template.read_text().replace("{{ message.content }}<|im_end|>", _MARKED)
        template.write_text(marked)
        changed = write_project(
            project.home.root,
            copy,
            project.settings.prompts.sources[0].path,
            top="layers = [2, 4]",
            prompts="rows_per_partition = 2000",
            server="spool_bytes = 200_000_000",
        )
        make_prompts(changed)
        server.rows.clear()
        second = run(changed)
        assert server.rows == []
    assert first.manifest
    assert second.manifest
    assert first.manifest.prompts.version != second.manifest.prompts.version
    assert [s.parts for s in first.manifest.samples] == [s.parts for s in second.manifest.samples]
    store = open_store(project.store_path)
    sample = store.layer_set("r2-4-8")[0]
    assert sample.lineage.prompts_version == second.manifest.prompts.version
    assert sample.loss_mask.sum() == second.manifest.samples[0].supervised_tokens > 0


@pytest.mark.parametrize("changed", ["chat template", "tokenizer", "template in the tokenizer's file"])
def test_prompts_of_another_template_or_tokenizer_are_not_extracted(make: Callable[..., Project], changed: str) -> None:
    project = make(3)
    model = project.home.root / "model"
    shutil.copytree(project.settings.model.path, model)
    template, config = model / "chat_template.jinja", model / "tokenizer_config.json"
    if changed.startswith("template"):
        config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": template.read_text()}))
        template.unlink()
    text = project.home.config.read_text()
    project.home.config.write_text(text.replace(str(project.settings.model.path), str(model)))
    project = load_project(project.home.root)
    make_prompts(project)
    if changed == "chat template":
        template.write_text(template.read_text().replace("<|im_end|>", " <|im_end|>"))
    elif changed == "tokenizer":
        config.write_text(json.dumps({**json.loads(config.read_text()), "clean_up_tokenization_spaces": True}))
    else:
        said = json.loads(config.read_text())
        config.write_text(json.dumps({**said, "chat_template": said["chat_template"].replace("<|im_end|>", " <|im_end|>")}))
    with fake_server(project) as server:
        for extraction in (run, lambda project: capture_only(project, resolve(project), "rows-00000", say)):
            with pytest.raises(PromptError, match=r"changed since the prompts were made(.|\n)*remedy: materialise prompts"):
                extraction(project)
        assert server.rows == []
        make_prompts(project)
        assert run(project).problems == []


_MARKED = (
    "{%- if message.role == 'assistant' -%}{%- generation -%}{{ message.content }}<|im_end|>{%- endgeneration -%}"
    "{%- else -%}{{ message.content }}<|im_end|>{%- endif -%}"
)


def test_dumps_captured_alone_are_taken_by_the_samples(make: Callable[..., Project]) -> None:
    project = make(12)
    with fake_server(project) as server:
        report = capture_only(project, resolve(project), "rows-00000", say)
        assert (report.kept, report.problems, len(server.rows)) == (12, [], 12)
        assert len(list((project.spool_path / "dumps").glob("*.safetensors"))) == 12
        again = capture_only(project, resolve(project), "rows-00000", say)
        assert (again.kept, again.requests) == (12, 0)
        server.rows.clear()
        report = run(project)
        assert (report.adopted, server.rows, report.problems) == (12, [], [])
    assert list((project.spool_path / "dumps").iterdir()) == []
    assert len(open_store(project.store_path).layer_set("r2-4-8")) == 12


def test_dumps_that_cannot_fit_are_refused_before_the_first_request(make: Callable[..., Project]) -> None:
    project = make(1003)
    small = write_project(
        project.home.root,
        project.settings.model.path,
        project.settings.prompts.sources[0].path,
        top="layers = [0, 1, 2, 3, 4, 5, 6, 7]",
        prompts="rows_per_partition = 2000",
        server="spool_bytes = 67_108_864",
    )
    with fake_server(small) as server:
        with pytest.raises(SpoolError, match=r"do not fit into the spool together(.|\n)*bytes for 1003 dumps(.|\n)*streams them"):
            capture_only(small, resolve(small), "rows-00000", say)
        assert server.rows == []
        report = run(small)  # together they stream through
        assert report.problems == []
        assert report.spool_high_water_bytes <= 67_108_864


def test_a_store_that_cannot_hold_the_partition_is_refused_before_the_first_request(
    make: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    project = make(5)
    usage = type("usage", (), {"free": 1000})
    with fake_server(project) as server:
        monkeypatch.setattr("hs_assets.extraction.plan.shutil.disk_usage", lambda _: usage)
        with pytest.raises(ExtractionError, match=r"cannot hold this partition(.|\n)*bytes for 5 samples(.|\n)*1,000 bytes free"):
            run(project)
        assert server.rows == []
