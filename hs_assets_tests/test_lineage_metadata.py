"""What Dagster shows of a partition's lineage: its command, run as it is shown, gives the same of every row."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import dagster as dg
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from hs_assets.cli import main
from hs_assets.config import Project, load_project
from hs_assets.defs.lineage_metadata import lineage_metadata
from hs_assets.store.layout import StorePaths, create
from hs_assets.store.manifest import Manifest, UnstoredRow
from hs_assets_tests.store_material import FINGERPRINT, LAYERS, make_partition


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return load_project(tmp_path / "a home", "preset:demo")


def made(paths: StorePaths) -> Manifest:
    """Twelve samples of two captures each, of which run-2 made the second of one; a row that was dropped, after the first two."""
    lost = UnstoredRow("demo-00000/0012", 12, "f" * 64, "dropped", "too_long", "9000 tokens", 0)
    manifest = make_partition(paths, [5] * 12, unstored=(lost,), ids_by_generation=[(2, 8), (4,)]).manifest
    first, second = manifest.samples[1].parts
    redone = dataclasses.replace(manifest.samples[1], parts=(first, dataclasses.replace(second, run_id="run-2")))
    manifest = dataclasses.replace(manifest, samples=(manifest.samples[0], redone, *manifest.samples[2:]))
    manifest.write(paths)
    make_partition(paths, [4], partition="demo-00001", seed=1)
    return manifest


def test_the_table_and_what_the_command_writes_are_of_the_same_rows(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = create(project.store_path)
    metadata = lineage_metadata(made(paths), project)
    monkeypatch.chdir(project.home.root)
    program, *words = shlex.split(str(metadata["lineage of all rows"].value).strip("`"))
    assert program == "hs-assets"
    assert CliRunner().invoke(main, words).exit_code == 0
    table = pq.read_table(project.home.root / "demo-00000.parquet").to_pylist()
    assert [row["partition"] for row in table] == ["demo-00000"] * 13
    shown = metadata["lineage of the first rows"]
    assert isinstance(shown, dg.TableMetadataValue)
    assert [record.data["sample"] for record in shown.records] == [row["sample_id"] for row in table[:10]]
    for record, row in zip(shown.records, table[:10], strict=True):
        assert record.data["outcome"] == "stored"
        assert (record.data["source row"], record.data["tokens"]) == (row["source_row"], row["tokens"])
        assert record.data["sha256 of the row"] == row["source_sha256"]
        assert record.data["sha256 of the tokens"] == row["token_sha256"]
        assert record.data["runs"] == ", ".join(dict.fromkeys(row["run_ids"]))
        assert record.data["servers"] == row["servers"][0]
        assert record.data["captured (UTC)"] == f"{row['captured_at'][0]:%Y-%m-%d %H:%M:%S}+00:00"
    assert [record.data["runs"] for record in shown.records[:3]] == ["run-1", "run-1, run-2", "run-1"]


def test_the_counts(project: Project) -> None:
    paths = create(project.store_path)
    manifest = made(paths)
    metadata = lineage_metadata(manifest, project)
    counts = metadata["lineage"].value
    assert isinstance(counts, dict)
    assert counts["samples_by_run"] == {"run-1": 12, "run-2": 1}
    assert counts["samples_by_server"] == {"server-1": 12}
    assert sorted(counts["samples_by_generation"].values()) == [12, 12]
    assert (counts["source"], counts["state_fingerprint"]) == ({"name": "demo", "path": "demo.jsonl"}, FINGERPRINT)
    assert (counts["prompts"], counts["state_spec"]) == ({"partition": "demo-00000", "version": "prompts-1"}, manifest.state_spec)
    assert metadata["manifest"].value == str(paths.manifest(LAYERS.id, "demo-00000"))


def test_a_row_without_states_says_why(project: Project) -> None:
    paths = create(project.store_path)
    lost = UnstoredRow("demo-00000/0000", 3, "f" * 64, "dropped", "too_long", "9000 tokens", 0)
    manifest = dataclasses.replace(made(paths), rows=1, samples=(), unstored=(lost,))
    shown = lineage_metadata(manifest, project)["lineage of the first rows"]
    assert isinstance(shown, dg.TableMetadataValue)
    (record,) = shown.records
    assert (record.data["outcome"], record.data["source row"], record.data["runs"]) == ("dropped: too_long", 3, "")
