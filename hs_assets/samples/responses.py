"""The answers to a partition's rows: how they were generated, and their table on disk.

``<home>/responses/<partition>.parquet`` has a line for every row of the partition. What was generated, turn by turn, lies
beside it (`hs_assets.extraction.generations`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hs_assets.errors import PromptError
from hs_assets.samples.answers import Answered, Turn
from hs_assets.samples.conversations import Conversation, Dropped, Message
from hs_assets.samples.sources import SourceRow
from hs_assets.samples.tables import readable, replace_table

RESPONSES_VERSION = 1
"""Changes when the same generations would give other answers."""


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """What the answers depend on. ``model`` is for people: the fingerprint goes by the weights."""

    model: str
    weight_fingerprint: str
    dtype: str
    template_sha256: str
    tokenizer_sha256: str
    temperature: float
    top_p: float
    seed: int | None
    max_tokens: int
    stop_token_ids: tuple[int, ...]

    @property
    def fingerprint(self) -> str:
        """16 hex digits."""
        fields = {**dataclasses.asdict(self), "model": None}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def answered_by(self) -> str:
        """The name under which answers go in lineages."""
        return f"{self.model}@{self.weight_fingerprint}"


@dataclass(frozen=True, slots=True)
class ResponseRow:
    """A row with its answers, or the reason that it has none."""

    source_row: int
    source_sha256: str
    content: Answered | Dropped


@dataclass(frozen=True, slots=True)
class Responses:
    """The answers to a partition. ``version`` is their data version; ``choice``: what was kept of what was generated."""

    key: str
    version: str
    spec_fingerprint: str
    choice: str
    answered_by: str
    rows: tuple[ResponseRow, ...]

    @property
    def dropped(self) -> dict[str, int]:
        """How many rows are dropped, by reason."""
        return dict(Counter(row.content.reason for row in self.rows if isinstance(row.content, Dropped)))

    @property
    def turns(self) -> list[Turn]:
        """All turns that the model answered."""
        return [turn for row in self.rows if isinstance(row.content, Answered) for turn in row.content.turns]

    def require(self, spec: GenerationSpec, choice: str, rows: Sequence[SourceRow]) -> None:
        """Check that these are the answers to `rows` that the configuration asks for.

        Raises:
            PromptError: they are not.
        """
        expected = (spec.fingerprint, choice, [row.sha256 for row in rows])
        got = (self.spec_fingerprint, self.choice, [row.source_sha256 for row in self.rows])
        if expected != got:
            raise PromptError(
                "the responses are not those that the configuration and the source ask for",
                where=self.key,
                expected=f"spec {spec.fingerprint}, {choice}, {len(rows)} rows",
                got=f"spec {self.spec_fingerprint}, {self.choice}, {len(self.rows)} rows",
                remedy="materialise responses: only what is missing is asked for",
            )


def make_responses(key: str, spec: GenerationSpec, choice: str, rows: tuple[ResponseRow, ...]) -> Responses:
    """The answers to a partition, with their version."""
    contents = [(row.source_sha256, _as_json(row.content)) for row in rows]
    identity = json.dumps([RESPONSES_VERSION, spec.fingerprint, choice, contents])
    version = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return Responses(key, version, spec.fingerprint, choice, spec.answered_by, rows)


def _as_json(content: Answered | Dropped) -> list[object]:
    if isinstance(content, Dropped):
        return [content.reason, content.detail]
    messages = [(m.role, m.content, m.reasoning, m.trained) for m in content.conversation.messages]
    # Not which server it was: the same answers asked for again are the same.
    return [messages, [(turn.turn, turn.finish, turn.rendering) for turn in content.turns]]


def responses_path(folder: Path, key: str) -> Path:
    """Where a partition's table lies."""
    return folder / f"{key}.parquet"


def write_responses(responses: Responses, folder: Path) -> Path:
    """Write the table, replacing the last one all at once; returns its path."""
    import pyarrow as pa

    answered = [row.content if isinstance(row.content, Answered) else None for row in responses.rows]
    dropped = [row.content if isinstance(row.content, Dropped) else None for row in responses.rows]
    table = pa.table(
        {
            "source_row": pa.array([row.source_row for row in responses.rows], pa.int64()),
            "source_sha256": pa.array([row.source_sha256 for row in responses.rows], pa.string()),
            "dropped": pa.array([d and d.reason for d in dropped], pa.string()),
            "detail": pa.array([d and d.detail for d in dropped], pa.string()),
            "messages": pa.array(
                [a and json.dumps([_message(m) for m in a.conversation.messages]) for a in answered], pa.string()
            ),
            "turns": pa.array([a and json.dumps([dataclasses.asdict(t) for t in a.turns]) for a in answered], pa.string()),
        }
    ).replace_schema_metadata(
        {
            "version": responses.version,
            "spec_fingerprint": responses.spec_fingerprint,
            "choice": responses.choice,
            "answered_by": responses.answered_by,
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = responses_path(folder, responses.key)
    replace_table(path, table)
    return path


def _message(message: Message) -> dict[str, object]:
    return {"role": message.role, "content": message.content, "reasoning": message.reasoning, "trained": message.trained}


def read_responses(folder: Path, key: str) -> Responses:
    """The answers as they were written.

    Raises:
        PromptError: they were never completed, or the table is damaged.
    """
    path = responses_path(folder, key)
    if not path.exists():
        raise PromptError(
            "the responses of this partition are not complete",
            where=key,
            expected=path,
            remedy="materialise responses first (reload the definitions if they are not there)",
        )
    with readable(path, "a table of responses", "materialise responses of this partition again"):
        return _read_table(path, key)


def _read_table(path: Path, key: str) -> Responses:
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    metadata = {name.decode(): value.decode() for name, value in (table.schema.metadata or {}).items()}
    rows = tuple(
        ResponseRow(int(entry["source_row"]), str(entry["source_sha256"]), _content(entry)) for entry in table.to_pylist()
    )
    return Responses(key, metadata["version"], metadata["spec_fingerprint"], metadata["choice"], metadata["answered_by"], rows)


def _content(entry: dict[str, str]) -> Answered | Dropped:
    if entry["dropped"] is not None:
        return Dropped(entry["dropped"], entry["detail"])
    messages = tuple(Message(**fields) for fields in json.loads(entry["messages"]))
    return Answered(Conversation(messages), tuple(Turn(**fields) for fields in json.loads(entry["turns"])))
