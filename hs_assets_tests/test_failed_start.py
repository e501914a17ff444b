"""A server that cannot start: tried once by many runs, again by a person, and not taken for one whose start was cut off."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from hs_assets.cli import main
from hs_assets.config import Project
from hs_assets.errors import ServerStartError
from hs_assets.extraction.extract import extract
from hs_assets.serving.failed_start import REMEMBERED_SECONDS, FailedStart, raise_if_failed_just_now
from hs_assets.serving.launch import make_launch_plan, resolve
from hs_assets.serving.server import lease_server
from hs_assets.serving.state import STARTING, LaunchPlan, ServerFolder
from hs_assets_tests.broken_sglang import NO_ROOM, BrokenSglang
from hs_assets_tests.conftest import say, write_project
from hs_assets_tests.test_extract import make_prompts, write_rows


class Attempts:
    """A project whose SGLang does not come up, and what its users are told."""

    def __init__(self, project: Project, sglang: BrokenSglang) -> None:
        self.project, self.sglang = project, sglang
        self.folder = ServerFolder(project.home.server)

    @property
    def plan(self) -> LaunchPlan:
        return make_launch_plan(self.project, resolve(self.project))

    def ask(self, plan: LaunchPlan | None = None, *, again: bool = False) -> str:
        with (
            pytest.raises(ServerStartError) as caught,
            lease_server(self.folder, plan or self.plan, "test", say, again=again),
        ):
            pass
        return str(caught.value)

    def age(self, seconds: float) -> None:
        """Have the failure be so old."""
        kept = FailedStart.read(self.folder.failed_start)
        dataclasses.replace(kept, at=time.time() - seconds).write(self.folder.failed_start)

    def wait_for_start(self, count: int = 1) -> None:
        def starting() -> bool:
            state = self.folder.read_state()
            return len(self.sglang.pids) == count and state is not None and state.pid == self.sglang.pids[-1]

        deadline = time.monotonic() + 30
        while not starting():
            assert time.monotonic() < deadline, "nothing was started"
            time.sleep(0.02)


@pytest.fixture
def broken(home: Path, checkpoint: Callable[[str], Path], tmp_path: Path) -> Attempts:
    sglang = BrokenSglang.make(tmp_path)
    server = f'spool_bytes = 200_000_000\npython = "{sglang.python}"'
    source = write_rows(tmp_path / "rows.jsonl", 4)
    return Attempts(write_project(home, checkpoint("llama"), source, top="layers = [2, 4]", server=server), sglang)


def test_a_failure_is_told_to_the_next_run_without_another_try(broken: Attempts) -> None:
    first = broken.ask()
    why = "got: SGLang ended while it started\n  got: exit status 3\nthe GPU has no room\n"
    assert first.startswith("the server did not come up\n")
    assert why in f"{first}\n"
    kept = FailedStart.read(broken.folder.failed_start)
    assert broken.folder.failed_start.stat().st_mode & 0o777 == 0o600
    second = broken.ask()
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(kept.at))
    assert second.startswith(f"the server did not come up when it was tried at {when}, so nothing was tried again\n")
    assert why in second
    assert first.split("\n")[1] == second.split("\n")[1], "they name different logs"
    assert "remedy: mend what it says, then hs-assets server start, which always tries" in second
    make_prompts(broken.project)
    with pytest.raises(ServerStartError, match=r"nothing was tried again(.|\n)*the GPU has no room"):
        extract(broken.project, resolve(broken.project), "rows-00000", "run", say)
    assert len(broken.sglang.pids) == 1


def test_a_person_is_never_told_what_was_and_what_is_mended_is_forgotten(broken: Attempts) -> None:
    broken.ask()
    broken.sglang.behave("echo 'still no room'; exit 4")
    result = CliRunner().invoke(main, ["server", "start", "--home", str(broken.project.home.root)])
    assert (result.exit_code, "exit status 4\nstill no room" in result.output) == (1, True)
    assert len(broken.sglang.pids) == 2
    assert "still no room" in broken.ask()
    assert len(broken.sglang.pids) == 2


def test_another_plan_is_tried_and_the_first_one_stays_known(broken: Attempts) -> None:
    plan = broken.plan
    broken.ask(plan)
    longer = dataclasses.replace(plan, start_timeout_seconds=plan.start_timeout_seconds + 1)
    assert "the GPU has no room" in broken.ask(longer)
    assert len(broken.sglang.pids) == 2, "what the remedy of a timeout says was not tried"
    broken.ask(plan)
    assert len(broken.sglang.pids) == 3, "one failure is kept, the last"
    other = dataclasses.replace(plan, identity="another", argv=(str(broken.sglang.python), "--up"))
    broken.sglang.behave("exec sleep 60")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(broken.ask, other)
        broken.wait_for_start(4)
        os.kill(broken.sglang.pids[-1], signal.SIGTERM)
        assert "asked to end" in waiting.result()
    assert "nothing was tried again" in broken.ask(plan), "another plan's start made it forget"


def test_after_some_minutes_and_after_a_clock_set_back_a_run_tries_again(broken: Attempts) -> None:
    broken.ask()
    for tries, age in enumerate((REMEMBERED_SECONDS + 1, -3600), 1):
        broken.age(REMEMBERED_SECONDS - 30)
        broken.ask()
        assert len(broken.sglang.pids) == tries
        broken.age(age)
        assert broken.ask().startswith("the server did not come up\n")
        assert len(broken.sglang.pids) == tries + 1


def test_a_record_of_another_version_and_half_of_one_tell_nothing(broken: Attempts) -> None:
    broken.folder.make()
    plan = broken.plan
    for left in ("", "[]", '{"record": "failed-start", "version": 0}'):
        broken.folder.failed_start.write_text(left)
        raise_if_failed_just_now(broken.folder, plan)
    assert broken.ask(plan).startswith("the server did not come up\n")


def test_all_that_wait_for_the_start_get_its_error(broken: Attempts) -> None:
    broken.sglang.behave(f"sleep 1; {NO_ROOM}")
    plan = broken.plan
    with ThreadPoolExecutor(4) as pool:
        told = list(pool.map(lambda _: broken.ask(plan), range(4)))
    assert ["the GPU has no room" in one for one in told] == [True] * 4
    assert sum("nothing was tried again" in one for one in told) == 3
    assert len(broken.sglang.pids) == 1


@pytest.mark.parametrize(
    ("whom", "number"),
    [("watchdog", signal.SIGTERM), ("watchdog", signal.SIGKILL), ("SGLang", signal.SIGTERM)],
)
def test_a_start_that_a_signal_cut_off_is_no_failure(broken: Attempts, whom: str, number: signal.Signals) -> None:
    broken.sglang.behave("exec sleep 60")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(broken.ask)
        broken.wait_for_start()
        time.sleep(0.3)  # the watchdog waits for it by now
        state = broken.folder.read_state()
        assert state
        os.kill(state.watchdog_pid if whom == "watchdog" else state.pid, number)
        assert waiting.result().startswith("the server did not come up\n")
    assert not broken.folder.failed_start.exists()
    broken.sglang.behave(NO_ROOM)
    assert "exit status 3" in broken.ask()
    assert len(broken.sglang.pids) == 2


def ask_and_be_killed(plan: LaunchPlan, root: Path) -> None:
    """Runs in a process of its own."""
    with lease_server(ServerFolder(root), plan, "killed", say):
        pass


def test_a_start_whose_run_was_killed_is_waited_for_and_its_failure_is_known(broken: Attempts) -> None:
    broken.sglang.behave(f"sleep 2; {NO_ROOM}")
    plan = broken.plan
    process = multiprocessing.get_context("spawn").Process(target=ask_and_be_killed, args=(plan, broken.folder.root))
    process.start()
    broken.wait_for_start()
    process.kill()
    process.join()
    state = broken.folder.read_state()
    assert state
    assert state.phase == STARTING
    assert "nothing was tried again" in broken.ask(plan, again=True), "it is the very try that was asked for"
    assert "nothing was tried again" in broken.ask(plan)
    assert len(broken.sglang.pids) == 1


def test_a_watchdog_that_cannot_begin_is_remembered_too(broken: Attempts) -> None:
    plan = dataclasses.replace(broken.plan, argv=("/nowhere/python",))
    assert "watchdog ended at once" in broken.ask(plan)
    second = broken.ask(plan)
    assert "nothing was tried again" in second
    assert "No such file or directory: '/nowhere/python'" in second
    assert broken.folder.read_state() is None
