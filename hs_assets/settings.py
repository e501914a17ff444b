"""What can be set: the sections of the configuration, with their defaults."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from hs_assets.errors import ConfigError


def _place(path: Path) -> Path:
    if "\0" in str(path):
        raise ValueError("a path without NUL")
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError("a path, or ~ of a user that there is") from error


Share = Annotated[float, Field(ge=0, le=1)]
Place = Annotated[Path, AfterValidator(_place)]
"""A path; ``~`` is the home folder of its user."""
_Word = Annotated[str, Field(pattern=r"^[^\x00]*$")]
_EnvName = Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$")]
_HOST = r"([A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*|\[::1\])"
_TurnFormat = Literal["messages", "conversations", "nemo", "prompt_completion", "turns", "prompt"]
_TextFormat = Literal["question_answer", "alpaca", "text", "input_ids"]
RowFormat = Literal["", _TurnFormat, _TextFormat]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSettings(_Section):
    """The target model."""

    path: Place
    """Folder of a Hugging Face checkpoint: config.json, tokenizer, safetensors."""
    revision: str = ""
    """Recorded in the lineage; a checkpoint on disk has none of its own."""
    trust_remote_code: bool = False
    """Let the tokenizer and SGLang run Python code that lies beside the weights."""


class SourceSettings(_Section):
    """A file of JSON lines, JSON, Parquet or Arrow, or a folder of such as Hugging Face's tools leave."""

    path: Place
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
    unrendered_reasoning: Literal["drop", "leave_out"] = "drop"
    """What becomes of a conversation with reasoning where the chat template knows of none: dropped as `not_rendered`, or made
    without it, as such a model answers."""
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

    url: str = Field(default="", pattern=rf"^(https?://{_HOST}(:\d{{1,5}})?/?)?$")
    """Of a server on this host that somebody else started (`hs-assets server command`); empty to have our own. The other
    settings say what it must be."""
    spool: Place | None = None
    """Where its dumps come; by default a folder of `spool_root` that is this home's."""
    python: _Word = ""
    """Interpreter of SGLang's environment; empty for the CPU engine that `hs-assets engine install` makes."""
    tensor_parallel: int = Field(default=1, ge=1)
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    chunk_tokens: int = Field(default=8192, gt=0)
    """Prompt tokens in one prefill batch (`--chunked-prefill-size`); longer prompts come in several chunks."""
    args: tuple[_Word, ...] = ()
    """More arguments of `sglang.launch_server`."""
    env: dict[_EnvName, _Word] = {}
    writers: int = Field(default=4, ge=1, le=64)
    """Processes that write dumps; a request goes to one of them."""
    backlog_bytes: int = Field(default=6 << 30, gt=0)
    """Dumps that are asked for and not yet written never hold more, in device memory too: leave it to them, beside SGLang's."""
    max_in_flight: int = Field(default=32, ge=1)
    """Requests that one run keeps in flight."""
    spool_root: Place = Path("/dev/shm")
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

    path: Place | None = None
    """`<home>/store.zarr` by default."""
    chunk_tokens: int = Field(default=128, gt=0)
    """More where states are compressed and narrow, so that a chunk of them has 512 KiB."""
    shard_tokens: int = Field(default=8192, gt=0)
    compression: Literal["none", "blosc"] = "none"
    """`blosc`: about 0.7 of the size, for CPU time; worth it where storage gives less than about 1 GB/s a core."""
    generation_bytes: int = Field(default=4 << 30, gt=0)
    """A generation is published, and its dumps freed, when it holds so much; also at a quarter of the spool."""

    @model_validator(mode="after")
    def _shards_hold_whole_chunks(self) -> Self:
        if self.shard_tokens % self.chunk_tokens:
            raise ValueError(f"shard_tokens a multiple of chunk_tokens, not {self.shard_tokens} of {self.chunk_tokens}")
        return self


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


_BOUNDS = {"greater_than": ("more than", "gt"), "greater_than_equal": ("at least", "ge")}
_BOUNDS |= {"less_than": ("less than", "lt"), "less_than_equal": ("at most", "le")}
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "string": "a text", "tuple": "a list"}
_KINDS |= {"path": "a path", "model": "a section", "dict": "a table of names and texts"}


def explain(error: ValidationError, where: str) -> ConfigError:
    """What is wrong with the first value of a configuration that cannot be used; `where` names the configuration."""
    first = error.errors(include_url=False)[0]
    names = [str(part) for part in first["loc"]]
    kind, context = first["type"], first.get("ctx", {})
    problem, got, remedy = (
        "a value in the configuration cannot be used",
        repr(first["input"])[:120],
        "the README lists all settings",
    )
    if kind == "extra_forbidden":
        known = _section(names[:-1])
        near = difflib.get_close_matches(names[-1], known, 1)
        problem, expected = "there is no such setting", f"one of {', '.join(known)}"
        remedy = f"{near[0]} may be meant" if near else remedy
    elif kind == "missing":
        problem, expected, got = "a setting is missing", f"a value for {names[-1]}", "none"
    elif names[0] == "layers":
        names, expected = ["layers"], 'a list of residual ids, such as [3, 31, 59], or "eagle3"'
    elif kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        expected = f"{words} {context[name]}"
    elif kind == "value_error":
        expected = str(context["error"])
    elif kind == "literal_error":
        expected = context["expected"]
    elif kind == "string_pattern_mismatch":
        expected = "http://HOST:PORT" if names[-1] == "url" else f"a text like {context['pattern']}"
    else:
        expected = _KINDS.get(kind.split("_")[0], first["msg"])
    return ConfigError(problem, where=f"{where}: {'.'.join(names)}", expected=expected, got=got, remedy=remedy)


def _section(names: list[str]) -> list[str]:
    """The settings of a section, which is named by the way to it."""
    section: type[BaseModel] = Settings
    for name in names:
        if name.isdigit():  # a place in a list
            continue
        inner = section.model_fields[name].annotation
        section = next(one for one in (inner, *get_args(inner)) if isinstance(one, type) and issubclass(one, BaseModel))
    return sorted(section.model_fields)
