"""The server's command and environment, and the plugin as SGLang's environment sees it."""

from __future__ import annotations

import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from hs_assets.errors import ConfigError, ServerError, SpoolError
from hs_assets.serving.by_hand import hand_start
from hs_assets.serving.launch import expose_plugin, make_launch_plan, resolve, spool_budget
from hs_assets.serving.watchdog import free_port
from hs_assets.wire.records import CaptureConfig
from hs_assets.wire.spool import Spool
from hs_assets_tests.conftest import DEMO_TEXTS, write_project
from hs_assets_tests.fake_server import fake_server

TOP = "layers = [2]"


def test_the_command_says_what_the_configuration_says(home: Path, checkpoint: Callable[[str], Path]) -> None:
    server = 'chunk_tokens = 64\ndtype = "float32"\nargs = ["--log-level", "warning"]\nenv = { X = "1", PYTHONPATH = "/else" }'
    project = write_project(home, checkpoint("llama"), DEMO_TEXTS, top=TOP, server=server)
    plan = make_launch_plan(project, resolve(project))
    command = " ".join(plan.argv)
    for words in ("--host 127.0.0.1", "--chunked-prefill-size 64", "--dtype float32", "--disable-radix-cache", "--log-level"):
        assert words in command
    assert "--trust-remote-code" not in command
    assert plan.env["X"] == "1"
    plugin, shims, mine = plan.env["PYTHONPATH"].split(":")
    assert (Path(plugin).name, Path(shims).name, mine) == ("plugin", "shims", "/else")


def test_identities_differ_where_servers_are_not_interchangeable(home: Path, checkpoint: Callable[[str], Path]) -> None:
    def identity(**settings: str) -> str:
        project = write_project(home, checkpoint("llama"), DEMO_TEXTS, **{"top": TOP, **settings})
        return make_launch_plan(project, resolve(project)).identity

    assert identity() == identity(rules="prefix_share = 0.4") == identity(server="max_in_flight = 3")
    different = [
        identity(),
        identity(top="layers = [3]"),
        identity(server="chunk_tokens = 64"),
        identity(server="writers = 1"),
        identity(server='args = ["--log-level", "info"]'),
        identity(server='env = { X = "1" }'),
    ]
    assert len(set(different)) == len(different)


def test_args_may_not_set_what_settings_set(home: Path, checkpoint: Callable[[str], Path]) -> None:
    project = write_project(home, checkpoint("llama"), DEMO_TEXTS, top=TOP, server='args = ["--port=1", "--dtype", "float16"]')
    with pytest.raises(ConfigError, match=r"got: \['--dtype', '--port'\]"):
        resolve(project)


def test_how_to_start_it_by_hand_stays_the_same_until_the_configuration_changes(
    home: Path, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(**settings: str) -> tuple[str, CaptureConfig]:
        project = write_project(home, checkpoint("llama"), DEMO_TEXTS, **{"top": TOP, **settings})
        made = hand_start(project, 31000)
        assert made.argv[-2:] == ("--port", "31000")
        return made.as_shell(), CaptureConfig.read(Path(made.env["HS_ASSETS_CAPTURE"]))

    first = script()
    free = shutil.disk_usage("/dev/shm").free
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=free // 3))
    assert script() == script(server='url = "http://127.0.0.1:31000"') == first
    assert script(top="layers = [3]")[1].residual_ids == (3, 8)
    assert script(server="writers = 1")[1].server != first[1].server
    words = shlex.split(first[0], comments=True)
    assert words[words.index("rm") :][:3] == ["rm", "-f", f"{first[1].spool}/ready/*"]
    assert words[-2:] == ["--port", "31000"]
    assert f"HS_ASSETS_CAPTURE={first[1].spool}/capture.json" in words


def test_its_script_clears_nothing_while_a_server_answers_or_captures(home: Path, checkpoint: Callable[[str], Path]) -> None:
    project = write_project(home, checkpoint("llama"), DEMO_TEXTS, top=TOP)
    spool, made = Spool(project.spool_path), hand_start(project, free_port())
    script = made.as_shell()
    before_sglang = script[: script.index("env ")]
    ready = spool.ready / "rank-0.json"

    def again() -> subprocess.CompletedProcess[str]:
        ready.touch()
        words = ["sh", "-c", f"{before_sglang}echo SGLang is started"]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    def refused(why: str) -> bool:
        result = again()
        return (result.returncode, result.stdout, why in result.stderr, ready.exists()) == (1, "", True, True)

    assert (again().stdout, ready.exists()) == ("SGLang is started\n", False)
    with subprocess.Popen(["sh", "-c", f"{before_sglang}echo up; exec sleep 60"], stdout=subprocess.PIPE) as first:
        assert first.stdout
        assert first.stdout.readline() == b"up\n"
        assert refused("is starting or running")
        first.kill()
    assert (again().stdout, ready.exists()) == ("SGLang is started\n", False)
    with socket.create_server(("127.0.0.1", int(made.url.rpartition(":")[2]))):
        assert refused(f"somebody answers at {made.url}; end it first")
    counters = spool.counters(0)
    counters.touch()
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(refused, "another server captures into")
        while not told.done():
            counters.touch()
            time.sleep(0.5)
    assert told.result()
    assert again().stdout == "SGLang is started\n", "what a server left that is gone stands in the way"


def test_while_the_homes_own_server_runs_the_remedy_is_to_stop_it(home: Path, checkpoint: Callable[[str], Path]) -> None:
    project = write_project(home, checkpoint("llama"), DEMO_TEXTS, top=TOP, server="spool_bytes = 200_000_000")
    with (
        fake_server(project),
        pytest.raises(ServerError, match=r"this home's own server(.|\n)*remedy: hs-assets server stop, then"),
    ):
        hand_start(project, 31000)
    hand_start(project, 31000)


@pytest.mark.parametrize("size", [1000, 10**15], ids=["too small for anything", "more than there is"])
def test_a_spool_that_is_too_small_is_said_with_the_remedy(home: Path, checkpoint: Callable[[str], Path], size: int) -> None:
    project = write_project(home, checkpoint("llama"), DEMO_TEXTS, top=TOP, server=f"spool_bytes = {size}")
    with pytest.raises(SpoolError, match=r"bytes free(.|\n)*containers begin with 64 MB: give docker run --shm-size"):
        spool_budget(project)


def test_dumps_that_lie_there_are_part_of_the_budget(home: Path, checkpoint: Callable[[str], Path]) -> None:
    """A run that was killed left them; the next one must come up to store them."""
    project = write_project(home, checkpoint("llama"), DEMO_TEXTS, top=TOP)
    spool = Spool(project.spool_path)
    spool.make()
    spool.dump("left").data.write_bytes(bytes(200 << 20))
    budget = shutil.disk_usage("/dev/shm").free + (100 << 20)
    project = write_project(home, checkpoint("llama"), DEMO_TEXTS, top=TOP, server=f"spool_bytes = {budget}")
    assert spool_budget(project) == budget
    spool.dump("left").data.unlink()
    with pytest.raises(SpoolError, match="the spool is too small"):
        spool_budget(
            write_project(home, checkpoint("llama"), DEMO_TEXTS, top=TOP, server=f"spool_bytes = {budget + (200 << 20)}")
        )


def test_the_plugin_path_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    folder = expose_plugin(tmp_path / "plugin")
    assert expose_plugin(tmp_path / "plugin") == folder
    assert sorted(path.name.split("-")[0] for path in folder.iterdir()) == ["hs_assets", "hs_assets"]
    code = (
        "import importlib.metadata as m, sys; "
        "print(sorted(e.value for e in m.entry_points(group='sglang.srt.plugins'))); "
        "import hs_assets.capture.plugin; print(hs_assets.capture.plugin.__file__)"
    )
    # -S and another folder: an environment that has nothing of ours
    command, env = [sys.executable, "-S", "-c", code], {"PYTHONPATH": str(folder)}
    result = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "hs_assets.capture.plugin:register" in result.stdout
    assert str(folder) in result.stdout.splitlines()[-1]


def test_many_may_expose_the_plugin_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: expose_plugin(tmp_path / "plugin"), range(100)))
    assert sorted(path.name.split("-")[0] for path in (tmp_path / "plugin").iterdir()) == ["hs_assets", "hs_assets"]


def test_the_wheel_brings_the_plugin_to_any_environment(tmp_path: Path, engine_python: Path) -> None:
    """`pip install --no-deps` into SGLang's environment: its entry points are found, and are inert and import nothing else."""
    checkout = Path(__file__).resolve().parents[1]
    site = tmp_path / "site"
    install = [engine_python, "-m", "pip", "install", "-q", "--no-deps", "--target", site, checkout]
    subprocess.run(install, check=True, capture_output=True)
    code = (
        "import sys, importlib.metadata as m\n"
        "points = {e.name: e.load() for e in m.entry_points(group='sglang.srt.plugins')}\n"
        "points['hs_assets_capture']()\n"
        "print(sorted(points), sorted({'pydantic', 'zarr', 'dagster', 'torch'} & set(sys.modules)))"
    )
    command, env = [engine_python, "-c", code], {"PYTHONPATH": str(site)}
    result = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "['hs_assets_capture', 'hs_assets_cpu_engine'] []"


def test_a_home_that_pythonpath_would_cut_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"':'(.|\n)*choose another home"):
        expose_plugin(tmp_path / "at 12:30" / "plugin")


def test_a_root_of_spools_that_is_not_there_yet_has_the_room_of_its_disk(
    home: Path, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    server = f'spool_root = "{tmp_path / "a" / "b"}"\nspool_bytes = {64 << 20}'
    project = write_project(home, checkpoint("llama"), DEMO_TEXTS, top=TOP, server=server)
    assert spool_budget(project) == 64 << 20
    assert not (tmp_path / "a").exists()
