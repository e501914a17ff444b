"""The configuration: one TOML file, checked and typed, and the home that everything is kept under.

The file is ``--config``, else ``HS_ASSETS_CONFIG``, else ``<home>/hs_assets.toml``, else the packaged preset ``demo``. A
value ``preset:NAME`` names a packaged preset. Relative paths in the file are relative to its folder.
"""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hs_assets.errors import ConfigError
from hs_assets.wire.rid import MAX_PARTITION_CHARS, is_partition_key

HOME_ENV = "HS_ASSETS_HOME"
CONFIG_ENV = "HS_ASSETS_CONFIG"
DEFAULT_HOME = ".hs_assets"
DEMO_MODEL = "demo"
"""Model path that stands for the tiny checkpoint that `hs-assets demo` makes under the home."""

_DIGITS_OF_A_PARTITION = 12
Share = Annotated[float, Field(ge=0, le=1)]
_TurnFormat = Literal["messages", "conversations", "nemo", "prompt_completion", "turns", "prompt"]
_TextFormat = Literal["question_answer", "alpaca", "text", "input_ids"]
RowFormat = Literal["", _TurnFormat, _TextFormat]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSettings(_Section):
    """The target model."""

    path: Path
    """Folder of a Hugging Face checkpoint: config.json, tokenizer, safetensors."""
    revision: str = ""
    """Recorded in the lineage; a checkpoint on disk has none of its own."""
    trust_remote_code: bool = False
    """Let the tokenizer and SGLang run Python code that lies beside the weights."""


class SourceSettings(_Section):
    """A file of JSON lines, JSON, Parquet or Arrow, or a folder of such as Hugging Face's tools leave."""

    path: Path
    name: str = ""
    """Partition keys begin with it; the file's name by default."""
    format: RowFormat = ""
    """What the rows are (samples/formats.py); told by the columns of each row by default."""


class PromptSettings(_Section):
    """How sources become prompts."""

    sources: tuple[SourceSettings, ...]
    rows_per_partition: int = Field(default=64, gt=0)
    tokens_per_partition: int = Field(default=1_000_000, gt=0)
    """A partition is closed early at this estimate (a token for every four bytes of its rows)."""
    max_tokens: int = Field(default=8192, gt=1)
    """Rows longer than this, or than the model's context, are `too_long`; where nothing is supervised before it, they are
    dropped as `truncated_before_supervision`."""
    too_long: Literal["drop", "cut_at_turn", "cut"] = "drop"
    """Drop them, cut them after the last answer that fits whole, or cut them at `max_tokens`."""
    min_supervised_tokens: int = Field(default=1, gt=0)
    """Rows with fewer, after they are cut, are dropped as `too_few_supervised_tokens`."""
    supervise: Literal["all", "last", "everything"] = "all"
    """The assistant's turns, its last one only, or every token. Rows of token ids keep their own mask."""
    role_order: Literal["any", "strict"] = "any"
    """`strict` drops conversations in which somebody speaks twice in a row; by default the chat template decides."""
    max_row_bytes: int = Field(default=64 << 20, gt=0)
    """Larger rows are dropped as `row_too_large`, without being read whole."""
    max_dropped_share: Share = 0.5
    """A partition that drops more of its rows than this fails."""


class ResponseSettings(_Section):
    """Whether the target model itself answers the prompts, in place of the answers that the sources have."""

    enabled: bool = False
    temperature: float = Field(default=0, ge=0)
    """0 is greedy."""
    top_p: float = Field(default=1, gt=0, le=1)
    seed: int | None = None
    """Fixes what is drawn; needs `--enable-deterministic-inference` in server.args, without which SGLang ignores it."""
    max_tokens: int = Field(default=1024, gt=0)
    """Of one answer, its thinking included; `server.request_timeout_seconds` must allow for it."""
    keep_thinking: bool = True
    """Train on the model's thinking too; else it is taken off each answer."""
    cut: Literal["drop", "keep"] = "drop"
    """What becomes of a conversation with an answer that reached `max_tokens`; a template closes it as if it had ended."""


class ServerSettings(_Section):
    """The SGLang server."""

    python: str = ""
    """Interpreter of SGLang's environment; empty for the CPU engine that `hs-assets engine install` makes."""
    tensor_parallel: int = Field(default=1, ge=1)
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    chunk_tokens: int = Field(default=8192, gt=0)
    """Prompt tokens in one prefill batch (`--chunked-prefill-size`); longer prompts come in several chunks."""
    args: tuple[str, ...] = ()
    """More arguments of `sglang.launch_server`."""
    env: dict[str, str] = {}
    writers: int = Field(default=4, ge=1, le=64)
    """Processes that write dumps; a request goes to one of them."""
    backlog_bytes: int = Field(default=6 << 30, gt=0)
    """Dumps that are asked for and not yet written never hold more, in device memory too: leave it to them, beside SGLang's."""
    max_in_flight: int = Field(default=32, ge=1)
    """Requests that one run keeps in flight."""
    spool_root: Path = Path("/dev/shm")
    spool_bytes: int | None = Field(default=None, gt=0)
    """Most bytes that dumps of all runs may take; by default half of what is free when the server starts."""
    start_timeout_seconds: float = Field(default=1800, gt=0)
    request_timeout_seconds: float = Field(default=600, gt=0)
    commit_timeout_seconds: float = Field(default=120, gt=0)
    """How long a dump may take after the HTTP answer."""
    idle_stop_seconds: float = Field(default=900, gt=0)
    """The server is stopped when nobody has used it for so long."""


class StoreSettings(_Section):
    """The zarr store."""

    path: Path | None = None
    """`<home>/store.zarr` by default."""
    chunk_tokens: int = Field(default=128, gt=0)
    shard_tokens: int = Field(default=8192, gt=0)
    generation_bytes: int = Field(default=4 << 30, gt=0)
    """A generation is published, and its dumps freed, when it holds so much; also at a quarter of the spool."""


class RuleSettings(_Section):
    """Tolerances of the rules (samples/rules.py)."""

    logprob_tolerance: float = Field(default=0.25, gt=0)
    """Largest difference of a centred logprob; a true state stays below 0.13, another sample's is above 0.42 (bf16)."""
    prefix_cosine: Share = 0.99
    prefix_share: Share = 0.5
    """Share of the rows of a common prefix whose cosine must be above `prefix_cosine`."""
    max_rejected_share: Share = 0.1
    """Share of a partition's rows that may be `rejected(rule)` before it fails."""


class AutomationSettings(_Section):
    """What Dagster does by itself; `cron` and whether it runs are read when the definitions are loaded, the rest at each tick."""

    reextract_stale: bool = False
    """Extract partitions again that are stored in another layer set; the schedule can be switched on in the UI too."""
    cron: str = "*/5 * * * *"
    partitions_per_tick: int = Field(default=16, gt=0)
    max_attempts: int = Field(default=3, gt=0)
    """Failed runs of one partition after which the schedule leaves it to people."""
    reextract_other_specs: bool = False
    """Also extract partitions again whose state spec is another one (weights, SGLang's version, flags): it redoes everything."""


class Settings(_Section):
    """The whole configuration."""

    layers: tuple[int, ...] | str = "eagle3"
    """Auxiliary residual ids, or `eagle3` for [2, n//2, n-3]; the final state is always added."""
    model: ModelSettings
    prompts: PromptSettings
    responses: ResponseSettings = ResponseSettings()
    server: ServerSettings = ServerSettings()
    store: StoreSettings = StoreSettings()
    rules: RuleSettings = RuleSettings()
    automation: AutomationSettings = AutomationSettings()


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
        return self.settings.server.spool_root / self.home.spool_name


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
            text, base = path.read_text(), path.parent
        except OSError as error:
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
        return Settings.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("the configuration is not TOML", where=where, got=error) from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            "a value in the configuration cannot be used",
            where=f"{where}: {field}",
            expected=first["msg"],
            got=repr(first["input"])[:120],
            remedy="the README lists all settings",
        ) from error


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
    return settings.model_copy(
        update={
            "model": settings.model.model_copy(update={"path": model_path}),
            "prompts": settings.prompts.model_copy(update={"sources": sources}),
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
