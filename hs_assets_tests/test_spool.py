"""The spool's paths, the modes of its folders, and how the files of a request are found and freed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hs_assets.errors import SpoolError
from hs_assets.wire.records import FailureRecord
from hs_assets.wire.spool import DumpFiles, Spool
from hs_assets_tests.dump_material import made_spool, make_rid, names_in

RID = str(make_rid(7))
SUFFIXES = ("safetensors", "commit.json", "failure.json", "claim.json", "answer.json")


def all_paths(files: DumpFiles) -> list[Path]:
    return [files.data, files.commit, files.failure, files.claim, files.answer]


def test_where_everything_lies():
    spool = Spool(Path("/s"))
    assert spool.config == Path("/s/capture.json")
    assert spool.ready_record(3) == Path("/s/ready/rank-3.json")
    assert spool.refused_record(3) == Path("/s/ready/refused-3.json")
    assert all_paths(spool.dump("RID")) == [Path(f"/s/dumps/RID.{suffix}") for suffix in SUFFIXES]
    assert all_paths(spool.canary_dump(2, "RID")) == [Path(f"/s/canary/rank-2/RID.{suffix}") for suffix in SUFFIXES]


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_folders_are_for_the_owner_alone(tmp_path, umask):
    before = os.umask(umask)
    try:
        spool = made_spool(tmp_path / "spool")
    finally:
        os.umask(before)
    folders = [spool.root, spool.ready, spool.dumps, spool.canary]
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [0o700] * 4


def plant_link(root: Path) -> None:
    root.with_name("elsewhere").mkdir(mode=0o700)
    root.symlink_to(root.with_name("elsewhere"))


def plant_file(root: Path) -> None:
    root.touch(0o600)


def plant_open_folder(root: Path) -> None:
    root.mkdir()
    root.chmod(0o755)


@pytest.mark.parametrize("plant", [plant_link, plant_file, plant_open_folder])
def test_a_folder_that_somebody_else_put_there_is_refused(tmp_path, plant):
    plant(tmp_path / "spool")
    with pytest.raises((SpoolError, FileExistsError)):
        Spool(tmp_path / "spool").make()
    elsewhere = tmp_path / "elsewhere"
    assert not elsewhere.exists() or list(elsewhere.iterdir()) == []


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    spool = made_spool(tmp_path / "spool")
    monkeypatch.setattr(os, "geteuid", lambda: 4711)  # giving a folder away would take root
    with pytest.raises(SpoolError, match="of user 4711"):
        spool.make()


def test_making_it_again_changes_nothing(tmp_path):
    spool = made_spool(tmp_path / "spool")
    spool.dump(RID).data.write_bytes(b"kept")
    spool.make()
    assert spool.dump(RID).data.read_bytes() == b"kept"


def test_rids_are_told_once_each_whatever_files_they_have(tmp_path):
    spool = made_spool(tmp_path / "spool")
    rids = [str(make_rid(7, row)) for row in range(len(SUFFIXES))]
    for number, rid in enumerate(rids):
        for path in all_paths(spool.dump(rid))[number:]:
            path.touch()
    (spool.dumps / f".{RID}.commit.json.4711.tmp").touch()  # a record that is being written
    (spool.dumps / "notes.txt").touch()
    found = list(spool.rids())
    assert sorted(found) == rids
    assert len(found) == len(set(found))


def test_free_removes_a_request_and_no_other(tmp_path):
    spool = made_spool(tmp_path / "spool")
    one, other = spool.dump(RID), spool.dump(str(make_rid(7, 1)))
    for path in all_paths(one) + all_paths(other):
        path.touch()
    one.free()
    assert names_in(spool.dumps) == sorted(path.name for path in all_paths(other))
    assert list(spool.rids()) == [other.rid]


def test_free_is_content_with_what_is_there(tmp_path):
    spool = made_spool(tmp_path / "spool")
    files = spool.dump(RID)
    FailureRecord(RID, "capture_error", "").write(files.failure)
    files.free()
    files.free()
    assert names_in(spool.dumps) == []


@pytest.mark.parametrize("missing", [None, "commit", "answer", "claim"])
def test_whole(tmp_path, missing):
    files = made_spool(tmp_path / "spool").dump(RID)
    for path in (files.data, files.commit, files.answer, files.claim):
        path.touch()
    if missing is not None:
        getattr(files, missing).unlink()
    assert files.whole == (missing is None)


@pytest.mark.parametrize("stuck", ["commit", "failure", "answer", "data"])
def test_the_claim_goes_last(tmp_path, stuck):
    """As long as a file of a dump is there, its bytes are claimed."""
    files = made_spool(tmp_path / "spool").dump(RID)
    for path in all_paths(files):
        path.touch()
    getattr(files, stuck).unlink()
    getattr(files, stuck).mkdir()  # cannot be unlinked
    with pytest.raises(OSError, match="directory"):
        files.free()
    assert files.claim.exists()
