"""Exports from the command line and as Dagster assets, over a store that is there already: no server, no tokenizer."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import numpy as np
import pytest
from click.testing import CliRunner, Result

from hs_assets.cli import main
from hs_assets.config import Project
from hs_assets.defs.build import build_definitions
from hs_assets.errors import ExportError
from hs_assets.store.layout import create
from hs_assets.store.manifest import UnstoredRow
from hs_assets_tests.conftest import write_project
from hs_assets_tests.export_material import HIDDEN, LAYERS, VOCABULARY, put_partition, put_store, random_sample

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": LAYERS.final,
    "hidden_size": HIDDEN,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
}
LENGTHS = {"rows-00000": [37, 300], "rows-00001": [9]}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project whose store has two partitions of its source."""
    model, source, home = tmp_path / "model", tmp_path / "rows.jsonl", tmp_path / "home"
    model.mkdir()
    home.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    source.write_text("".join(json.dumps({"row": i}) + "\n" for i in range(4)))
    made = write_project(home, model, source, top=f"layers = {list(LAYERS.aux)}", prompts="rows_per_partition = 2")
    put_store(made.store_path, LENGTHS)
    return made


def run(project: Project, *arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["export", *map(str, arguments), "--home", str(project.home.root)])


@pytest.mark.parametrize(
    ("words", "suffix"),
    [("specforge", "ckpt"), ("speculators", "arrow"), ("speculators --legacy", "pt"), ("modelopt", "pt")],
)
def test_a_store_is_exported(project: Project, tmp_path: Path, words: str, suffix: str) -> None:
    result = run(project, *words.split(), tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    body = json.loads(result.stdout)
    assert (body["samples"], body["tokens"], [one["state"] for one in body["exported"]]) == (3, 346, ["written", "written"])
    assert len(list((tmp_path / "out").rglob(f"*.{suffix}"))) == 3
    again = json.loads(run(project, *words.split(), tmp_path / "out", "--json").stdout)
    assert [one["state"] for one in again["exported"]] == ["identical", "identical"]


def test_people_are_told_what_was_done(project: Project, tmp_path: Path) -> None:
    result = run(project, "speculators", tmp_path / "out", "--partition", "rows-00001")
    assert result.exit_code == 0, result.output
    assert "rows-00001: written, 1 samples, 9 tokens, " in result.stdout
    assert f"1 rows in {tmp_path / 'out' / 'all'}" in result.stdout
    assert "no vocabulary mapping" in result.stdout


def test_people_are_told_of_rows_that_failed(project: Project, tmp_path: Path) -> None:
    failed = UnstoredRow("rows-00002/0001", 5, "0" * 64, "failed", "finite", "token 7, slot 1", 1)
    put_partition(create(project.store_path), [random_sample("rows-00002/0000", 7, np.random.default_rng(1))], unstored=(failed,))
    result = run(project, "modelopt", tmp_path / "out")
    assert result.exit_code == 0, result.output
    told = [line for line in result.stdout.splitlines() if "NOT COMPLETE" in line]
    assert [line.partition(":")[0] for line in told] == ["rows-00002"]
    assert told[0].endswith("; NOT COMPLETE, rows that failed: finite 1")


def test_a_vocabulary_changes_only_with_replace(project: Project, tmp_path: Path) -> None:
    first = run(project, "vocabulary", "--draft-size", "100", "--json")
    assert (first.exit_code, json.loads(first.stdout)["changed"]) == (0, True)
    sha256 = json.loads(first.stdout)["sha256"]
    other = run(project, "vocabulary", "--draft-size", "200")
    assert other.exit_code == 1
    assert "another vocabulary mapping is there already" in other.output
    put_partition(create(project.store_path), [random_sample("rows-00002/0000", 7, np.random.default_rng(1))])
    exported = run(project, "specforge", tmp_path / "out")
    assert f"vocabulary mapping {sha256[:16]}; STALE, partitions since it was made: 1 new (rows-00002)" in exported.stdout
    replaced = run(project, "vocabulary", "--draft-size", "200", "--replace")
    assert replaced.exit_code == 0, replaced.output
    assert "STALE" not in run(project, "specforge", tmp_path / "out").stdout


@pytest.mark.parametrize(
    ("arguments", "said", "status"),
    [
        (("specforge", "out", "--partition", "rows-00007"), "not stored in this layer set", 1),
        (("specforge", "out", "--layer-set", "r1-8"), "no such layer set in the store", 1),
        (("vocabulary", "--draft-size", "7000"), "larger than the target's", 1),
        (("vocabulary", "--draft-size", "0"), "0 is not in the range", 2),
        (("specforge",), "Missing argument 'DEST'", 2),
    ],
)
def test_errors_are_said_without_a_traceback(
    project: Project, tmp_path: Path, arguments: tuple[str, ...], said: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(project, *arguments)
    assert (result.exit_code, "Traceback" in result.output) == (status, False)
    assert said in result.output
    assert not (tmp_path / "out").exists()


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    (tmp_path / "dagster").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "dagster")) as made:
        yield made


def test_exports_are_assets(project: Project, instance: dg.DagsterInstance) -> None:
    defs = build_definitions(project)
    dg.Definitions.validate_loadable(defs)
    graph = defs.resolve_asset_graph()
    names = ("specforge", "speculators", "speculators_legacy", "modelopt")
    exports = [dg.AssetKey(f"{name}_export") for name in names]
    for key in exports:
        assert graph.get(key).parent_keys == {dg.AssetKey("eagle3_samples"), dg.AssetKey("vocabulary_mapping")}
        assert graph.get(key).partitions_def == graph.get(dg.AssetKey("eagle3_samples")).partitions_def
    assets = [asset for asset in defs.assets or [] if isinstance(asset, dg.AssetsDefinition)]
    resources = defs.resources

    def materialize(key: dg.AssetKey, partition: str | None = None, **config: object) -> dg.AssetMaterialization:
        run_config = {"ops": {"__".join(key.path): {"config": config}}} if config else None
        result = dg.materialize(
            assets, selection=[key], partition_key=partition, instance=instance, resources=resources, run_config=run_config
        )
        assert result.success
        (event,) = result.asset_materializations_for_node("__".join(key.path))
        return event

    vocabulary = materialize(dg.AssetKey("vocabulary_mapping"), draft_size=100)
    sha256 = vocabulary.metadata["sha256"].value
    for key in exports:
        for partition in LENGTHS if key == exports[1] else ["rows-00000"]:
            made = materialize(key, partition)
            assert (made.metadata["state"].value, made.metadata["samples"].value) == ("written", len(LENGTHS[partition]))
            assert made.metadata["vocabulary mapping"].value["sha256"] == sha256
            assert len(list(Path(made.metadata["path"].value).iterdir())) > 1
    assert materialize(exports[0], "rows-00000").metadata["state"].value == "identical"
    assert materialize(dg.AssetKey("speculators_dataset")).metadata["rows"].value == 3
    with pytest.raises(ExportError, match=rf"another vocabulary mapping is there(.|\n)*{sha256}(.|\n)*replace: true"):
        materialize(dg.AssetKey("vocabulary_mapping"), draft_size=200)
    unchanged = materialize(dg.AssetKey("vocabulary_mapping"), draft_size=100)
    assert (unchanged.metadata["sha256"].value, unchanged.metadata["replaced"].value) == (sha256, "nothing")
    replaced = materialize(dg.AssetKey("vocabulary_mapping"), draft_size=200, replace=True)
    assert (replaced.metadata["replaced"].value, replaced.metadata["draft size"].value) == (sha256, 200)


def test_a_link_to_another_disk_is_followed(project: Project, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as disk:
        (tmp_path / "out").symlink_to(Path(disk, "there"))
        result = run(project, "modelopt", tmp_path / "out")
        assert result.exit_code == 0, result.output
        assert len(list(Path(disk, "there").glob("*/*.pt"))) == 3
        assert [path.name for path in Path(disk).iterdir()] == ["there"]
