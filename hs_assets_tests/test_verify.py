"""verify names the partition and the sample of whatever is wrong, and the reader raises on the same."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from hs_assets.cli import main
from hs_assets.errors import StoreError
from hs_assets.store import open_store
from hs_assets.store.layout import StorePaths, create
from hs_assets.store.manifest import UnstoredRow
from hs_assets.store.masks import write_final_norm
from hs_assets.store.verify import count_samples, verify
from hs_assets.store.writer import ArrayShape
from hs_assets_tests.store_material import LAYERS, flip_byte, generation_folder, make_partition

LENGTHS = [11, 6, 9, 20]
NAMES = ["demo-00000", "demo-00001", "demo-00002"]
SHAPES = {"none": ArrayShape(4, "BF16", 4, 8), "blosc": ArrayShape(4, "BF16", 4, 8, "blosc")}


@pytest.fixture(scope="module", params=SHAPES)
def pattern(request, tmp_path_factory):
    """A store of three partitions, to be copied and damaged; the last has a row that was dropped."""
    paths = create(tmp_path_factory.mktemp("pattern") / "store.zarr")
    dropped = UnstoredRow("demo-00002/0004", 4, "f" * 64, "dropped", "too_long", "9000 tokens", 0)
    made = {
        name: make_partition(
            paths, LENGTHS, partition=name, seed=n, shape=SHAPES[request.param], unstored=(dropped,) if n == 2 else ()
        )
        for n, name in enumerate(NAMES)
    }
    write_final_norm(paths, "weights-1", "LlamaForCausalLM", np.ones(4, np.float32), 1e-5)
    return paths, made


@pytest.fixture
def damaged(pattern, tmp_path):
    """A copy of the store, and the folder of the generation of demo-00001 in it."""
    root = tmp_path / "store.zarr"
    shutil.copytree(pattern[0].root, root)
    return StorePaths(root), generation_folder(StorePaths(root), pattern[1]["demo-00001"])


def problems_of(paths, processes=1):
    return [problem for checked in verify(open_store(paths.root), processes) for problem in checked.problems]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_whole_store_holds(pattern, processes):
    store = open_store(pattern[0].root)
    checked = list(verify(store, processes))
    assert [problem for one in checked for problem in one.problems] == []
    assert sum(one.good for one in checked) == sum(one.samples for one in checked) == count_samples(store) == 12
    assert [one.last for one in checked] == [text for name in NAMES for text in (name, f"{name}/0003")] + ["models/weights-1"]


def flip(path):
    flip_byte(path, 5)


def cut(path):
    path.write_bytes(path.read_bytes()[:-7])


def flip_index(path):
    flip_byte(path, path.stat().st_size - 9)


@pytest.mark.parametrize("residual", ["residual_002", "residual_004", "final"])
@pytest.mark.parametrize("damage", [flip, cut, Path.unlink, flip_index], ids=["flipped", "cut", "missing", "index"])
def test_a_damaged_shard(damaged, residual, damage):
    """Shard 1 holds rows 8 to 15, its first chunk 8 to 11: of sample 0 (rows 0 to 10) and of sample 1 (rows 11 to 16)."""
    paths, folder = damaged
    damage(folder / residual / "c" / "1" / "0")
    problems = problems_of(paths)
    assert [problem.where for problem in problems] == ["demo-00001/0000", "demo-00001/0001"]
    assert {(problem.layer_set, problem.partition) for problem in problems} == {(LAYERS.id, "demo-00001")}
    with pytest.raises(StoreError, match="demo-00001/0000"):
        open_store(paths.root).read("demo-00001/0000")
    sound = [sample.sample_id for sample in open_store(paths.root).layer_set(LAYERS.id)[8:]]
    assert sound == [f"demo-00002/{row:04d}" for row in range(4)]


def test_several_processes_find_the_same(damaged):
    paths, folder = damaged
    flip(folder / "final" / "c" / "2" / "0")
    assert problems_of(paths, 2) == problems_of(paths, 1) != []


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink], ids=["flipped", "cut", "missing"])
@pytest.mark.parametrize("name", ["offsets/c/0", "offsets/zarr.json", "input_ids/zarr.json", "final/zarr.json", "zarr.json"])
def test_damage_of_a_whole_generation(damaged, name, damage):
    paths, folder = damaged
    damage(folder / name)
    problems = problems_of(paths)
    assert problems[0].where == "demo-00001"
    assert {problem.partition for problem in problems} == {"demo-00001"}


def test_damaged_ids_and_masks(damaged, pattern):
    paths, folder = damaged
    flip(folder / "input_ids" / "c" / "0")
    flip(paths.masks("demo-00002", "prompts-1") / "loss_mask" / "c" / "0")
    found = [problem.where for problem in problems_of(paths)]
    assert found == ["demo-00001/0000", *(f"demo-00002/{row:04d}" for row in range(4))]


def test_a_cut_manifest(damaged):
    paths, _ = damaged
    cut(paths.manifest(LAYERS.id, "demo-00001"))
    (problem,) = problems_of(paths)
    assert (problem.partition, problem.where) == ("demo-00001", "demo-00001")
    assert "a manifest cannot be read" in problem.detail
    with pytest.raises(StoreError, match="a manifest cannot be read"):
        open_store(paths.root).layer_set(LAYERS.id)


def test_a_manifest_of_a_newer_version(damaged):
    paths, _ = damaged
    path = paths.manifest(LAYERS.id, "demo-00001")
    path.write_text(path.read_text().replace('"version": 1', '"version": 7', 1))
    (problem,) = problems_of(paths)
    assert "hs-assets-view version 7" in problem.detail


def edit(paths, partition, change):
    path = paths.manifest(LAYERS.id, partition)
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))


CLAIMS = {
    "ledger": (lambda body: body["ledger"].update(stored=5), "the ledger is not that"),
    "tokens": (lambda body: body.update(tokens=body["tokens"] + 1), "the counts of ['tokens'] are not those"),
    "source rows": (lambda body: body.update(source_rows=0), "the counts of ['source_rows'] are not those"),
    "layer set": (lambda body: body.update(layer_set="r2-8"), "the manifest says that it is of"),
    "listed twice": (lambda body: body["samples"].__setitem__(1, body["samples"][0]), "rows listed twice"),
    "other partition": (lambda body: body["samples"][1].update(sample_id="demo-00000/0001"), "of another partition"),
    "offset": (lambda body: body["samples"][0]["parts"][0].update(offset=1), "is not where generation"),
    "token hash": (lambda body: body["samples"][2].update(token_sha256="0" * 64), "not those of the manifest"),
    "supervised": (lambda body: body["samples"][2].update(supervised_tokens=9_999), "not those of the manifest"),
    "lineage": (lambda body: body["samples"][2]["parts"][0].update(run_id=""), "lineage record is not whole"),
    "source hash": (lambda body: body["samples"][2].update(source_sha256="x"), "lineage record is not whole"),
    "residual ids": (
        lambda body: body["samples"][2]["parts"][0].update(residual_ids=[2, 8], norms=[1.0, 1.0]),
        "the sample has residual ids [2, 8]",
    ),
    "generation": (lambda body: body["samples"][2]["parts"][0].update(generation="gone"), "a generation cannot be opened"),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_claims_that_do_not_hold(damaged, claim):
    paths, _ = damaged
    change, said = CLAIMS[claim]
    edit(paths, "demo-00001", change)
    problems = problems_of(paths)
    assert {problem.partition for problem in problems} == {"demo-00001"}
    assert any(said in problem.detail for problem in problems)


def test_a_generation_of_another_partition(damaged, pattern):
    """Moved by hand: the ids are others, and so is what it says of itself."""
    paths, folder = damaged
    shutil.rmtree(folder)
    shutil.copytree(generation_folder(paths, pattern[1]["demo-00000"]), folder)
    problems = problems_of(paths)
    assert "says that it is of demo-00000" in problems[0].detail
    assert [problem.where for problem in problems[1:]] == [f"demo-00001/{row:04d}" for row in range(4)]


def test_a_damaged_final_norm(damaged):
    paths, _ = damaged
    flip(paths.model("weights-1") / "final_norm_weight" / "c" / "0")
    (problem,) = problems_of(paths)
    assert problem.where == "models/weights-1"


def test_the_command(damaged, tmp_path):
    _, folder = damaged
    good = CliRunner().invoke(main, ["verify", "--home", str(tmp_path), "--processes", "1"])
    assert (good.exit_code, good.stdout) == (0, "12 samples hold, 0 problems\n")
    flip(folder / "final" / "c" / "0" / "0")
    bad = CliRunner().invoke(main, ["verify", "--home", str(tmp_path)])
    assert bad.exit_code == 1
    assert f"demo-00001/0000 ({LAYERS.id}): states cannot be read" in bad.stdout
    assert bad.stdout.endswith("11 samples hold, 1 problems\n")
    as_json = json.loads(CliRunner().invoke(main, ["verify", "--home", str(tmp_path), "--json"]).stdout)
    assert (as_json["samples"], as_json["problems"][0]["where"]) == (11, "demo-00001/0000")


def test_a_manifest_is_compared_with_its_place(damaged):
    paths, _ = damaged
    manifest = open_store(paths.root).manifests(LAYERS.id)[0]
    dataclasses.replace(manifest, layer_set="r2-8").write(paths)
    details = [problem.detail for problem in problems_of(paths)]
    assert len(details) == 4
    assert all("residual ids [2, 4, 8]" in detail for detail in details)


METADATA = {
    "a generation without its partition": ("zarr.json", lambda body: body["attributes"].pop("partition")),
    "an array without sizes of chunks": (
        "final/zarr.json",
        lambda body: body["codecs"][0]["configuration"].update(chunk_shape=[0, 16]),
    ),
    "a codec that is a number": ("final/zarr.json", lambda body: body.update(chunk_key_encoding=5)),
    "a shard larger than any file": (
        "final/zarr.json",
        lambda body: body["chunk_grid"]["configuration"].update(chunk_shape=[2**70, 16]),
    ),
    "offsets of nothing": ("offsets/zarr.json", lambda body: body.update(shape=[0])),
}


@pytest.mark.parametrize("what", METADATA)
def test_metadata_that_cannot_be(damaged, what):
    paths, folder = damaged
    name, change = METADATA[what]
    path = folder / name
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))
    assert {problem.partition for problem in problems_of(paths)} == {"demo-00001"}
