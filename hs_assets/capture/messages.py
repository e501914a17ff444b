"""What a scheduler and its writer processes tell each other, a line of JSON each, and how rows lie in the memory they share."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from hs_assets.capture.assembly import DumpFacts
from hs_assets.wire.dump import TOKEN_BYTES, WORD_BYTES


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """How rows lie in a block of so many bytes: their states, then their token ids, then their checksums."""

    block_bytes: int
    row_bytes: int

    @property
    def rows(self) -> int:
        """How many rows fit."""
        return self.block_bytes // (self.row_bytes + TOKEN_BYTES + WORD_BYTES)

    def states(self, start: int, end: int) -> slice:
        """The bytes of the states of the rows start .. end."""
        return slice(start * self.row_bytes, end * self.row_bytes)

    def token_ids(self, start: int, end: int) -> slice:
        offset = self.rows * self.row_bytes
        return slice(offset + start * TOKEN_BYTES, offset + end * TOKEN_BYTES)

    def checksums(self, start: int, end: int) -> slice:
        offset = self.rows * (self.row_bytes + TOKEN_BYTES)
        return slice(offset + start * WORD_BYTES, offset + end * WORD_BYTES)


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one request: ``rows`` from row ``start`` of the block, tokens ``prefix ..`` of its prompt.

    ``begins`` says whether they are the first of a prefill batch, or more of the same.
    """

    rid: str
    prefix: int
    start: int
    rows: int
    begins: bool


@dataclass(frozen=True, slots=True)
class Filled:
    """A block is full; ``probe``: with what the canary's independent hooks saw."""

    block: int
    probe: bool
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """A request that could not be captured; its failure record is written in the order of its rows."""

    rid: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class WritingStats:
    """What a writer process says of itself, twice a second; the names are those of `CountersRecord`."""

    dumps: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    bytes: int = 0
    spool_high_water_bytes: int = 0
    writer_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class WritingTask:
    """What the writer processes of a rank shall do."""

    rank: int
    writers: int
    blocks: int
    block_bytes: int
    spool: str
    spool_bytes: int
    facts: DumpFacts
    probe_facts: DumpFacts

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WritingTask:
        fields = json.loads(text)
        for name in ("facts", "probe_facts"):
            fields[name] = DumpFacts(**{**fields[name], "residual_ids": tuple(fields[name]["residual_ids"])})
        return cls(**fields)


def encode(message: Filled | Lost | WritingStats) -> bytes:
    """A message as one line."""
    return json.dumps(asdict(message)).encode() + b"\n"


def decode(line: bytes) -> Filled | Lost:
    """The message in a line that the scheduler sent."""
    fields: dict[str, Any] = json.loads(line)
    if "reason" in fields:
        return Lost(**fields)
    return Filled(fields["block"], fields["probe"], tuple(Part(**part) for part in fields["parts"]))
