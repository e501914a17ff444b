"""`hs-assets show`: a row's text with its mask, its source, its states' norms, and what to type for an id that is not there."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from hs_assets.cli import main
from hs_assets.config import Project
from hs_assets.console import shown_row
from hs_assets.samples.filters import PromptLimits
from hs_assets.samples.page import render_page
from hs_assets.samples.prepare import make_partition
from hs_assets.samples.prompts import read_partition_table, write_partition
from hs_assets.samples.show import find_row, show_row
from hs_assets.samples.sources import Partitioning, Source, read_partition, refresh
from hs_assets.samples.template import ChatTemplate
from hs_assets.samples.tokenizer import load_tokenizer
from hs_assets.store.layout import create
from hs_assets.store.manifest import StoredSample, UnstoredRow
from hs_assets.store.masks import write_masks
from hs_assets.store.reader import open_store
from hs_assets.store.writer import ArrayShape, GenerationWriter
from hs_assets_tests import store_material
from hs_assets_tests.conftest import write_project
from hs_assets_tests.small_tokenizer import CHATML, json_row, save_tokenizer, stock

THREE_TURNS = json_row(
    ("user", "one?"),
    ("assistant", "<think>\nfirst thought\n</think>\n\nfirst answer"),
    ("user", "two?"),
    ("assistant", "<think>\nsecond thought\n</think>\n\nsecond answer"),
    ("user", "three?"),
    ("assistant", "<think>\nthird thought\n</think>\n\nthird answer"),
)
ROWS = (THREE_TURNS, b'{"text": [1]}', json_row(("user", "say \x1b[31m"), ("assistant", "für [[1]]")))


@pytest.fixture
def project(home: Path, tmp_path: Path) -> Project:
    """A project whose prompts are made; nothing is extracted."""
    model = save_tokenizer(tmp_path / "model", stock(CHATML))
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(ROWS) + b"\n")
    made = write_project(home, model, path)
    index, source = made.home.prompts / "index", Source("rows", path)
    refresh(index, [source], Partitioning(64, 1_000_000))
    rows = read_partition(index, source, "rows-00000")
    write_partition(make_partition("rows-00000", source, rows, load_tokenizer(model), PromptLimits(400, 482)), made.home.prompts)
    return made


def hs_assets(project: Project, *words: str) -> Result:
    return CliRunner().invoke(main, [*words, "--home", str(project.home.root)])


def store_states(project: Project) -> dict[int, np.ndarray]:
    """Store states of the first row, say that the third failed, and return the states."""
    partition = read_partition_table(project.home.prompts, "rows-00000")
    first, third = partition.prompts
    paths, layers, shape = create(project.store_path), store_material.LAYERS, ArrayShape(16, "BF16", 8, 64)
    states = {
        i: np.random.default_rng(i).normal(size=(len(first.input_ids), 16)).astype(store_material.DTYPES["BF16"])
        for i in layers.residual_ids
    }
    writer = GenerationWriter(paths, store_material.FINGERPRINT, partition.key, layers.residual_ids, layers.final, shape)
    offset = writer.append(first.input_ids, states)
    writer.publish()
    write_masks(paths, partition.key, partition.version, [first.loss_mask])
    part = store_material.Part(
        writer.name, offset, layers.residual_ids, tuple(0.0 for _ in states), 17, "server-1", "run-1", 1_760_000_000.25
    )
    sample = StoredSample(
        "rows-00000/0000", 0, "", len(first.input_ids), int(first.loss_mask.sum()), first.token_sha256, 0, (part,)
    )
    failed = UnstoredRow("rows-00000/0002", 2, "", "failed", "finite", f"token {third.row}", 1)
    dropped = UnstoredRow("rows-00000/0001", 1, "", "dropped", "unknown_format", "", 1)
    store_material.Manifest(
        partition=partition.key,
        layer_set=layers.id,
        state_fingerprint=store_material.FINGERPRINT,
        state_spec={},
        prompts=store_material.PromptsVersion(partition.version, "rows", "", "", ""),
        rows=3,
        samples=(sample,),
        unstored=(dropped, failed),
    ).write(paths)
    return states


def test_which_turn_a_row_is_for_and_what_it_was_read_as(project: Project) -> None:
    """Where several rows come of one conversation they differ by little else."""
    made = read_partition_table(project.home.prompts, "rows-00000")
    first = dataclasses.replace(made.rows[0], turn=3)
    write_partition(dataclasses.replace(made, rows=(first, *made.rows[1:])), project.home.prompts)
    assert "row 0 as messages, for turn 3 alone" in hs_assets(project, "show", "rows-00000/0000").output
    shown = json.loads(hs_assets(project, "show", "rows-00000/0000", "--json").output)
    assert (shown["source"]["turn"], shown["source"]["format"]) == (3, "messages")
    page = render_page(read_partition_table(project.home.prompts, "rows-00000"), load_tokenizer(project.settings.model.path))
    assert "source row 0, turn 3 alone" in page


def test_the_mask_of_three_turns_with_reasoning(project: Project) -> None:
    result = hs_assets(project, "show", "rows-00000/0000")
    assert result.exit_code == 0
    assert re.findall("⟦(.*?)⟧", result.output, re.DOTALL) == [
        f"<think>\n{n} thought\n</think>\n\n{n} answer<|im_end|>" for n in ("first", "second", "third")
    ]
    text = result.output.split("sample    ")[0].replace("⟦", "").replace("⟧", "")
    messages = json.loads(THREE_TURNS)["messages"]
    assert text == "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    (prompt, _) = read_partition_table(project.home.prompts, "rows-00000").prompts
    tokens, supervised = len(prompt.input_ids), int(prompt.loss_mask.sum())
    assert f"tokens    {tokens}, {supervised} supervised ({supervised / tokens:.1%})" in result.output
    assert f"source    {project.settings.prompts.sources[0].path}, row 0" in result.output


def test_on_a_terminal_what_is_supervised_is_coloured(project: Project) -> None:
    partition, row = find_row(project.home.prompts, "rows-00000/0000")
    tokenizer = load_tokenizer(project.settings.model.path)
    shown = show_row(partition, row, tokenizer, project.home.prompts / "index", None)
    text = shown_row(shown, colour=True, ids=False)
    assert "⟦" not in text.plain
    green = "".join(text.plain[span.start : span.end] for span in text.spans if "green" in str(span.style))
    (prompt, _) = partition.prompts
    assert green == tokenizer.decode(prompt.input_ids[prompt.loss_mask].tolist())


def test_ids_stand_beside_the_pieces(project: Project) -> None:
    result = hs_assets(project, "show", "rows-00000/0002", "--ids")
    lines = result.output.split("sample    ")[0].splitlines()
    (_, prompt) = read_partition_table(project.home.prompts, "rows-00000").prompts
    assert [int(i) for line in lines for i in re.match("[ 0-9]+", line)[0].split()] == prompt.input_ids.tolist()  # type: ignore[index]
    supervised = [line for line in lines if "⟦" in line]
    assert len(supervised) <= int(prompt.loss_mask.sum())
    assert supervised[-1].endswith("⟦'<|im_end|>'⟧")
    assert "\x1b" not in result.output


def test_a_dropped_row_shows_why_and_the_row(project: Project) -> None:
    result = hs_assets(project, "show", "rows-00000/0001")
    assert result.exit_code == 0
    assert "dropped   unknown_format: text is a list, not a string" in result.output
    assert 'row       {"text": [1]}' in result.output
    project.settings.prompts.sources[0].path.unlink()
    assert "note      the source row cannot be read" in hs_assets(project, "show", "rows-00000/0001").output


def test_norms_and_lineage_once_extracted(project: Project) -> None:
    states = store_states(project)
    shown = json.loads(hs_assets(project, "show", "rows-00000/0000", "--json").output)
    assert sorted(map(int, shown["states"])) == sorted(states)
    for residual_id, rows in states.items():
        lengths = [float(np.sqrt(sum(float(x) ** 2 for x in row))) for row in rows]
        got = shown["states"][str(residual_id)]
        assert [got["mean"], got["min"], got["max"]] == pytest.approx([np.mean(lengths), min(lengths), max(lengths)], rel=1e-5)
    assert (shown["lineage"]["run_ids"], shown["lineage"]["servers"]) == (["run-1"], ["server-1"])
    assert (shown["notes"], shown["unstored"], shown["dropped"]) == ([], None, None)
    assert "".join(piece["text"] for piece in shown["pieces"]).endswith("third answer<|im_end|>\n")
    printed = hs_assets(project, "show", "rows-00000/0000").output
    assert re.search(r"norm 2 +mean [\d.]+, [\d.]+ to [\d.]+", printed)
    assert "by server server-1" in printed
    assert "failed    finite: token 2" in hs_assets(project, "show", "rows-00000/0002").output


def test_what_no_longer_fits_together_is_said(project: Project) -> None:
    store_states(project)
    partition, row = find_row(project.home.prompts, "rows-00000/0002")
    first = find_row(project.home.prompts, "rows-00000/0000")[1]
    swapped = dataclasses.replace(first, content=row.content)
    tokenizer = load_tokenizer(project.settings.model.path)
    other = dataclasses.replace(tokenizer, template=ChatTemplate("another one", {}), tokenizer_sha256="f" * 64)
    notes = show_row(partition, swapped, other, project.home.prompts / "index", open_store(project.store_path)).notes
    assert [note.split(":")[0] for note in notes] == [
        "the template changed since the prompts were made",
        "the tokenizer changed since the prompts were made",
        "the states are those of an earlier prompt",
    ]


@pytest.mark.parametrize(
    ("sample_id", "nearest"),
    [("rows-00000/2", "rows-00000/0002"), ("rows-0000/0001", "rows-00000/0000"), ("../x", "rows-00000/0000"), ("", "rows-00000")],
)
def test_an_unknown_sample_names_the_nearest(project: Project, sample_id: str, nearest: str) -> None:
    result = hs_assets(project, "show", sample_id)
    assert result.exit_code == 2
    assert "no such sample" in result.stderr
    assert nearest in result.stderr
    assert result.stdout == ""


def test_without_prompts_it_says_so(home: Path, project: Project) -> None:
    for path in project.home.prompts.glob("*.parquet"):
        path.unlink()
    result = hs_assets(project, "show", "rows-00000/0000")
    assert (result.exit_code, "materialise prompts first" in result.stderr) == (2, True)
