"""The life of the real server: started once for all, shared, proven, stopped, killed, refused."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from hs_assets.config import Project, load_project
from hs_assets.errors import ServerError, ServerStartError
from hs_assets.extraction.extract import Report, extract
from hs_assets.serving.client import ask
from hs_assets.serving.launch import make_launch_plan, resolve
from hs_assets.serving.server import describe, lease_server, stop_server
from hs_assets.serving.state import FAILED, STOPPED, UP, ServerFolder, lives
from hs_assets.store import open_store
from hs_assets.wire.records import ReadyRecord
from hs_assets.wire.spool import Spool
from hs_assets_tests.conftest import DEMO_TEXTS, say, temporary_home, write_project
from hs_assets_tests.test_extract import make_prompts, write_rows

SERVER = "chunk_tokens = 64\nspool_bytes = 200_000_000\nidle_stop_seconds = 4\nmax_in_flight = 1"


@pytest.fixture(scope="module")
def project(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A project whose server is started by the first test that needs it."""
    folder = tmp_path_factory.mktemp("server")
    source = write_rows(folder / "rows.jsonl", 60)
    with temporary_home(folder / "home") as home:
        project = write_project(home, checkpoint("llama"), source, top="layers = [2, 4]", server=SERVER)
        make_prompts(project)
        yield project


def start(project: Project) -> str:
    """Take a lease, start the server if need be, and give the lease back; returns the server's name."""
    with lease_server(ServerFolder(project.home.server), make_launch_plan(project, resolve(project)), "test", say) as state:
        return state.server


def listens_on(pid: int) -> set[str]:
    """The addresses on which a process and all below it accept connections."""
    parent = psutil.Process(pid)
    family = [parent, *parent.children(recursive=True)]
    return {c.laddr.ip for process in family for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hs_assets.cli", *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_the_longest_prompt_of_a_context_that_one_chunk_fills(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", 1)
    with temporary_home(tmp_path / "home") as home:
        project = write_project(home, checkpoint("llama"), source, server="spool_bytes = 200_000_000")
        target, folder = resolve(project), ServerFolder(project.home.server)
        longest = target.facts.max_prompt_tokens
        with lease_server(folder, make_launch_plan(project, target), "test", say) as state, httpx.Client(trust_env=False) as http:
            assert f"canary of 17, 96, {longest} tokens passed" in state.message
            with pytest.raises(httpx.HTTPStatusError, match=rf"{longest + 1} tokens.* exceeds the maximum allowed length"):
                ask(http, state.url, "too-long", [5] * (longest + 1))


def test_two_first_users_start_one_server_which_then_stops_when_idle(project: Project) -> None:
    folder = ServerFolder(project.home.server)
    with ThreadPoolExecutor(2) as pool:  # of processes
        first, second = pool.map(lambda _: command("server", "start", "--home", project.home.root), range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert len(list(folder.logs.glob("sglang-*.log"))) == 1

    state = folder.read_state()
    assert state
    assert first.stdout == second.stdout == f"{state.url}\n"
    assert "canary of 17, 96, 96 tokens passed on 1 rank(s)" in state.message
    ready = ReadyRecord.read(Spool(project.spool_path).ready_record(0))
    assert (ready.model_class, ready.residual_ids, ready.dtype, ready.chunk_tokens) == ("LlamaForCausalLM", (2, 4, 8), "BF16", 64)
    assert list(Spool(project.spool_path).canary.glob("*/*")) == []
    assert oct(project.spool_path.stat().st_mode & 0o777) == "0o700"
    assert listens_on(state.pid) == {"127.0.0.1"}

    listing = command("server", "status", "--json", "--home", project.home.root)
    shown = json.loads(listing.stdout)
    assert (listing.returncode, shown["phase"], shown["server"], shown["leases"]) == (0, UP, state.server, [])
    assert (shown["pid"], shown["identity"], shown["spool_used_bytes"]) == (state.pid, state.identity, 0)
    assert 0 < shown["uptime_seconds"] < 600

    deadline = time.monotonic() + 60
    while describe(folder.read_state()) != STOPPED and time.monotonic() < deadline:
        time.sleep(0.2)
    state = folder.read_state()
    assert state
    assert (state.phase, state.message) == (STOPPED, "nobody used it for 4 s")
    assert not lives(state.pid, state.pid_created)
    assert command("server", "status", "--home", project.home.root).returncode == 1


def test_a_server_killed_in_the_middle_fails_the_partition_and_a_rerun_asks_for_the_rest(project: Project) -> None:
    folder, dumps = ServerFolder(project.home.server), Spool(project.spool_path).dumps
    target = resolve(project)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(extract, project, target, "rows-00000", "first", say)
        wait_for(lambda: len(list(dumps.glob("*.commit.json"))) >= 5)
        state = folder.read_state()
        assert state
        assert [lease.purpose for lease in folder.live_leases()] == ["extraction of rows-00000"]
        with pytest.raises(ServerError, match="the server is in use"):
            stop_server(folder, say)
        os.kill(state.pid, signal.SIGKILL)
        first: Report = running.result()
    assert first.manifest
    stored = first.manifest.ledger.stored
    assert 4 <= stored < 60  # the answer to the fifth may have been cut off
    assert first.manifest.ledger.failed == {"server_died": 60 - stored}
    assert "the server went away" in first.problems[0]
    assert "Prefill batch" in first.problems[0], "the log's tail is not shown"
    wait_for(lambda: describe(folder.read_state()) == FAILED)

    second = extract(project, target, "rows-00000", "second", say)
    assert second.problems == []
    assert second.requests == 60 - stored
    assert second.manifest
    assert second.manifest.ledger.as_json() == {"in": 60, "stored": 60, "dropped": {}, "failed": {}}
    runs = {part.run_id for sample in second.manifest.samples for part in sample.parts}
    assert runs == {"first", "second"}
    assert len(open_store(project.store_path).layer_set("r2-4-8")) == 60
    assert list(dumps.iterdir()) == []


def test_a_run_killed_in_the_middle_loses_nothing_that_was_captured(project: Project) -> None:
    """It needs another server, and waits until nobody uses the one that runs.

    The dumps of the dead run lie whole in the spool; the next run takes them, and asks for exactly the rest.
    """
    other = write_project(
        project.home.root,
        project.settings.model.path,
        project.settings.prompts.sources[0].path,
        top="layers = [3, 5]",
        server=SERVER,
    )
    dumps, folder = Spool(other.spool_path).dumps, ServerFolder(other.home.server)
    process = multiprocessing.get_context("spawn").Process(target=extract_for_ever, args=(str(other.home.root),))
    with lease_server(folder, make_launch_plan(project, resolve(project)), "somebody", say) as used:
        process.start()  # it needs another server, and waits for those who use this one
        wait_for(lambda: is_starting(folder))
        time.sleep(2)
        assert folder.read_state() == used
        assert used.is_up
    wait_for(lambda: describe(folder.read_state()) == UP and folder.read_state() != used)
    assert not lives(used.pid, used.pid_created)
    wait_for(lambda: len(list(dumps.glob("*.answer.json"))) >= 7)
    process.kill()
    process.join()
    whole = len(list(dumps.glob("*.answer.json")))
    report = extract(other, resolve(other), "rows-00000", "after", say)
    assert report.problems == []
    assert (report.adopted, report.requests) == (whole, 60 - whole)
    assert list(dumps.iterdir()) == []


def is_starting(folder: ServerFolder) -> bool:
    """Whether somebody holds the lock under which servers are started and stopped."""
    with folder.try_start_lock() as held:
        return not held


def extract_for_ever(home: str) -> None:
    """Runs in a process of its own, which is killed."""
    project = load_project(home)
    extract(project, resolve(project), "rows-00000", "killed", say)


def test_sglang_ends_with_its_watchdog_and_the_next_user_starts_it_again(project: Project) -> None:
    project = load_project(project.home.root)  # as the test before this one left it: its server is up
    folder = ServerFolder(project.home.server)
    first = start(project)
    state = folder.read_state()
    assert state
    os.kill(state.watchdog_pid, signal.SIGKILL)
    wait_for(lambda: not lives(state.pid, state.pid_created))
    assert describe(folder.read_state()) == FAILED
    assert start(project) != first
    assert stop_server(folder, say)
    assert not stop_server(folder, say)


def test_unsafe_flags_are_refused_by_name_and_reason(home: Path, checkpoint: Callable[[str], Path]) -> None:
    server = SERVER + '\nargs = ["--enable-mixed-chunk"]'
    unsafe = write_project(home, checkpoint("llama"), DEMO_TEXTS, top="layers = [2]", server=server)
    with pytest.raises(
        ServerStartError, match=r"capture plugin refuses(.|\n)*--enable-mixed-chunk: decode rows mix with prefill"
    ):
        start(unsafe)
    assert describe(ServerFolder(unsafe.home.server).read_state()) == FAILED


def test_a_start_that_fails_shows_the_end_of_the_log(home: Path, checkpoint: Callable[[str], Path]) -> None:
    broken = write_project(
        home, checkpoint("llama"), DEMO_TEXTS, top="layers = [2]", server=SERVER + '\nargs = ["--no-such-flag"]'
    )
    with pytest.raises(ServerStartError, match=r"exit status 2(.|\n)*unrecognized arguments: --no-such-flag"):
        start(broken)


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
