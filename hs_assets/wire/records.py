"""The records that server and pipeline leave for each other as small JSON files, and how one is written and read.

Every file is an object with ``record`` (its type), ``version`` (`WIRE_VERSION`) and the fields of the dataclass. It is
written under another name and renamed, so a reader sees all of it or nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import secrets
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from hs_assets.errors import WireError

WIRE_VERSION = 2
CAPTURE_VERSION = 1
"""Changes when the numbers that the capture plugin writes change; part of the state spec."""

CAPTURE_ENV = "HS_ASSETS_CAPTURE"
"""Environment variable that names the `CaptureConfig` file; without it the plugin is inert."""

_SAME_VERSION = "install the same version of hs-assets in the pipeline's and in SGLang's environment"

R = TypeVar("R", bound="Record")


@dataclass(frozen=True, slots=True)
class Record:
    """Base of all records: what they share is how they are written."""

    kind: ClassVar[str]

    def write(self, path: Path) -> None:
        """Write the record as JSON, mode 0600, all at once."""
        write_atomic(path, self.to_json())

    def to_json(self) -> str:
        """The record as JSON."""
        return json.dumps({"record": self.kind, "version": WIRE_VERSION, **dataclasses.asdict(self)})

    @classmethod
    def read(cls, path: Path) -> Self:
        """The record in `path`.

        Raises:
            WireError: not such a record, another version, or a field missing or of another type.
        """
        try:
            return cls.parse(path.read_text(encoding="utf-8"), path)
        except OSError as error:
            raise WireError("a record cannot be read", where=path, expected=cls.kind, got=error) from error
        except UnicodeDecodeError as error:
            raise WireError("a record is not JSON", where=path, expected=cls.kind, got=error) from error

    @classmethod
    def parse(cls, text: str, where: object) -> Self:
        """The record in `text`; `where` is named in errors."""
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise WireError("a record is not JSON", where=where, expected=cls.kind, got=error) from error
        if not isinstance(fields, dict) or fields.pop("record", None) != cls.kind:
            raise WireError("not the record expected here", where=where, expected=cls.kind, got=text[:120])
        if (version := fields.pop("version", None)) != WIRE_VERSION:
            raise WireError(
                "a record of another version",
                where=where,
                expected=WIRE_VERSION,
                got=repr(version),
                remedy=_SAME_VERSION,
            )
        hints = field_types(cls)  # type: ignore[arg-type]
        values = {}
        for field in dataclasses.fields(cls):
            if field.name not in fields:
                raise WireError(
                    "a record lacks a field", where=where, expected=field.name, got=sorted(fields), remedy=_SAME_VERSION
                )
            values[field.name] = _typed(fields[field.name], hints[field.name], f"{where}: {field.name}")
        return cls(**values)


@dataclass(frozen=True, slots=True)
class CaptureConfig(Record):
    """What the pipeline asks the plugin to do; named by the environment variable `CAPTURE_ENV`."""

    kind: ClassVar[str] = "capture-config"
    spool: str
    """Absolute path of the spool."""
    server: str
    """Identity of this server process, copied into every commit record."""
    residual_ids: tuple[int, ...]
    """The auxiliary ids, ascending, then the final one."""
    state_fingerprint: str
    """Of the state spec, copied into every commit record."""
    writers: int
    spool_bytes: int
    """Most bytes that the dumps of samples may take together."""
    backlog_bytes: int
    """Most device memory that states waiting for their copy may hold."""


@dataclass(frozen=True, slots=True)
class ReadyRecord(Record):
    """Left by each rank once the model is loaded and the hooks are in place."""

    kind: ClassVar[str] = "ready"
    server: str
    capture_version: int
    source_hash: str
    """Of the plugin's own source files (`hs_assets.wire.source`)."""
    sglang_version: str
    model_class: str
    residual_ids: tuple[int, ...]
    """Read back from the model after they were set, and the final one."""
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: str
    """safetensors name of the states' dtype: BF16, F16 or F32."""
    rank: int
    world_size: int
    writes: bool
    """Whether this rank is the one that writes dumps."""
    hooks: tuple[str, ...]
    chunk_tokens: int | None
    """Most prompt tokens in one chunk of a prefill; None where prompts are not chunked."""
    device_bytes_per_token: int
    """Device memory that the capture of a token takes until it is copied: its states as SGLang gives them, and ours."""
    context_length: int
    pid: int
    argv: tuple[str, ...]
    """The server's command line, as its process was given it."""


@dataclass(frozen=True, slots=True)
class RefusedRecord(Record):
    """Left by a rank where the plugin will not run: one sentence a reason."""

    kind: ClassVar[str] = "refused"
    server: str
    rank: int
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CountersRecord(Record):
    """What a rank's capture did since it started; written every second. Bytes are of dumps, seconds of CPU time."""

    kind: ClassVar[str] = "counters"
    server: str
    rank: int
    at: float
    """Seconds since the epoch."""
    dumps: int
    failures: dict[str, int]
    """Reason → number of samples that the server failed."""
    tokens: int
    bytes: int
    tokens_per_second: float
    """Committed in the last seconds."""
    bytes_per_second: float
    pending_bytes: int
    """Captured and not yet written; a batch in the middle of its copy counts twice."""
    pending_high_water_bytes: int
    """Most that waited for the writers at once."""
    device_high_water_bytes: int
    """Most device memory that states waiting for their copy ever held."""
    spool_high_water_bytes: int
    """At most this much lay in the spool at once."""
    writer_seconds: float
    scheduler_seconds: float
    """Spent in hooks, on the thread that runs the model."""
    workers: int
    """The thread that copies from the device, and the writer processes."""
    workers_alive: int


@dataclass(frozen=True, slots=True)
class CommitRecord(Record):
    """Renamed in last: from now on the dump beside it is whole. No commit record, no dump."""

    kind: ClassVar[str] = "commit"
    rid: str
    server: str
    state_fingerprint: str
    residual_ids: tuple[int, ...]
    tokens: int
    hidden_size: int
    dtype: str
    bytes: int
    """Size of the dump's file."""
    row_checksums_crc32: int
    """crc32 of the checksums of all rows (`hs_assets.wire.dump`)."""
    token_sha256: str
    """The token hash: sha256 of the ids as little-endian int32."""
    chunks: int
    """In how many prefill batches the prompt came."""
    committed_at: float
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class FailureRecord(Record):
    """The server could not capture this request; its dump will never come."""

    kind: ClassVar[str] = "failure"
    rid: str
    reason: str
    """A name for the ledger: `capture_error`, `rows_out_of_order`, `spool_full`, …"""
    detail: str


@dataclass(frozen=True, slots=True)
class ClaimRecord(Record):
    """The client's claim on room in the spool, made before the request is sent, and its owner."""

    kind: ClassVar[str] = "claim"
    rid: str
    bytes: int
    pid: int
    created: float
    """When the owner's process started, in clock ticks since boot: a pid alone may be used again."""


@dataclass(frozen=True, slots=True)
class AnswerRecord(Record):
    """What the HTTP answer said, kept beside the dump so that it can be validated by a later run."""

    kind: ClassVar[str] = "answer"
    rid: str
    prompt_tokens: int
    cached_tokens: int
    top_logprobs: tuple[tuple[float, int], ...]
    """(logprob, token id) of the most likely next tokens, most likely first."""


def write_atomic(path: Path, text: str) -> None:
    """Write `text` to `path`, mode 0600, so that a reader finds the old file or the new one, never a part."""
    with replacing(path) as temporary:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside a file: what is written there takes the file's place at the end, and is removed where anything fails."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@functools.cache
def field_types(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields, looked up once."""
    return typing.get_type_hints(kind)


def _typed(value: Any, hint: Any, where: str) -> Any:
    """`value` as the type `hint`, tuples made of JSON's lists; raises WireError where it is something else."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        hint = next(argument for argument in arguments if argument is not types.NoneType)
        return _typed(value, hint, where)
    if origin is tuple and isinstance(value, list):
        if arguments[-1] is Ellipsis:
            return tuple(_typed(item, arguments[0], where) for item in value)
        if len(arguments) == len(value):
            return tuple(_typed(item, argument, where) for item, argument in zip(value, arguments, strict=True))
    if origin is dict and isinstance(value, dict):
        return {str(key): _typed(item, arguments[1], where) for key, item in value.items()}
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and isinstance(value, hint) and (hint is bool) == isinstance(value, bool):
        return value
    raise WireError("a field of a record has another type", where=where, expected=hint, got=repr(value)[:80])
