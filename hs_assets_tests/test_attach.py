"""A real server that somebody else started: proven, shared, told from others, and left alone when it is not ours."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import psutil
import pytest
from click.testing import CliRunner

from hs_assets.cli import main
from hs_assets.config import Project, load_project
from hs_assets.errors import ConfigError, HandshakeError, ServerError, ServerStartError, SpoolError
from hs_assets.extraction.extract import extract
from hs_assets.serving.handshake import answers
from hs_assets.serving.launch import make_launch_plan, resolve
from hs_assets.serving.liveness import capturing
from hs_assets.serving.server import kill_tree, lease_server, stop_server
from hs_assets.serving.state import UP, ServerFolder
from hs_assets.serving.watchdog import free_port
from hs_assets.store import open_store
from hs_assets.wire.records import RefusedRecord
from hs_assets.wire.spool import Spool
from hs_assets_tests.conftest import say, temporary_home, write_project
from hs_assets_tests.test_extract import make_prompts, write_rows

SERVER = "chunk_tokens = 64\nspool_bytes = 200_000_000\nmax_in_flight = 2\ncommit_timeout_seconds = 3"
Write = Callable[..., Project]


@contextmanager
def started_by_hand(project: Project, port: int) -> Iterator[psutil.Process]:
    """What a person does: the script that the command prints, in a shell of their own."""
    script = asked(project, "command", "--port", str(port))
    log = (project.home.root / f"by-hand-{port}-{time.monotonic_ns()}.log").open("wb")
    with log, subprocess.Popen(["sh", "-c", script], stdout=log, stderr=log, start_new_session=True) as shell:
        try:
            yield psutil.Process(shell.pid)
        finally:
            kill_tree(shell.pid)


def asked(project: Project, *words: str) -> str:
    result = CliRunner().invoke(main, ["server", *words, "--home", str(project.home.root)])
    assert result.exit_code == 0, result.output
    return result.stdout


def wait_for(condition: Callable[[], bool], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def attach(project: Project) -> str:
    with lease_server(ServerFolder(project.home.server), make_launch_plan(project, resolve(project)), "test", say) as state:
        return state.server


@pytest.fixture(scope="module")
def write(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Write]:
    """Writes the configuration of one home anew: `url` and other lines of [server]."""
    folder = tmp_path_factory.mktemp("attach")
    source = write_rows(folder / "rows.jsonl", 12)
    with temporary_home(folder / "home") as home:

        def build(url: str = "", more: str = "", layers: str = "[2, 4]") -> Project:
            server = f'{SERVER}\nurl = "{url}"\n{more}'
            return write_project(home, checkpoint("llama"), source, top=f"layers = {layers}", server=server)

        make_prompts(build())
        yield build


@pytest.fixture(scope="module")
def by_hand(write: Write) -> Iterator[tuple[str, psutil.Process]]:
    """A server that was started by hand and is up: its address and process."""
    port = free_port()
    with started_by_hand(write(), port) as process:
        wait_for(lambda: answers(f"http://127.0.0.1:{port}/health"))
        yield f"http://127.0.0.1:{port}", process


def test_a_server_started_by_hand_is_proven_used_by_all_and_left_running(
    write: Write, by_hand: tuple[str, psutil.Process]
) -> None:
    url, process = by_hand
    project = write(url)
    folder = ServerFolder(project.home.server)
    with lease_server(folder, make_launch_plan(project, resolve(project)), "first", say) as state:
        assert (state.url, state.attached, state.residual_ids) == (url, True, (2, 4, 8))
        assert "canary of 17, 96, 96 tokens passed on 1 rank(s)" in state.message
        shown = json.loads(asked(project, "status", "--json"))
        assert [lease["purpose"] for lease in shown["leases"]] == ["first"]
        assert (shown["phase"], shown["attached"], shown["identity"]) == (UP, True, state.identity)
        assert psutil.Process(shown["pid"]) in process.children(recursive=True)
        assert 0 < shown["uptime_seconds"] < 600
    before = folder.state.stat().st_mtime_ns
    assert attach(project) == state.server
    assert folder.state.stat().st_mtime_ns == before, "it was proven twice"

    report = extract(project, resolve(project), "rows-00000", "run", say)
    assert (report.problems, report.requests) == ([], 12)
    view = open_store(project.store_path).layer_set("r2-4-8")
    assert {part.server for _, entry in view.entries for part in entry.parts} == {state.server}
    assert list(Spool(project.spool_path).dumps.iterdir()) == []

    assert not stop_server(folder, say, force=True)
    assert answers(f"{url}/health")
    assert "started by somebody else" in asked(project, "status")
    assert not list(folder.logs.glob("*.log")), "a server of our own was started"


def test_another_configuration_is_not_that_server(write: Write, by_hand: tuple[str, psutil.Process]) -> None:
    url, _ = by_hand
    for changed, where, words in (
        ({"layers": "[2, 5]"}, "residual ids", r"expected: \(2, 5, 8\)\n  got: \(2, 4, 8\)"),
        ({"more": 'args = ["--enable-deterministic-inference"]'}, "flags", r"expected: \['--enable-det(.|\n)*got: none of"),
        ({"more": "tensor_parallel = 2"}, "flags", r"'--tp-size 2'(.|\n)*'--tp-size 1'"),
    ):
        with pytest.raises(HandshakeError, match=words) as caught:
            attach(write(url, **changed))
        assert f"where: {url}: {where}" in str(caught.value)
        assert "remedy: end it, and start it with what hs-assets server command prints" in str(caught.value)
    assert attach(write(url))  # it is itself the one that was asked for before


def test_while_it_captures_nobody_else_is_started_into_its_spool(write: Write, by_hand: tuple[str, psutil.Process]) -> None:
    url, _ = by_hand
    name = attach(write(url))
    with pytest.raises(ServerError, match=rf"somebody else's server captures into this spool(.|\n)*got: {name}"):
        attach(write())
    other = write(layers="[3]")
    result = CliRunner().invoke(main, ["server", "command", "--home", str(other.home.root)])
    assert (result.exit_code, "a server captures into this spool already" in result.output) == (1, True)
    script = asked(write(url), "command")
    assert script == asked(write(), "command"), "asked again it says the same"
    assert attach(write(url)) == name


def test_another_home_uses_it_by_its_spool_and_a_spool_that_is_not_there_is_said(
    write: Write, by_hand: tuple[str, psutil.Process], home: Path, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    url, _ = by_hand
    first = write(url)
    source = write_rows(tmp_path / "rows.jsonl", 3)
    lost = write_project(home, checkpoint("llama"), source, top="layers = [2, 4]", server=f'{SERVER}\nurl = "{url}"')
    with pytest.raises(SpoolError, match=r"cannot be reached(.|\n)*capture.json(.|\n)*-v /dev/shm(.|\n)*server.spool"):
        make_launch_plan(lost, resolve(lost))
    found = write_project(
        home,
        checkpoint("llama"),
        source,
        top="layers = [2, 4]",
        server=f'{SERVER}\nurl = "{url}"\nspool = "{first.spool_path}"',
    )
    make_prompts(found)
    report = extract(found, resolve(found), "rows-00000", "run", say)
    assert (report.problems, report.requests) == ([], 3)
    empty = Spool(tmp_path / "other")  # of another server, as it were: what is captured never comes there
    empty.make()
    for path in (Spool(first.spool_path).config, *Spool(first.spool_path).ready.glob("*.json")):
        place = empty.root / path.relative_to(first.spool_path)
        place.write_text(path.read_text())
    mixed = load_project(home)
    mixed.home.config.write_text(mixed.home.config.read_text().replace(str(first.spool_path), str(empty.root)))
    with pytest.raises(HandshakeError, match="does not come into this spool"):
        attach(load_project(home))


def test_an_address_without_a_patched_server(write: Write, by_hand: tuple[str, psutil.Process]) -> None:
    with pytest.raises(ServerError, match=r"no server answers(.|\n)*hs-assets server command"):
        attach(write(f"http://127.0.0.1:{free_port()}"))
    with pytest.raises(ConfigError, match=r"server\.url"):
        write("localhost:30000")


def test_a_server_without_the_plugin_is_not_patched(home: Path, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """SGLang answers, and nobody captures: here whoever says that he is well."""

    class Well(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Well) as http:
        Thread(target=http.serve_forever, daemon=True).start()
        source = write_rows(tmp_path / "rows.jsonl", 3)
        url = f"http://127.0.0.1:{http.server_address[1]}"
        project = write_project(home, checkpoint("llama"), source, top="layers = [2, 4]", server=f'{SERVER}\nurl = "{url}"')
        asked(project, "command")
        with pytest.raises(HandshakeError, match=r"not patched(.|\n)*got: none, or old ones"):
            attach(project)
        http.shutdown()


def test_a_server_that_is_killed_fails_the_partition_and_a_new_one_is_asked_for_the_rest(
    write: Write, by_hand: tuple[str, psutil.Process]
) -> None:
    """The last one that uses the first server: it ends here."""
    url, process = by_hand
    project = write(url, layers="[2, 4]")
    config = project.home.config
    config.write_text(config.read_text().replace("max_in_flight = 2", "max_in_flight = 1"))
    project = load_project(project.home.root)
    source = project.settings.prompts.sources[0].path
    source.write_text(write_rows(source, 24).read_text().replace("Question", "Riddle"))
    make_prompts(project)
    dumps = Spool(project.spool_path).dumps
    name = attach(project)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(extract, project, resolve(project), "rows-00000", "cut", say)
        wait_for(lambda: len(list(dumps.glob("*.commit.json"))) >= 3)
        for one in [*process.children(recursive=True)]:
            os.kill(one.pid, signal.SIGKILL)
        first = running.result()
    assert first.manifest
    stored = first.manifest.ledger.stored
    assert first.manifest.ledger.failed == {"server_died": 24 - stored}
    assert "nobody listens at" in first.problems[0]
    assert "hs-assets server command" in first.problems[0]
    assert CliRunner().invoke(main, ["server", "status", "--home", str(project.home.root)]).exit_code == 1
    with pytest.raises(ServerError, match="no server answers"):
        attach(project)

    port = int(url.rpartition(":")[2])
    with started_by_hand(project, port):
        wait_for(lambda: answers(f"{url}/health") and capturing(Spool(project.spool_path)) == name)
        second = extract(project, resolve(project), "rows-00000", "again", say)
        assert (second.problems, second.requests) == ([], 24 - stored)


def test_a_server_that_the_plugin_refused_is_named_with_its_reasons(
    home: Path, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """It ended; what its plugin left in the spool is all that says why, until the script starts the next one."""
    source, url = write_rows(tmp_path / "rows.jsonl", 3), f"http://127.0.0.1:{free_port()}"
    project = write_project(home, checkpoint("llama"), source, top="layers = [2, 4]", server=f'{SERVER}\nurl = "{url}"')
    script, spool = asked(project, "command"), Spool(project.spool_path)
    RefusedRecord("by-hand", 0, ("--enable-mixed-chunk: decode rows mix with prefill",)).write(spool.refused_record(0))
    with pytest.raises(ServerStartError, match=r"refuses(.|\n)*--enable-mixed-chunk"):
        attach(project)
    before_sglang = script[: script.index("env ")]
    subprocess.run(["sh", "-c", before_sglang], check=True)
    assert list(spool.ready.iterdir()) == []
    with pytest.raises(ServerError, match="no server answers"):
        attach(project)
