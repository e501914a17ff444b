"""A manifest: one JSON file for a partition and a layer set, replaced atomically. What no manifest names is not there.

It lists every row of the partition once, stored or not, with where its states lie and where they came from.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from hs_assets.errors import StoreError, StoreVersionError
from hs_assets.store.layout import StorePaths, replace_file
from hs_assets.wire.records import field_types

MANIFEST_VERSION = 1
FORMAT = "hs-assets-view"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Part:
    """Some residual ids of a sample: rows ``offset ..`` of a generation, and the capture that made them.

    ``norms``: for each of ``residual_ids`` the mean length of its states, over some 64 tokens.
    """

    generation: str
    offset: int
    residual_ids: tuple[int, ...]
    norms: tuple[float, ...]
    dump_crc32: int
    server: str
    run_id: str
    captured_at: float


@dataclass(frozen=True, slots=True)
class StoredSample:
    """A row whose states are stored; ``mask`` is its place among the partition's loss masks."""

    sample_id: str
    source_row: int
    source_sha256: str
    tokens: int
    supervised_tokens: int
    token_sha256: str
    mask: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class UnstoredRow:
    """A row without states, and why: dropped on purpose, or failed (then ``attempts`` times in a row for that reason)."""

    sample_id: str
    source_row: int
    source_sha256: str
    outcome: Literal["dropped", "failed"]
    reason: str
    detail: str
    attempts: int


@dataclass(frozen=True, slots=True)
class PromptsVersion:
    """Which prompts the rows are; ``version`` is their data version and names their loss masks."""

    version: str
    source_name: str
    source_path: str
    template_sha256: str
    tokenizer_sha256: str


@dataclass(frozen=True, slots=True)
class Ledger:
    """What became of every row: ``rows == stored + dropped + failed``, always."""

    rows: int
    stored: int
    dropped: dict[str, int]
    failed: dict[str, int]

    @property
    def balances(self) -> bool:
        return self.rows == self.stored + sum(self.dropped.values()) + sum(self.failed.values())

    def as_json(self) -> dict[str, object]:
        return {"in": self.rows, "stored": self.stored, "dropped": self.dropped, "failed": self.failed}


@dataclass(frozen=True, slots=True)
class Compression:
    """What the states of a partition take: bytes of the arrays that its samples lie in, and of their files."""

    codec: str
    raw_bytes: int
    stored_bytes: int

    @property
    def ratio(self) -> float:
        """Raw size to stored size; 1.44 makes a GB 0.69 GB."""
        return self.raw_bytes / self.stored_bytes


@dataclass(frozen=True)
class Manifest:
    """What a layer set offers of a partition. ``rows`` counts the partition's rows independently of the two lists."""

    partition: str
    layer_set: str
    state_fingerprint: str
    state_spec: dict[str, Any]
    prompts: PromptsVersion
    rows: int
    samples: tuple[StoredSample, ...]
    unstored: tuple[UnstoredRow, ...]
    compression: Compression | None = None
    """Measured, where states are compressed."""

    @cached_property
    def ledger(self) -> Ledger:
        """The account of all rows."""
        reasons = {
            outcome: dict(Counter(row.reason for row in self.unstored if row.outcome == outcome))
            for outcome in ("dropped", "failed")
        }
        return Ledger(self.rows, len(self.samples), reasons["dropped"], reasons["failed"])

    @property
    def tokens(self) -> int:
        """Of all samples."""
        return sum(sample.tokens for sample in self.samples)

    @property
    def source_rows(self) -> int:
        """Of how many rows of the source these rows are: several may be of one."""
        return len({sample.source_row for sample in self.samples} | {row.source_row for row in self.unstored})

    def write(self, paths: StorePaths) -> bool:
        """Replace the manifest, unless it says the same already; returns whether it was written.

        Raises:
            StoreError: the ledger does not balance, or a row is listed twice; nothing is written then.
        """
        ids = [*(sample.sample_id for sample in self.samples), *(row.sample_id for row in self.unstored)]
        if not self.ledger.balances or len(set(ids)) != len(ids):
            raise StoreError(
                "a ledger does not balance",
                where=self.partition,
                expected=f"{self.rows} rows, each once",
                got=self.ledger.as_json(),
            )
        fields, counts = dataclasses.asdict(self), {"tokens": self.tokens, "source_rows": self.source_rows}
        # What summary.py reads comes first, up to state_spec.
        first = {name: fields[name] for name in ("partition", "layer_set", "state_fingerprint")}
        body = {"format": FORMAT, "version": MANIFEST_VERSION, **first, "ledger": self.ledger.as_json(), **counts, **fields}
        if self.compression is None:
            del body["compression"]
        else:
            body["compression"]["ratio"] = round(self.compression.ratio, 4)
        text, path = json.dumps(body, indent=1), paths.manifest(self.layer_set, self.partition)
        if path.exists() and path.read_text() == text:
            return False
        replace_file(path, text)
        return True


def read_manifest(path: Path) -> Manifest:
    """The manifest in a file.

    Raises:
        StoreError: it is cut, or not a manifest.
        StoreVersionError: it was written by a newer version.
    """
    try:
        body = json.loads(path.read_text())
        kind = body["format"], body["version"]
        manifest = _build(Manifest, body) if kind == (FORMAT, MANIFEST_VERSION) else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = "remove the file, then materialise the partition again"
        raise StoreError("a manifest cannot be read", where=path, got=repr(error), remedy=remedy) from error
    if manifest is None:
        raise StoreVersionError(
            f"not a manifest of this version, but {kind[0]} version {kind[1]}: this hs-assets reads {MANIFEST_VERSION}",
            where=path,
            expected=(FORMAT, MANIFEST_VERSION),
            got=kind,
            remedy="install a version of hs-assets that reads it",
        )
    if not manifest.ledger.balances:
        raise StoreError("a ledger does not balance", where=path, expected=f"{manifest.rows} rows", got=manifest.ledger.as_json())
    return manifest


def find_manifest(paths: StorePaths, layer_set_id: str, partition: str) -> Manifest | None:
    """The manifest of a partition in a layer set, if there is one."""
    path = paths.manifest(layer_set_id, partition)
    return read_manifest(path) if path.exists() else None


def manifests_of(paths: StorePaths, partition: str) -> list[Manifest]:
    """A partition's manifests in all layer sets."""
    return [read_manifest(path) for path in sorted(paths.views.glob(f"*/{partition}.json"))]


def _build(kind: type[T], fields: Any) -> T:
    """A dataclass, and those inside it, from JSON."""
    hints = field_types(kind)  # type: ignore[arg-type]
    given = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name in fields or field.default is dataclasses.MISSING:
            given[field.name] = _value(hints[field.name], fields[field.name])
    return kind(**given)


def _value(hint: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:  # of something and None: what is None is not in the file
        return _value(arguments[0], value)
    if origin is tuple:
        return tuple(_value(arguments[0], item) for item in value)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _build(hint, value)
    plain = origin or hint
    if (
        isinstance(plain, type)
        and not isinstance(plain, types.GenericAlias)
        and not isinstance(value, plain)
        and not (plain is float and isinstance(value, int))
    ):
        raise TypeError(f"expected {hint}, got {value!r}")
    return value
