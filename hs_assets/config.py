"""The configuration: one TOML file, and the home that everything is kept under; settings.py has what can be set.

The file is ``--config``, else ``HS_ASSETS_CONFIG``, else ``<home>/hs_assets.toml``, else the packaged preset ``demo``. A
value ``preset:NAME`` names a packaged preset. Relative paths in the file are relative to its folder; ``~`` is the user's.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from pydantic import ValidationError

from hs_assets.errors import ConfigError
from hs_assets.settings import Settings, SourceSettings, explain
from hs_assets.wire.rid import MAX_PARTITION_CHARS, is_partition_key

HOME_ENV = "HS_ASSETS_HOME"
CONFIG_ENV = "HS_ASSETS_CONFIG"
DEFAULT_HOME = ".hs_assets"
DEMO_MODEL = "demo"
"""Model path that stands for the tiny checkpoint that `hs-assets demo` makes under the home."""

_DIGITS_OF_A_PARTITION = 12
_CUTS_A_URL = re.compile(r"[#?\x00-\x1f\x7f]")
"""SGLang's ranks meet at ``file://<spool>/…``, and torch reads that as a URL without any escapes."""


@dataclass(frozen=True, slots=True)
class Home:
    """Where everything is kept. ``root`` is absolute."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "hs_assets.toml"

    @property
    def prompts(self) -> Path:
        return self.root / "prompts"

    @property
    def responses(self) -> Path:
        return self.root / "responses"

    @property
    def server(self) -> Path:
        return self.root / "server"

    @property
    def store(self) -> Path:
        return self.root / "store.zarr"

    @property
    def locks(self) -> Path:
        """``<partition>.lock`` is held by the run that works on a partition."""
        return self.root / "locks"

    @property
    def dagster(self) -> Path:
        return self.root / "dagster"

    @property
    def reports(self) -> Path:
        return self.root / "reports"

    @property
    def demo_model(self) -> Path:
        return self.root / "models" / "demo"

    @property
    def spool_name(self) -> str:
        """Name of this home's spool: users and homes do not meet in one ``/dev/shm``."""
        return f"hs_assets-{os.getuid()}-{hashlib.sha256(str(self.root).encode()).hexdigest()[:8]}"


@dataclass(frozen=True, slots=True)
class Project:
    """A home and its settings: what every command and asset works with. All paths are absolute."""

    home: Home
    settings: Settings
    origin: str
    """Where the settings came from: a path, or ``preset:NAME``."""

    @property
    def store_path(self) -> Path:
        return self.settings.store.path or self.home.store

    @property
    def spool_path(self) -> Path:
        server = self.settings.server
        return server.spool or server.spool_root / self.home.spool_name


def load_project(home: str | Path | None = None, config: str | Path | None = None) -> Project:
    """Read the configuration for a home; the arguments win over the environment (see the module's docstring).

    Raises:
        ConfigError: the file cannot be read, or a value in it cannot be used; by name.
    """
    root = Path(home or os.environ.get(HOME_ENV) or DEFAULT_HOME).absolute()
    folder = Home(root)
    chosen = str(config or os.environ.get(CONFIG_ENV) or (folder.config if folder.config.exists() else "preset:demo"))
    if chosen.startswith("preset:"):
        text, base = read_preset(chosen.removeprefix("preset:")), root
    else:
        path = Path(chosen).absolute()
        try:
            text, base = path.read_text(encoding="utf-8-sig"), path.parent
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                "the configuration cannot be read", where=path, got=error, remedy="pass --config FILE or --config preset:demo"
            ) from error
    settings = _absolute(parse_settings(text, chosen), base, folder)
    return Project(folder, settings, chosen)


def read_preset(name: str) -> str:
    """The text of a packaged preset."""
    folder = resources.files("hs_assets") / "presets"
    known = sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))
    if name not in known:
        raise ConfigError(
            "no such preset", where="--config", expected=" or ".join(f"preset:{k}" for k in known), got=f"preset:{name}"
        )
    return (folder / f"{name}.toml").read_text()


def parse_settings(text: str, where: str) -> Settings:
    """The settings in a TOML text; `where` is named in errors."""
    try:
        # As JSON, because only there pydantic is strict (true is no 1, "64" no 64) and takes texts for paths. A date is no text.
        values = json.dumps(tomllib.loads(text), default=lambda date: {"": str(date)})
        return Settings.model_validate_json(values, strict=True)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("the configuration is not TOML", where=where, got=error) from error
    except ValidationError as error:
        raise explain(error, where) from error


def _absolute(settings: Settings, base: Path, home: Home) -> Settings:
    """The same settings with absolute paths, named sources, and the demo's model found."""
    model_path = home.demo_model if str(settings.model.path) == DEMO_MODEL else base / settings.model.path
    sources = tuple(_named(source, base) for source in settings.prompts.sources)
    names = [source.name for source in sources]
    if not sources or len(set(names)) != len(names):
        raise ConfigError(
            "sources need names of their own",
            where="prompts.sources",
            expected="one or more sources, each with another name",
            got=names,
            remedy='give one of them a name = "…"',
        )
    store_path = settings.store.path and base / settings.store.path
    server = settings.server
    places = {
        "spool": server.spool and base / server.spool,
        "spool_root": base / server.spool_root,
        "python": str(base / Path(server.python).expanduser()) if "/" in server.python else server.python,  # else by PATH
    }
    for name in ("spool", "spool_root"):
        if (place := places[name]) and (found := _CUTS_A_URL.search(str(place))):
            raise ConfigError(
                "a spool cannot lie in this folder: the ranks of the server would not find each other there",
                where=f"server.{name}",
                expected="a path without #, ?, line breaks and other control characters",
                got=f"{str(place)!r}, with {found.group()!r}",
                remedy="choose another folder, on a disk in memory",
            )
    return settings.model_copy(
        update={
            "model": settings.model.model_copy(update={"path": model_path}),
            "prompts": settings.prompts.model_copy(update={"sources": sources}),
            "server": server.model_copy(update=places),
            "store": settings.store.model_copy(update={"path": store_path}),
        }
    )


def _named(source: SourceSettings, base: Path) -> SourceSettings:
    packaged = str(source.path).startswith("package:")
    name = source.name or re.sub(r"[^A-Za-z0-9._-]+", "-", source.path.name.removeprefix("package:").split(".")[0])
    if not is_partition_key(name) or len(name) > MAX_PARTITION_CHARS - _DIGITS_OF_A_PARTITION:
        raise ConfigError(
            "the name of a source cannot begin a partition key",
            where=f"prompts.sources: {source.path}",
            expected=f"1 to {MAX_PARTITION_CHARS - _DIGITS_OF_A_PARTITION} of A-Z a-z 0-9 . _ -",
            got=repr(name),
            remedy='give it a name = "…"',
        )
    if packaged:
        path = Path(str(resources.files("hs_assets") / "presets" / str(source.path).removeprefix("package:")))
    else:
        path = base / source.path
    return source.model_copy(update={"path": path, "name": name})
