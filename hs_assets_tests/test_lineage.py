"""Lineage both ways: from a source row, a run or a spec to its samples, by command and in one Parquet table."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import shutil

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from hs_assets.cli import main
from hs_assets.errors import ExportError, StoreError
from hs_assets.extraction.lineage_table import write_lineage_table
from hs_assets.store import open_store
from hs_assets.store.layout import create
from hs_assets.store.lineage import Question, lineage_rows
from hs_assets.store.manifest import UnstoredRow
from hs_assets.wire.layers import LayerSet
from hs_assets_tests.store_material import FINGERPRINT, LAYERS, make_partition, widen

OTHER = LayerSet((6,), 8)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home whose store is `store`."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def store(home):
    """Two partitions of one source and one of another; one row was dropped, one failed; run-2 made one sample's layer 4."""
    paths = create(home / "store.zarr")
    lost = (
        UnstoredRow("demo-00000/0002", 2, "f" * 64, "dropped", "too_long", "9000 tokens", 0),
        UnstoredRow("demo-00000/0003", 3, "e" * 64, "failed", "finite", "slot 1, token 7", 1),
    )
    first = make_partition(paths, [5, 6], unstored=lost, ids_by_generation=[(2, 8), (4,)])
    samples = list(first.manifest.samples)
    redone = dataclasses.replace(samples[1].parts[1], run_id="run-2", server="server-2", captured_at=1_760_000_500.5)
    samples[1] = dataclasses.replace(samples[1], parts=(samples[1].parts[0], redone))
    dataclasses.replace(first.manifest, samples=tuple(samples)).write(paths)
    second = make_partition(paths, [7], partition="demo-00001", seed=1)
    shifted = tuple(dataclasses.replace(sample, source_row=4) for sample in second.manifest.samples)
    dataclasses.replace(second.manifest, samples=shifted).write(paths)
    third = make_partition(paths, [8], partition="other-00000", seed=2, layers=OTHER)
    prompts = dataclasses.replace(third.manifest.prompts, source_name="other", source_path="/data/other.jsonl")
    dataclasses.replace(third.manifest, prompts=prompts, state_spec={"dtype": "BF16", "model_path": "x"}).write(paths)
    return open_store(paths.root)


ALL = ["demo-00000/0000", "demo-00000/0001", "demo-00000/0002", "demo-00000/0003", "demo-00001/0000", "other-00000/0000"]

QUESTIONS = {
    "all": (Question(), ALL),
    "source row": (Question(source="demo", source_row=1), ALL[1:2]),
    "source row of a later partition": (Question(source="demo", source_row=4), ALL[4:5]),
    "dropped row": (Question(source="demo.jsonl", source_row=2), ALL[2:3]),
    "source": (Question(source="/data/other.jsonl"), ALL[5:]),
    "row of any source": (Question(source_row=0), [ALL[0], ALL[5]]),
    "run": (Question(run_id="run-2"), ALL[1:2]),
    "first run": (Question(run_id="run-1"), [ALL[0], ALL[1], ALL[4], ALL[5]]),
    "spec": (Question(spec=FINGERPRINT[:6]), ALL),
    "another spec": (Question(spec="ffff"), []),
    "layer set": (Question(layer_set=OTHER.id), ALL[5:]),
    "sample": (Question(sample_id=ALL[3]), ALL[3:4]),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_questions(store, name):
    question, expected = QUESTIONS[name]
    assert [row.sample_id for row in lineage_rows(store, question)] == sorted(expected)


def test_an_unknown_layer_set(store):
    with pytest.raises(StoreError, match="no such layer set"):
        list(lineage_rows(store, Question(layer_set="r1-8")))


def test_a_row_says_all_that_the_manifest_does(store):
    (row,) = lineage_rows(store, Question(sample_id=ALL[1]))
    entry = next(s for s in store.manifests(LAYERS.id)[0].samples if s.sample_id == ALL[1])
    assert (row.outcome, row.reason, row.tokens, row.token_sha256) == ("stored", None, 6, entry.token_sha256)
    assert row.residual_ids == [[2, 8], [4]]
    assert row.generations == [part.generation for part in entry.parts]
    assert (row.run_ids, row.servers) == (["run-1", "run-2"], ["server-1", "server-2"])
    assert json.loads(row.state_spec)["model_path"] == "moonshotai/Kimi-K2.5"
    (lost,) = lineage_rows(store, Question(sample_id=ALL[2]))
    assert (lost.outcome, lost.reason, lost.detail, lost.tokens, lost.run_ids) == ("dropped", "too_long", "9000 tokens", None, [])


def test_the_table(store, tmp_path):
    """Read by pyarrow alone: the same rows, and answers to the same questions."""
    path = tmp_path / "lineage.parquet"
    assert write_lineage_table(store, path) == 6
    table = pq.read_table(path)
    assert table.column("sample_id").to_pylist() == ALL
    assert table.filter(pc.equal(table["source_row"], 1))["sample_id"].to_pylist() == [ALL[1]]
    (row,) = table.filter(pc.equal(table["sample_id"], ALL[1])).to_pylist()
    assert row["captured_at"] == [
        datetime.datetime(2025, 10, 9, 8, 53, 20, 250_000, datetime.UTC),
        datetime.datetime(2025, 10, 9, 9, 1, 40, 500_000, datetime.UTC),
    ]
    assert row["residual_ids"] == [[2, 8], [4]]
    assert table["outcome"].to_pylist().count("stored") == 4
    assert table["tokens"].null_count == 2
    assert [entry.name for entry in tmp_path.iterdir() if "lineage" in entry.name] == ["lineage.parquet"]


def test_a_table_that_cannot_be_whole_is_not_written(store, tmp_path):
    path = tmp_path / "lineage.parquet"
    path.write_text("before")
    shutil.copytree(store.paths.root, tmp_path / "store.zarr")
    store = open_store(tmp_path / "store.zarr")
    manifest = store.paths.manifest(LAYERS.id, "demo-00001")
    manifest.write_text(manifest.read_text()[:-30])
    with pytest.raises(StoreError, match="a manifest cannot be read"):
        write_lineage_table(store, path)
    assert path.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir() if "lineage" in entry.name] == ["lineage.parquet"]


def ask(home, *arguments):
    return CliRunner().invoke(main, ["lineage", "--home", str(home), *arguments])


def test_the_command(store, home, tmp_path):
    dropped = ask(home, "--source", "demo", "--row", "2")
    assert dropped.exit_code == 0
    assert dropped.stdout == f"demo-00000/0002  {LAYERS.id}  dropped  too_long: 9000 tokens  demo row 2  run -\n"
    run = ask(home, "--run", "run-2", "--json")
    assert [json.loads(line)["sample_id"] for line in run.stdout.splitlines()] == [ALL[1]]
    nothing = ask(home, "--spec", "ffff")
    assert (nothing.exit_code, nothing.stdout) == (1, "")
    assert "no row is an answer" in nothing.stderr
    table = ask(home, "--source", "demo", "--parquet", str(tmp_path / "t.parquet"))
    assert table.exit_code == 0
    assert pq.read_table(tmp_path / "t.parquet").num_rows == 5
    usage = ask(home)
    assert usage.exit_code == 2
    assert "Name a sample" in usage.stderr


def test_the_command_for_a_sample(store, home):
    record = json.loads(ask(home, ALL[1], "--json").stdout)
    assert (record["sample_id"], record["source_row"], record["parts"][1]["run_id"]) == (ALL[1], 1, "run-2")
    absent, dropped = ask(home, "demo-00000/0009"), ask(home, "demo-00000/0002")
    assert (absent.exit_code, absent.stdout) == (1, "")
    assert "no such sample" in absent.stderr
    assert (dropped.exit_code, dropped.stdout.split("  ")[2]) == (0, "dropped")


def test_every_layer_set_that_has_a_sample(tmp_path):
    paths = create(tmp_path / "store.zarr")
    made = make_partition(paths, [5, 6])
    widen(paths, made, LayerSet((3, 5), 8))
    make_partition(paths, [5], layers=LayerSet((1,), 8))
    both = [json.loads(line) for line in ask(tmp_path, "demo-00000/0001", "--json").stdout.splitlines()]
    assert [one["layer_set"] for one in both] == ["r2-4-8", "r3-5-8"]
    assert [[part["residual_ids"] for part in one["parts"]] for one in both] == [[[2, 4, 8]], [[3, 5], [8]]]
    printed = ask(tmp_path, "demo-00000/0000").stdout
    assert [line for line in printed.splitlines() if "in layer set" in line] == [
        f"demo-00000/0000 in layer set {name}" for name in ("r1-8", "r2-4-8", "r3-5-8")
    ]
    path = paths.manifest("r3-5-8", "demo-00000")
    path.write_text(path.read_text()[:-30])
    damaged = ask(tmp_path, "demo-00000/0001", "--json")
    assert (damaged.exit_code, json.loads(damaged.stdout)["layer_set"]) == (1, "r2-4-8")
    assert str(path) in damaged.stderr


def test_a_pipe_or_a_device_is_not_replaced_by_a_table(store, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ExportError, match=r"only a file(.|\n)*got: p"):
        write_lineage_table(store, tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
