"""What tests share: the CPU engine, tiny checkpoints, projects in temporary homes, and real servers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

import pytest

from hs_assets.config import Project, load_project
from hs_assets.serving import engine
from hs_assets.serving.launch import expose_plugin, make_launch_plan, resolve
from hs_assets.serving.server import lease_server, stop_server
from hs_assets.serving.state import ServerFolder, ServerState

DEMO_TEXTS = Path(str(resources.files("hs_assets") / "presets" / "demo_conversations.jsonl"))

# Of each server and reference: as many of them run at once as there are workers, and threads that wait for each other spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell has what it starts in the background ignore SIGINT, by which dagster dev ends its processes, and they inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_LONGEST_FIRST = (
    "test_browser",
    "test_server",
    "test_parity",
    "test_faults",
    "test_demo",
    "test_attach",
    "test_ctrl_c",
    "test_batching",
    "test_responses",
    "test_benchmarks",
    "test_backfills",
    "test_definitions",
    "test_training",
    "test_extract",
    "test_reextract",
    "test_daemon",
    "test_trainers",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take minutes first: a worker that begins one when the others are done makes all wait for it."""
    places = {name: place for place, name in enumerate(_LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def say(line: str) -> None:
    """Progress of long work goes where pytest -s shows it."""
    print(line, file=sys.stderr)


@pytest.fixture(scope="session")
def engine_python() -> Path:
    """The CPU engine's interpreter; made on first use (minutes)."""
    return engine.install(say)


@pytest.fixture(scope="session")
def engine_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment in which SGLang's interpreter sees the plugin and the shims, and nothing of ours."""
    plugin = expose_plugin(tmp_path_factory.mktemp("plugin"))
    return {**os.environ, **engine.ENVIRONMENT, "PYTHONPATH": f"{plugin}:{engine.SHIMS}"}


@pytest.fixture(scope="session")
def checkpoint(
    engine_python: Path, engine_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Gives the folder of a tiny random checkpoint of a family; each is made once."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def make(family: str) -> Path:
        path = folder / family
        if not path.exists():
            command = [engine_python, "-m", "hs_assets.serving.tiny_model", family, path, DEMO_TEXTS]
            subprocess.run(command, env=engine_env, check=True, capture_output=True)
        return path

    return make


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """An empty home; its server is stopped and its spool removed at the end."""
    with temporary_home(tmp_path / "home") as path:
        yield path


@contextmanager
def temporary_home(path: Path) -> Iterator[Path]:
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        if (path / "server").exists():
            stop_server(ServerFolder(path / "server"), say, force=True)
        shutil.rmtree(Path("/dev/shm") / load_project(path, "preset:demo").home.spool_name, ignore_errors=True)


def write_project(home: Path, model: Path, source: Path, /, **settings: str) -> Project:
    """A project in `home`; `settings` are lines of TOML by section, such as ``server="chunk_tokens = 64"``."""
    sections = {
        "": settings.get("top", ""),
        "[model]": f'path = "{model}"\n' + settings.get("model", ""),
        "[prompts]": settings.get("prompts", ""),
        "[responses]": settings.get("responses", ""),
        "[server]": settings.get("server", ""),
        "[store]": settings.get("store", ""),
        "[rules]": settings.get("rules", ""),
        "[[prompts.sources]]": f'path = "{source}"\n' + settings.get("source", ""),
    }
    (home / "hs_assets.toml").write_text("\n".join(f"{header}\n{body}" for header, body in sections.items()))
    return load_project(home)


@contextmanager
def running_server(project: Project) -> Iterator[ServerState]:
    """The real server of a project, up for as long as this is entered."""
    folder = ServerFolder(project.home.server)
    try:
        with lease_server(folder, make_launch_plan(project, resolve(project)), "test", say) as state:
            yield state
    finally:
        stop_server(folder, say, force=True)
