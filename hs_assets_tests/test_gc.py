"""gc removes what nobody names, and nothing that somebody holds or still needs."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
from click.testing import CliRunner

from hs_assets.cli import main
from hs_assets.store import open_store
from hs_assets.store.arrays import BFLOAT16
from hs_assets.store.disposal import Garbage, Kept
from hs_assets.store.gc import collect
from hs_assets.store.layout import create
from hs_assets.store.manifest import UnstoredRow
from hs_assets.store.verify import verify
from hs_assets.store.writer import STAGING_PREFIX, GenerationWriter
from hs_assets_tests.store_material import FINGERPRINT, LAYERS, OTHER, PARTITION, SHAPE, generation_folder, make_partition, widen


@pytest.fixture
def paths(tmp_path):
    return create(tmp_path / "store.zarr")


def gc(paths, **options):
    """What a run finds, as (kind, path in the store, reason)."""
    found = list(collect(paths, paths.root.parent / "locks", **{"min_age": 0.0, "delete": True} | options))
    return [
        (type(one).__name__, str((one.path if isinstance(one, Garbage) else one.where).relative_to(paths.root)), one.reason)
        for one in found
    ]


def files(paths):
    return sorted(path.relative_to(paths.root).as_posix() for path in paths.root.rglob("*") if path.is_file())


def assert_sound(paths):
    assert [problem for one in verify(open_store(paths.root), 1) for problem in one.problems] == []


def unnamed_generation(paths, partition=PARTITION):
    """What a crash between publication and manifest leaves."""
    writer = GenerationWriter(paths, FINGERPRINT, partition, (2, 4, 8), 8, SHAPE)
    writer.append(np.zeros(5, np.int32), states(5))
    return paths.generation(FINGERPRINT, partition, writer.publish())


def states(tokens):
    return {i: np.ones((tokens, 4), BFLOAT16) for i in LAYERS.residual_ids}


def test_a_store_in_use_has_no_garbage(paths):
    make_partition(paths, [5, 6], ids_by_generation=[(2,), (4, 8)])
    make_partition(paths, [5, 6], partition="demo-00001", layers=OTHER)
    before = files(paths)
    assert gc(paths) == []
    has_more = f"layer set {OTHER.id} has samples that {LAYERS.id} has not"
    assert gc(paths, current=LAYERS.id) == [("Kept", f"views/{OTHER.id}/demo-00001.json", has_more)]
    assert files(paths) == before


def test_what_no_manifest_names(paths):
    make_partition(paths, [5, 6])
    before = files(paths)
    generation = unnamed_generation(paths)
    lost = unnamed_generation(paths, "demo-00007")
    shutil.copytree(paths.masks(PARTITION, "prompts-1"), paths.masks(PARTITION, "prompts-0"))
    half = paths.views / LAYERS.id / f".{PARTITION}.json.0123.tmp"
    half.write_text("{")
    expected = sorted(
        ("Garbage", str(path.relative_to(paths.root)), "no manifest names it")
        for path in (generation, lost, paths.masks(PARTITION, "prompts-0"), half)
    )
    with_garbage = files(paths)
    assert sorted(gc(paths, delete=False)) == expected
    assert files(paths) == with_garbage, "a dry run removes nothing"
    assert sorted(gc(paths)) == expected
    assert files(paths) == before
    assert gc(paths) == []
    assert_sound(paths)


def test_the_size_is_that_of_the_files(paths):
    make_partition(paths, [5, 6])
    folder = unnamed_generation(paths)
    (found,) = collect(paths, paths.root.parent / "locks", min_age=0)
    sizes = subprocess.run(["find", folder, "-type", "f", "-printf", r"%s\n"], capture_output=True, text=True, check=True)
    assert found.bytes == sum(map(int, sizes.stdout.split()))


def test_what_is_young_stays(paths):
    folder = unnamed_generation(paths)
    assert gc(paths, min_age=3600) == [("Kept", str(folder.relative_to(paths.root)), "no manifest names it, yet")]
    old = time.time() - 7200
    os.utime(folder, (old, old))
    assert gc(paths, min_age=3600) == [("Garbage", str(folder.relative_to(paths.root)), "no manifest names it")]
    assert not folder.exists()


# What a running writer holds


def test_a_writer_at_work(paths):
    """Nothing of it goes, whatever its age; when it has published, its generation can be read."""
    writer = GenerationWriter(paths, FINGERPRINT, PARTITION, (2, 4, 8), 8, SHAPE)
    writer.append(np.zeros(9, np.int32), states(9))
    staging = f"data/{FINGERPRINT}/{PARTITION}/{STAGING_PREFIX}{writer.name}"
    assert gc(paths) == [("Kept", staging, "a writer holds it")]
    folder = paths.generation(FINGERPRINT, PARTITION, writer.publish())
    assert len(list(folder.iterdir())) == 6


def test_a_partition_with_a_run(paths):
    """Between the publication of a generation and the manifest that names it: only the partition's lock knows."""
    folder, other = unnamed_generation(paths), unnamed_generation(paths, "demo-00001")
    locks = paths.root.parent / "locks"
    locks.mkdir()
    with (locks / f"{PARTITION}.lock").open("w") as run:
        fcntl.flock(run, fcntl.LOCK_EX)
        assert gc(paths)[0] == ("Kept", ".", "a run is at work on it")
        assert (folder.exists(), other.exists()) == (True, False)
    gc(paths)
    assert not folder.exists()


WRITER = """
import sys, time
from pathlib import Path
import numpy as np
from hs_assets.store.layout import create
from hs_assets.store.writer import GenerationWriter
from hs_assets_tests.store_material import FINGERPRINT, PARTITION, SHAPE
from hs_assets_tests.test_gc import states

writer = GenerationWriter(create(Path(sys.argv[1])), FINGERPRINT, PARTITION, (2, 4, 8), 8, SHAPE)
writer.append(np.zeros(9, np.int32), states(9))
print("writing", flush=True)
time.sleep(600)
"""


def test_a_writer_in_another_process_until_it_is_killed(paths):
    with subprocess.Popen([sys.executable, "-c", WRITER, paths.root], stdout=subprocess.PIPE) as writer:
        assert writer.stdout.readline() == b"writing\n"
        (kept,) = gc(paths)
        assert (kept[0], kept[2]) == ("Kept", "a writer holds it")
        writer.kill()
    (gone,) = gc(paths)
    assert gone == ("Garbage", kept[1], "no manifest names it")
    assert list(paths.generations(FINGERPRINT, PARTITION).iterdir()) == []


def test_a_removal_that_was_cut_short_is_finished(paths, monkeypatch):
    folder = unnamed_generation(paths)
    monkeypatch.setattr("hs_assets.store.disposal.remove_tree", lambda _: None)
    gc(paths)
    assert not folder.exists()
    monkeypatch.undo()
    assert [reason for _, _, reason in gc(paths, min_age=3600)] == ["an earlier run was removing it"]
    assert list(folder.parent.iterdir()) == []


# Layer sets


def test_a_replaced_layer_set_goes_and_what_the_new_one_shares_stays(paths):
    made = make_partition(paths, [5, 6], ids_by_generation=[(2, 4), (8,)])
    samples = tuple(dataclasses.replace(sample, parts=sample.parts[1:]) for sample in made.manifest.samples)
    first = dataclasses.replace(made.manifest, samples=samples)
    new = widen(paths, dataclasses.replace(made, manifest=first))
    old_generation, shared = generation_folder(paths, made, part=0), generation_folder(paths, made, part=1)
    assert gc(paths) == [], "both layer sets are readable"
    assert gc(paths, current=new.layer_set) == [
        ("Garbage", f"views/{LAYERS.id}/{PARTITION}.json", f"layer set {LAYERS.id} is replaced by {OTHER.id}"),
        ("Garbage", str(old_generation.relative_to(paths.root)), "only replaced layer sets name it"),
    ]
    assert (old_generation.exists(), shared.exists()) == (False, True)
    assert open_store(paths.root).layer_set(OTHER.id)[1].sample_id == f"{PARTITION}/0001"
    assert_sound(paths)


def test_a_layer_set_with_more_samples_stays(paths):
    """The new one is half extracted: the old one still has what it lacks."""
    make_partition(paths, [5, 6])
    missing = UnstoredRow(f"{PARTITION}/0001", 1, "f" * 64, "failed", "server_died", "", 1)
    make_partition(paths, [5], layers=OTHER, unstored=(missing,))
    before = files(paths)
    assert gc(paths, current=OTHER.id) == [
        ("Kept", f"views/{LAYERS.id}/{PARTITION}.json", f"layer set {LAYERS.id} has samples that {OTHER.id} has not")
    ]
    assert files(paths) == before


def test_a_manifest_that_cannot_be_read_keeps_its_partition(paths):
    made = make_partition(paths, [5, 6])
    path = paths.manifest(LAYERS.id, PARTITION)
    path.write_bytes(path.read_bytes()[:-20])
    ((kind, _, reason),) = gc(paths)
    assert kind == Kept.__name__
    assert reason.startswith("a manifest cannot be read")
    assert generation_folder(paths, made).exists()


def test_the_command(paths, tmp_path):
    make_partition(paths, [5, 6])
    folder = unnamed_generation(paths)
    dry = CliRunner().invoke(main, ["gc", "--home", str(tmp_path), "--min-age", "0"])
    assert dry.exit_code == 0
    assert f"{folder.name}: no manifest names it" in dry.stdout
    assert "could go (--delete removes it)" in dry.stdout
    assert folder.exists()
    young = json.loads(CliRunner().invoke(main, ["gc", "--home", str(tmp_path), "--delete", "--json"]).stdout)
    assert (young["garbage"], len(young["kept"])) == ([], 1)
    done = json.loads(CliRunner().invoke(main, ["gc", "--home", str(tmp_path), "--delete", "--min-age", "0", "--json"]).stdout)
    assert (done["deleted"], [one["path"] for one in done["garbage"]]) == (True, [str(folder)])
    assert done["bytes"] == done["garbage"][0]["bytes"] > 0
    assert not folder.exists()
