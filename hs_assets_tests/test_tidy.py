"""What crashes left is removed, and nothing that somebody holds, keeps or could still use."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import dagster as dg
import numpy as np
import pytest
from dagster._core.test_utils import create_run_for_test

from hs_assets.config import Project
from hs_assets.defs.processes import PROCESS_TAG, fail_dead_runs
from hs_assets.defs.project import ProjectResource
from hs_assets.defs.sensors import janitor
from hs_assets.extraction.extract import alone
from hs_assets.extraction.tidy import Tidied, tidy
from hs_assets.serving.state import LeaseRecord, ServerFolder, started
from hs_assets.store.layout import create
from hs_assets.store.writer import ArrayShape, GenerationWriter
from hs_assets.wire.records import ClaimRecord
from hs_assets.wire.spool import Spool
from hs_assets_tests.conftest import say, write_project

KEY = "rows-00000"
SHAPE = ArrayShape(8, "F32", 4, 8)


@pytest.fixture
def project(home: Path, tmp_path: Path) -> Project:
    return write_project(home, tmp_path / "no-model", tmp_path / "no-rows.jsonl")


def gone() -> tuple[int, float]:
    """Pid and start of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        created = started(process.pid)
        assert process.stdin
        process.stdin.close()
    return process.pid, created


def put_dump(project: Project, rid: str, owner: tuple[int, float], *, whole: bool = False) -> None:
    spool = Spool(project.spool_path)
    spool.make()
    files = spool.dump(rid)
    ClaimRecord(rid, 1000, *owner).write(files.claim)
    files.data.write_bytes(b"x" * 1000)
    if whole:
        files.commit.touch()
        files.answer.touch()


def write_staging(project: Project, seconds_ago: float) -> GenerationWriter:
    """An unpublished generation, last written to so long ago."""
    writer = GenerationWriter(create(project.store_path), "f" * 16, KEY, (2, 4), 4, SHAPE)
    writer.append(np.zeros(9, np.int32), {i: np.zeros((9, 8), np.float32) for i in (2, 4)})
    then = time.time() - seconds_ago
    folder = staging(project, writer)
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (then, then))
    return writer


def staging(project: Project, writer: GenerationWriter) -> Path:
    return project.store_path / "data" / ("f" * 16) / KEY / f".staging-{writer.name}"


def test_a_home_that_was_never_used_is_tidy(project: Project) -> None:
    assert tidy(project) == Tidied(0, 0, 0, 0, 0)


def test_half_a_dump_of_a_dead_process_goes_and_all_others_stay(project: Project) -> None:
    dead = gone()
    put_dump(project, "of-the-dead", dead)
    put_dump(project, "of-the-dead-but-whole", dead, whole=True)
    put_dump(project, "mine", (os.getpid(), started(os.getpid())))
    done = tidy(project)
    assert (done.dumps, done.dumps_left, done.dump_bytes_left) == (1, 2, 2000)
    assert set(Spool(project.spool_path).rids()) == {"of-the-dead-but-whole", "mine"}


def test_a_lease_of_a_dead_process_goes_and_a_held_one_stays(project: Project) -> None:
    folder = ServerFolder(project.home.server)
    folder.make()
    (folder.leases / "left.json").write_text(LeaseRecord(gone()[0], "extraction", time.time()).to_json())
    with folder.lease("mine"):
        assert tidy(project).leases == 1
        assert [lease.purpose for lease in folder.live_leases()] == ["mine"]


def let_go(writer: GenerationWriter) -> None:
    """What becomes of the lock of a writer whose process ends."""
    assert writer._lock is not None
    os.close(writer._lock)
    writer._lock = None


def test_an_old_unpublished_generation_goes_unless_a_run_or_a_writer_is_at_it(project: Project) -> None:
    old, young, held = write_staging(project, 7200), write_staging(project, 60), write_staging(project, 7200)
    let_go(old)
    with alone(project, KEY, say):
        assert tidy(project).generations == 0
    assert tidy(project).generations == 1
    assert [staging(project, one).exists() for one in (old, young, held)] == [False, True, True]
    names = {young.publish(), held.publish()}
    assert tidy(project, staging_seconds=0).generations == 0
    assert {path.name for path in staging(project, young).parent.iterdir()} == names


def test_a_run_whose_process_was_killed_is_reported_as_failed(tmp_path: Path) -> None:
    (tmp_path / "dagster").mkdir()
    here, (pid, created) = socket.gethostname(), gone()
    processes = {
        "killed": f"{here}/{pid}/{created}",
        "alive": f"{here}/{os.getpid()}/{started(os.getpid())}",
        "its pid used again": f"{here}/{os.getpid()}/1.0",
        "elsewhere": f"elsewhere.{here}/{pid}/{created}",
    }
    with dg.DagsterInstance.local_temp(str(tmp_path / "dagster")) as instance:
        runs = {
            name: create_run_for_test(instance, "extract", status=dg.DagsterRunStatus.STARTED, tags={PROCESS_TAG: process})
            for name, process in processes.items()
        }
        unknown = create_run_for_test(instance, "extract", status=dg.DagsterRunStatus.STARTED)
        assert set(fail_dead_runs(instance)) == {runs["killed"].run_id, runs["its pid used again"].run_id}
        failed = instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.FAILURE]))
        assert {run.run_id for run in failed} == {runs["killed"].run_id, runs["its pid used again"].run_id}
        still = instance.get_run_by_id(unknown.run_id)
        assert still
        assert still.status == dg.DagsterRunStatus.STARTED
        assert fail_dead_runs(instance) == []


def test_the_sensor_says_what_it_removed_and_asks_for_no_run(project: Project, tmp_path: Path) -> None:
    put_dump(project, "of-the-dead", gone())
    (tmp_path / "dagster").mkdir()
    resource = ProjectResource(home=str(project.home.root), config=project.origin)
    with (
        dg.DagsterInstance.local_temp(str(tmp_path / "dagster")) as instance,
        dg.build_sensor_context(instance=instance, resources={"project": resource}) as context,
    ):
        data = janitor.evaluate_tick(context)
    assert data.skip_message
    assert data.skip_message.startswith("removed 1 dumps half done, 0 generations")
    assert not data.run_requests
