"""Ctrl-C on `dagster dev` in the middle of a run: no lease is left, and no process that nobody owns."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from hs_assets.defs.build import build_definitions
from hs_assets.defs.demo import open_instance
from hs_assets.extraction.extract import extract
from hs_assets.serving.launch import resolve
from hs_assets.serving.server import describe
from hs_assets.serving.state import STOPPED, ServerFolder, lives
from hs_assets.serving.watchdog import free_port
from hs_assets.wire.spool import Spool
from hs_assets_tests.conftest import say, write_project
from hs_assets_tests.test_extract import make_prompts, write_rows

ROWS = 100
SERVER = "chunk_tokens = 64\nspool_bytes = 200_000_000\nidle_stop_seconds = 8\nmax_in_flight = 1"
LAUNCH = """mutation($p: ExecutionParams!) { launchRun(executionParams: $p) { __typename } }"""
RUN = {
    "selector": {
        "repositoryName": "__repository__",
        "repositoryLocationName": "hs_assets.definitions",
        "jobName": "reextract",
    },
    "executionMetadata": {"tags": [{"key": "dagster/partition", "value": "rows-00000"}]},
}


def wait_for(condition: Callable[[], object], seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.2)


def ask(port: int, query: str, **variables: object) -> dict[str, Any]:
    """What the webserver answers; nothing as long as it does not listen."""
    try:
        body = {"query": query, "variables": variables}
        return httpx.post(f"http://127.0.0.1:{port}/graphql", json=body, timeout=30, trust_env=False).json().get("data") or {}
    except httpx.HTTPError:
        return {}


def of_session(session: int) -> list[int]:
    """The processes that began in the terminal's session."""
    found = []
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == session and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def test_ctrl_c_on_dagster_dev_leaves_no_lease_and_a_server_that_stops_by_itself(
    home: Path, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    source = write_rows(tmp_path / "rows.jsonl", ROWS)
    prompts = "rows_per_partition = 2000"
    project = write_project(home, checkpoint("llama"), source, top="layers = [2, 4]", prompts=prompts, server=SERVER)
    make_prompts(project)
    with open_instance(project.home) as instance:
        record = build_definitions(project).resolve_job_def("record_layer_set")
        assert record.execute_in_process(instance=instance).success
    port, folder, dumps = free_port(), ServerFolder(project.home.server), Spool(project.spool_path).dumps
    environment = {**os.environ, "DAGSTER_HOME": str(project.home.dagster), "HS_ASSETS_HOME": str(home)}
    command = [Path(sys.executable).with_name("dagster"), "dev", "-m", "hs_assets.definitions", "--port", str(port)]
    with (tmp_path / "dev.log").open("wb") as log:
        terminal = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        wait_for(lambda: ask(port, "{ version }"))
        wait_for(lambda: ask(port, LAUNCH, p=RUN).get("launchRun", {}).get("__typename") == "LaunchRunSuccess", 60)
        wait_for(lambda: len(list(dumps.glob("*.commit.json"))) >= 5)
        assert [lease.purpose for lease in folder.live_leases()] == ["extraction of rows-00000"]
        os.killpg(terminal.pid, signal.SIGINT)  # a terminal sends it to all that runs in it
        wait_for(lambda: not folder.live_leases(), 60)
        with folder.lease("test"):  # the rest of dagster dev may take longer than the server waits for a user
            terminal.wait(60)
            wait_for(lambda: not of_session(terminal.pid), 60)
    finally:
        for pid in of_session(terminal.pid):
            os.kill(pid, signal.SIGKILL)
    assert folder.live_leases() == []
    state = folder.read_state()
    assert state
    assert state.watchdog_lives or not lives(state.pid, state.pid_created), "nobody owns SGLang"
    report = extract(project, resolve(project), "rows-00000", "again", say)
    assert report.problems == []
    assert report.requests + report.adopted < ROWS, "what was stored before was asked for again"
    assert report.manifest
    assert report.manifest.ledger.stored == ROWS
    assert list(dumps.iterdir()) == []
    assert report.server == state, "it was still up"
    wait_for(lambda: describe(folder.read_state()) == STOPPED, 60)
    assert not lives(state.pid, state.pid_created)
