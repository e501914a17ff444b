"""The CPU engine: an environment in which the real SGLang serves small models without a GPU.

It lies under ``HS_ASSETS_ENGINE`` (default: ``~/.cache/hs_assets/cpu-engine``), takes some 3 GB, and is stamped with
the hash of its requirements: it is made once, and again when they change.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

from hs_assets.errors import EngineError

ENGINE_ENV = "HS_ASSETS_ENGINE"
_FOLDER = Path(__file__).resolve().parent / "cpu_engine"
_REQUIREMENTS, _NO_DEPS = _FOLDER / "requirements.txt", _FOLDER / "no-deps.txt"
SHIMS = _FOLDER / "shims"
"""Goes on PYTHONPATH of every process of the engine."""

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
FLAGS = (
    "--device", "cpu",
    "--attention-backend", "torch_native",
    "--disable-overlap-schedule",
    "--sleep-on-idle",
    "--mem-fraction-static", "0.3",
    "--max-total-tokens", "32768",
    "--max-running-requests", "32",
)  # fmt: skip


def engine_folder() -> Path:
    """Where the engine lies, or will."""
    chosen = os.environ.get(ENGINE_ENV)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(chosen).absolute() if chosen else cache / "hs_assets" / "cpu-engine"


def stamp() -> str:
    """Hash of what the engine is made of: the requirements and the version of Python."""
    parts = (_REQUIREMENTS.read_bytes(), _NO_DEPS.read_bytes(), f"{sys.version_info[0]}.{sys.version_info[1]}".encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def is_installed() -> bool:
    """Whether the engine is there, whole and of these requirements."""
    path = _stamp_file(engine_folder())
    return path.exists() and path.read_text() == stamp()


def engine_python() -> Path:
    """The engine's interpreter.

    Raises:
        EngineError: it is not installed, or its requirements changed.
    """
    folder = engine_folder()
    if not is_installed():
        raise EngineError(
            "the CPU engine is not installed",
            where=folder,
            remedy="run hs-assets engine install, or set server.python to an SGLang environment",
        )
    return folder / "bin" / "python"


def install(say: Callable[[str], None]) -> Path:
    """Make the engine's environment, unless it is there already; returns its interpreter.

    Arguments:
        say: is told each step.

    Raises:
        EngineError: a step fails; with the end of what it printed.
    """
    folder = engine_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(folder.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two installers at once: the second finds it done
        if is_installed():
            say(f"the CPU engine is installed: {folder}")
            return engine_python()
        if folder.exists():
            _remove(folder)
        say(f"making the CPU engine in {folder} (some 3 GB, a few minutes)")
        venv.create(folder, with_pip=True)
        torch = next(line for line in _REQUIREMENTS.read_text().splitlines() if line.startswith("torch=="))
        for step, arguments in (
            (torch, [torch]),
            ("what SGLang needs", ["-r", str(_REQUIREMENTS)]),
            ("sglang and torchvision", ["--no-deps", "-r", str(_NO_DEPS)]),
        ):
            say(f"installing {step}")
            _pip(folder, arguments)
        _stamp_file(folder).write_text(stamp())
    return engine_python()


def _pip(folder: Path, arguments: list[str]) -> None:
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        tail = "\n".join(result.stderr.strip().splitlines()[-15:])
        raise EngineError(
            "pip failed", where=" ".join(command), got=tail, remedy="check the network and the disk, then run it again"
        )


def _remove(folder: Path) -> None:
    if not (folder / "pyvenv.cfg").exists():
        raise EngineError(
            "this folder is not an environment that may be replaced", where=folder, remedy=f"empty it, or set {ENGINE_ENV}"
        )
    shutil.rmtree(folder)


def _stamp_file(folder: Path) -> Path:
    return folder / "hs-assets-stamp"
