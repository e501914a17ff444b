"""The CPU engine's environment: made once, stamped, and never taken for what it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from hs_assets.errors import EngineError
from hs_assets.serving import engine


def test_it_is_installed_once(engine_python: Path) -> None:
    said: list[str] = []
    before = (engine.engine_folder() / "hs-assets-stamp").stat().st_mtime_ns
    assert engine.install(said.append) == engine_python
    assert len(said) == 1
    assert said[0].startswith("the CPU engine is installed")
    assert (engine.engine_folder() / "hs-assets-stamp").stat().st_mtime_ns == before


def test_other_requirements_have_another_stamp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = engine.stamp()
    changed = tmp_path / "requirements.txt"
    changed.write_text(engine._REQUIREMENTS.read_text() + "six==1.17.0\n")
    monkeypatch.setattr(engine, "_REQUIREMENTS", changed)
    assert engine.stamp() != first


def test_an_absent_or_outdated_engine_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(engine.ENGINE_ENV, str(tmp_path / "engine"))
    with pytest.raises(EngineError, match=r"not installed(.|\n)*hs-assets engine install"):
        engine.engine_python()
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "hs-assets-stamp").write_text("another")
    with pytest.raises(EngineError, match="not installed"):
        engine.engine_python()


def test_a_folder_that_is_no_environment_is_never_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(engine.ENGINE_ENV, str(tmp_path / "photos"))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "holiday.jpg").touch()
    with pytest.raises(EngineError, match="not an environment that may be replaced"):
        engine.install(print)
    assert (tmp_path / "photos" / "holiday.jpg").exists()


def test_every_requirement_is_pinned() -> None:
    lines = [*engine._REQUIREMENTS.read_text().splitlines(), *engine._NO_DEPS.read_text().splitlines()]
    assert all("==" in line for line in lines if line and not line.startswith("#"))
