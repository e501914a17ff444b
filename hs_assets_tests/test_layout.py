"""Where everything lies in a store, its version, and that files and folders appear whole, once they are on disk."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import zarr

from hs_assets.errors import StoreError, StoreVersionError
from hs_assets.store.layout import (
    STORE_VERSION,
    StorePaths,
    array_name,
    check,
    create,
    publish_folder,
    remove_tree,
    replace_file,
)


@pytest.fixture
def synced(monkeypatch):
    """The paths that were brought to disk, in order; each is brought there for real."""
    paths, sync = [], os.fsync

    def fsync(descriptor: int) -> None:
        paths.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return paths


def make_tree(folder: Path) -> None:
    (folder / "a" / "c").mkdir(parents=True)
    (folder / "zarr.json").write_text("{}")
    (folder / "a" / "zarr.json").write_text("{}")
    (folder / "a" / "c" / "0").write_bytes(b"shard")


def test_where_everything_lies():
    paths = StorePaths(Path("/s"))
    assert paths.generations("f", "p") == Path("/s/data/f/p")
    assert paths.generation("f", "p", "g") == Path("/s/data/f/p/g")
    assert paths.manifest("r2-4-8", "demo-00003") == Path("/s/views/r2-4-8/demo-00003.json")
    assert paths.masks("p", "v") == Path("/s/masks/p/v")
    assert paths.model("w") == Path("/s/models/w")


@pytest.mark.parametrize(
    ("residual_id", "final", "name"),
    [(0, 61, "residual_000"), (3, 61, "residual_003"), (59, 61, "residual_059"), (61, 61, "final"), (61, 126, "residual_061")],
)
def test_names_of_arrays(residual_id, final, name):
    assert array_name(residual_id, final) == name


def test_names_of_arrays_sort_like_their_ids():
    names = [array_name(i, 200) for i in range(200)]
    assert sorted(names) == names


def test_create_makes_a_zarr_group_with_the_version(tmp_path):
    root = tmp_path / "deep" / "store.zarr"
    assert create(root) == StorePaths(root)
    assert dict(zarr.open_group(root, mode="r").attrs) == {"hs_assets_store_version": STORE_VERSION}
    assert [path.name for path in root.iterdir()] == ["zarr.json"]


def test_create_again_changes_nothing(tmp_path):
    create(tmp_path / "s")
    before = (tmp_path / "s" / "zarr.json").stat()
    assert create(tmp_path / "s") == check(tmp_path / "s") == StorePaths(tmp_path / "s")
    after = (tmp_path / "s" / "zarr.json").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("content", [None, "", "{", "[]", "null", "{}", '{"attributes": null}', '{"attributes": {}}'])
def test_no_store(tmp_path, content):
    if content is not None:
        (tmp_path / "zarr.json").write_text(content)
    with pytest.raises(StoreError, match="there is no store here") as caught:
        check(tmp_path)
    message = str(caught.value)
    assert f"\n  where: {tmp_path}\n  expected: zarr.json with the attribute hs_assets_store_version\n  got: " in message


@pytest.mark.parametrize("open_it", [check, create])
def test_store_of_a_newer_version(tmp_path, open_it):
    create(tmp_path)
    body = json.loads((tmp_path / "zarr.json").read_text())
    body["attributes"]["hs_assets_store_version"] = STORE_VERSION + 1
    (tmp_path / "zarr.json").write_text(json.dumps(body))
    with pytest.raises(StoreVersionError, match="the store has another version") as caught:
        open_it(tmp_path)
    message = str(caught.value)
    assert f"\n  expected: {STORE_VERSION}\n  got: {STORE_VERSION + 1}\n  remedy: install a version of hs-assets" in message


def test_a_file_is_on_disk_before_it_has_its_name(tmp_path, synced):
    path = tmp_path / "views" / "r2-4-8" / "p.json"
    replace_file(path, "old")
    replace_file(path, "new: ä")
    assert path.read_text(encoding="utf-8") == "new: ä"
    assert [p.name for p in path.parent.iterdir()] == ["p.json"]
    assert len(synced) == 4
    assert synced[0].parent == path.parent
    assert synced[0] != path, "under its name it would have been seen before"
    assert synced[1] == path.parent


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "p.json"
    replace_file(path, "old")
    with pytest.raises(UnicodeEncodeError):
        replace_file(path, "half of it \ud800")
    assert path.read_text() == "old"


def test_a_folder_is_on_disk_before_it_has_its_name(tmp_path, synced):
    staging, destination = tmp_path / ".staging-g", tmp_path / "g"
    make_tree(staging)
    files = {path.relative_to(staging) for path in staging.rglob("*")}
    publish_folder(staging, destination)
    assert {path.relative_to(destination) for path in destination.rglob("*")} == files
    assert not staging.exists()
    assert set(synced[:-1]) == {staging, *(staging / path for path in files)}
    for path in synced[:-2]:
        assert synced.index(path) < synced.index(path.parent), "a folder before what it holds"
    assert synced[-1] == tmp_path


def test_a_folder_never_replaces_another(tmp_path):
    for name in (".staging-g", "g"):
        make_tree(tmp_path / name)
    (tmp_path / "g" / "a" / "c" / "0").write_bytes(b"the first one")
    with pytest.raises(OSError, match="Directory not empty"):
        publish_folder(tmp_path / ".staging-g", tmp_path / "g")
    assert (tmp_path / "g" / "a" / "c" / "0").read_bytes() == b"the first one"
    assert (tmp_path / ".staging-g" / "a" / "c" / "0").read_bytes() == b"shard"


def test_remove_tree(tmp_path):
    make_tree(tmp_path / "x" / "y")
    remove_tree(tmp_path / "x" / "y")
    assert list((tmp_path / "x").iterdir()) == []
    remove_tree(tmp_path / "x" / "y")
    assert (tmp_path / "x").is_dir()


def test_a_full_disk_leaves_what_was_there_and_nothing_else(tmp_path, monkeypatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    replace_file(tmp_path / "manifest.json", "before")
    monkeypatch.setattr(os, "fsync", full)
    for write in (lambda: replace_file(tmp_path / "manifest.json", "after"), lambda: create(tmp_path)):
        with pytest.raises(OSError, match="no space left"):
            write()
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    assert (tmp_path / "manifest.json").read_text() == "before"
