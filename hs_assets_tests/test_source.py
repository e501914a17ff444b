"""The source hash names the code that runs inside SGLang, and that code brings nothing of the pipeline with it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hs_assets
from hs_assets.wire.records import CAPTURE_ENV
from hs_assets.wire.source import source_hash

PACKAGE = Path(hs_assets.__file__).parent
HEAVY = ("dagster", "zarr", "pydantic", "numpy", "torch", "httpx", "ml_dtypes", "psutil", "click", "sglang", "hs_assets.store")


def run_python(code: str, folder: Path | None = None) -> str:
    """What `code` prints in a fresh interpreter, started in `folder`, that is told of no capture."""
    env = {name: value for name, value in os.environ.items() if name not in {CAPTURE_ENV, "SGLANG_USE_CPU_ENGINE"}}
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, check=True, capture_output=True, text=True).stdout


def hash_of(root: Path) -> str:
    """The source hash that a copy of the package under `root` has of itself."""
    code = "import hs_assets; from hs_assets.wire.source import source_hash; print(hs_assets.__file__, source_hash())"
    file, digest = run_python(code, root).split()
    assert Path(file).is_relative_to(root)
    return digest


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    root = tmp_path_factory.mktemp("copy")
    for name in ("__init__.py", "errors.py", "wire", "capture", "store"):
        source = PACKAGE / name
        if source.is_dir():
            shutil.copytree(source, root / "hs_assets" / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (root / "hs_assets").mkdir(exist_ok=True)
            shutil.copy(source, root / "hs_assets" / name)
    return root


@pytest.mark.parametrize("module", ["plugin", "cpu_engine"])
def test_plugin_is_inert_and_light(module):
    code = f"import json, sys; import hs_assets.capture.{module} as m; m.register(); print(json.dumps(list(sys.modules)))"
    loaded = json.loads(run_python(code))
    assert f"hs_assets.capture.{module}" in loaded
    assert not [name for name in loaded if name.startswith(tuple(f"{h}." for h in HEAVY)) or name in HEAVY]


def test_hash_is_that_of_names_and_bytes():
    parts = [PACKAGE / "errors.py", *sorted((PACKAGE / "wire").glob("*.py")), *sorted((PACKAGE / "capture").glob("*.py"))]
    text = b"".join(p.relative_to(PACKAGE).as_posix().encode() + b"\0" + p.read_bytes() + b"\0" for p in parts)
    assert {"wire/source.py", "capture/assembly.py"} <= {p.relative_to(PACKAGE).as_posix() for p in parts}
    assert source_hash() == hashlib.sha256(text).hexdigest()


def test_hash_does_not_depend_on_the_place(copy):
    assert hash_of(copy) == source_hash()


@pytest.mark.parametrize("name", ["errors.py", "wire/dump.py", "capture/session.py"])
def test_hash_tells_one_changed_byte(copy, name):
    file = copy / "hs_assets" / name
    before = file.read_text()
    file.write_text(before + "\n")
    try:
        assert hash_of(copy) != source_hash()
    finally:
        file.write_text(before)


def test_hash_tells_a_new_file(copy):
    file = copy / "hs_assets" / "capture" / "extra.py"
    file.write_text("")
    try:
        assert hash_of(copy) != source_hash()
    finally:
        file.unlink()


def test_hash_leaves_out_what_does_not_run_inside_sglang(copy):
    file = copy / "hs_assets" / "store" / "dtype.py"
    file.write_text(file.read_text() + "\n")
    (copy / "hs_assets" / "wire" / "README.md").write_text("prose\n")
    assert hash_of(copy) == source_hash()
