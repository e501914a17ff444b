"""What is said of a file before it is used, and of the prompts once they are made: the same numbers as `json` and arithmetic."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner, Result

from hs_assets.cli import main
from hs_assets.config import Project
from hs_assets.defs.build import build_definitions
from hs_assets.extraction.status import PREPARED, status
from hs_assets.samples.prompts import read_partition_table
from hs_assets_tests.conftest import write_project
from hs_assets_tests.small_tokenizer import KIMI, json_row, save_tokenizer, stock

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 8,
    "hidden_size": 8,
    "vocab_size": 480,
    "max_position_embeddings": 4096,
}
GOOD = [json_row(("user", f"What is {n}?"), ("assistant", f"It is {'so ' * n}.")) for n in range(20)]
BAD = [b"{", b'{"turns": ["one"]}', b'{"turns": ["one"]}', b'{"messages": [], "images": ["a.png"]}', b""]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tokenizer(tmp_path_factory.mktemp("model"), stock(KIMI))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def write(path: Path, rows: list[bytes]) -> Path:
    path.write_bytes(b"\n".join(rows) + b"\n")
    return path


def check(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["prompts", "check", *map(str, arguments)])


# The command


def test_check(model: Path, tmp_path: Path) -> None:
    result = check(write(tmp_path / "rows.jsonl", GOOD + BAD), "--model", model, "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert (said["source_rows"], said["training_rows"], said["prompts"], said["partitions"]) == (25, 25, 20, 1)
    assert said["formats"] == {"messages": 21, "turns": 2, "unknown": 2}
    assert {reason: (drops["rows"], drops["source_row"]) for reason, drops in said["dropped"].items()} == {
        "invalid_json": (1, 20),
        "no_assistant_turn": (1, 21),
        "duplicate": (1, 22),
        "unread_column": (1, 23),
        "empty_row": (1, 24),
    }
    assert said["dropped"]["duplicate"]["detail"] == "the same bytes as check:21"
    assert said["unread_columns"] == {"images": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]


def test_lengths_and_what_is_supervised(model: Path, tmp_path: Path) -> None:
    """Of 101 rows of token ids, which say themselves how long they are and what of them is supervised."""
    rows = [{"input_ids": [n % 480] * (n + 1), "loss_mask": [0] * (n // 2) + [1] * (n + 1 - n // 2)} for n in range(101)]
    source = write(tmp_path / "ids.jsonl", [json.dumps(row).encode() for row in rows])
    said = json.loads(check(source, "--model", model, "--json").stdout)
    assert said["length_quantiles"] == {"min": 1, "25%": 26, "50%": 51, "75%": 76, "95%": 96, "99%": 100, "max": 101}
    assert said["tokens"] == sum(len(row["input_ids"]) for row in rows)
    assert said["supervised_tokens"] == sum(sum(row["loss_mask"]) for row in rows)
    assert said["supervised_share"] == round(said["supervised_tokens"] / said["tokens"], 4)
    assert said["partitions"] == 2


@pytest.mark.parametrize(("bad", "status"), [(20, 0), (21, 1)])
def test_more_dropped_than_may_be(bad: int, status: int, model: Path, tmp_path: Path) -> None:
    rows = [*GOOD, *(b'{"n": %d}' % n for n in range(bad))]
    result = check(write(tmp_path / "rows.jsonl", rows), "--model", model)
    assert result.exit_code == status
    assert ("NOT GOOD" in result.stdout) == bool(status)


def test_limits_of_a_configuration(model: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", [*GOOD, b"{"])
    prompts = 'max_dropped_share = 0.0\nmin_supervised_tokens = 10\n[[prompts.sources]]\npath = "x"\n'
    (tmp_path / "c.toml").write_text(f'[model]\npath = "{model}"\n[prompts]\n{prompts}')
    result = check(source, "--config", tmp_path / "c.toml", "--json")
    assert result.exit_code == 1
    said = json.loads(result.stdout)
    assert said["dropped"]["too_few_supervised_tokens"]["rows"] > 0
    assert said["partitions_that_fail"] == ["check-00000"]


def test_a_format_that_is_set(model: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", [b'{"prompt": "one", "completion": "two", "text": "three"}'])
    assert json.loads(check(source, "--model", model, "--json").stdout)["formats"] == {"question_answer": 1}
    said = json.loads(check(source, "--model", model, "--format", "text", "--json").stdout)
    assert (said["formats"], said["supervised_share"]) == ({"text": 1}, 1.0)
    assert said["unread_columns"] == {"completion": 1, "prompt": 1}


def test_the_format_that_the_configuration_sets_for_the_file(model: Path, tmp_path: Path) -> None:
    """As the asset reads it; for another file it says nothing, and --format says more."""
    for name in ("rows.jsonl", "others.jsonl"):
        write(tmp_path / name, [b'{"prompt": "one", "completion": "two", "text": "three"}'])
    sources = '[[prompts.sources]]\npath = "rows.jsonl"\nformat = "text"\n'
    (tmp_path / "c.toml").write_text(f'[model]\npath = "{model}"\n[prompts]\n{sources}')

    def formats(name: str, *options: str) -> dict[str, int]:
        said = json.loads(check(tmp_path / name, "--config", tmp_path / "c.toml", "--json", *options).stdout)
        return dict(said["formats"])

    assert formats("rows.jsonl") == {"text": 1}
    assert formats("others.jsonl") == {"question_answer": 1}
    assert formats("rows.jsonl", "--format", "question_answer") == {"question_answer": 1}


def test_rows_without_an_answer_can_have_one(model: Path, tmp_path: Path) -> None:
    said = check(write(tmp_path / "rows.jsonl", [*GOOD, b'{"turns": ["one"]}']), "--model", model).stdout
    assert "[responses] enabled = true" in said
    assert "[responses]" not in check(write(tmp_path / "rows.jsonl", GOOD), "--model", model).stdout


def test_an_empty_file_has_no_prompts(model: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b"")
    assert check(tmp_path / "rows.jsonl", "--model", model).exit_code == 1


def test_wrong_use(model: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", GOOD)
    (tmp_path / "empty").mkdir()
    (tmp_path / "t.parquet").write_bytes(b"no table")
    for arguments, said in (
        ([], "Missing argument"),
        ([tmp_path / "none.jsonl", "--model", model], "does not exist"),
        ([source], "no model is named"),
        ([source, "--model", tmp_path / "none"], "does not exist"),
        ([source, "--model", tmp_path / "empty"], "config.json cannot be read"),
        ([source, "--model", model, "--format", "sharegpt"], "is not one of"),
        ([tmp_path / "empty", "--model", model], "no data in the folder"),
        ([tmp_path / "t.parquet", "--model", model], "a source cannot be read"),
    ):
        result = check(*arguments)
        assert result.exit_code == 2, arguments
        assert said in result.output


def test_the_command_as_a_program(model: Path, tmp_path: Path) -> None:
    """In a process of its own: the numbers on one stream, the progress on the other, nothing of Dagster or torch loaded."""
    source = write(tmp_path / "rows.jsonl", GOOD + BAD)
    code = (
        "import sys; from hs_assets.cli import main\n"
        "try: main()\n"
        "finally: print(sorted({'dagster', 'torch'} & {*sys.modules}), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "prompts", "check", source, "--model", model], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{source}: 25 rows\nformats      messages 21")
    assert "      1  duplicate\n           row 22: the same bytes as check:21" in done.stdout
    assert done.stderr.splitlines()[-1] == "[]"


def test_help_has_examples() -> None:
    result = CliRunner().invoke(main, ["prompts", "check", "--help"])
    assert result.exit_code == 0
    assert "hs-assets prompts check chats.jsonl --model" in result.stdout


# The asset


@pytest.fixture
def project(home: Path, model: Path, tmp_path: Path) -> Project:
    source = write(tmp_path / "rows.jsonl", GOOD + BAD)
    return write_project(home, model, source, top="layers = [2, 4]", prompts="rows_per_partition = 20")


def materialize(project: Project, key: str) -> dg.ExecuteInProcessResult:
    job = build_definitions(project).resolve_job_def("extract")
    keys = [dg.AssetKey("prompts")]
    return job.execute_in_process(partition_key=key, asset_selection=keys, raise_on_error=False)


def metadata_of(result: dg.ExecuteInProcessResult) -> dict[str, Any]:
    (event,) = result.asset_materializations_for_node("prompts")
    return {name: value.value for name, value in event.metadata.items()}


def test_metadata(project: Project) -> None:
    said = metadata_of(materialize(project, "rows-00000"))
    table = read_partition_table(project.home.prompts, "rows-00000")
    lengths = sorted(len(prompt.input_ids) for prompt in table.prompts)
    assert (said["source rows"], said["rows"], said["prompts"]) == (20, 20, 20)
    assert said["formats"] == {"messages": 20}
    assert said["dropped"] == {}
    (quantiles,) = said["lengths (tokens)"].records
    assert quantiles.data["min"] == lengths[0]
    assert quantiles.data["max"] == lengths[-1] == said["longest prompt (tokens)"]
    assert said["tokens"] == sum(lengths)
    supervised = sum(int(prompt.loss_mask.sum()) for prompt in table.prompts)
    assert said["supervised share"] == round(supervised / sum(lengths), 4)


def test_a_partition_that_drops_too_many_fails(project: Project) -> None:
    """All five rows of the second one are dropped: it is refused, with the reasons."""
    result = materialize(project, "rows-00001")
    assert not result.success
    (event,) = [event for event in result.all_events if event.is_step_failure]
    failure = event.step_failure_data.user_failure_data
    assert "5 of 5 rows are dropped, more than the share of 0.5" in failure.description
    assert failure.metadata["dropped"].value == {
        "invalid_json": 1,
        "no_assistant_turn": 1,
        "duplicate": 1,
        "unread_column": 1,
        "empty_row": 1,
    }


def test_another_limit_makes_other_prompts(project: Project, model: Path, home: Path) -> None:
    """The same file with another limit: the data version differs, and cut prompts have hashes of their own."""

    def version(project: Project) -> tuple[str, list[str]]:
        result = materialize(project, "rows-00000")
        (event,) = result.asset_materializations_for_node("prompts")
        table = read_partition_table(project.home.prompts, "rows-00000")
        return event.tags["dagster/data_version"], [prompt.token_sha256 for prompt in table.prompts]

    before = version(project)
    assert version(project) == before
    source = project.settings.prompts.sources[0].path
    settings = 'rows_per_partition = 20\nmax_tokens = 26\ntoo_long = "cut"'
    after = version(write_project(home, model, source, top="layers = [2, 4]", prompts=settings))
    assert after[0] != before[0]
    assert len(after[1]) == len(before[1])
    assert after[1] != before[1]


def test_status_counts_training_rows(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows give several prompts, and where rows were appended since: all are counted, none twice."""
    from hs_assets_tests.test_prompts import several

    three = json_row(("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four"), ("assistant", "five"))
    source = write(project.settings.prompts.sources[0].path, [three, b"{", GOOD[0]])
    monkeypatch.setattr("hs_assets.samples.prepare.render_conversation", several)
    assert materialize(project, "rows-00000").success
    (prepared,) = status(project)
    assert (prepared.state, prepared.rows, prepared.pending, prepared.dropped) == (PREPARED, 5, 4, {"invalid_json": 1})
    write(source, [three, b"{", GOOD[0], GOOD[1]])
    (prepared,) = status(project)
    assert (prepared.rows, prepared.pending) == (6, 5)
