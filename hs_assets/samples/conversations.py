"""One row of a source → a conversation, ids that are tokenised already, or a reason to drop it.

Formats: OpenAI ``messages`` and ShareGPT ``conversations`` (``from``/``value`` or ``role``/``content``), and
``input_ids`` with ``loss_mask``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}

# What would change the text that the model sees, or what is trained on, if it were read.
_UNREAD_BESIDE_TURNS = ("tools", "system", "functions")
_UNREAD_IN_A_TURN = ("tool_calls", "reasoning_content", "function_call")
_WEIGHTS = ("weight", "loss_weight")


@dataclass(frozen=True, slots=True)
class Dropped:
    """Why a row is not used: a name for the ledger and a sentence."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the assistant makes; ``arguments`` by name."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One turn; ``role`` is system, user, assistant or tool.

    ``content`` is empty where an assistant only calls tools. ``reasoning`` is what it thought before it answered.
    ``name`` and ``tool_call_id`` are those of a tool's answer. A turn that is not ``trained`` is read, never supervised.
    """

    role: str
    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    tool_call_id: str | None = None
    trained: bool = True


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in order, and the JSON schemas of the tools that were offered."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Tokenized:
    """A row that came as token ids, with its mask (True where supervised), one an id."""

    input_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


def parse_row(raw: bytes) -> Conversation | Tokenized | Dropped:
    """What a row holds.

    Arguments:
        raw: the bytes of one line, without its line end.
    """
    if not raw.strip():
        return Dropped("empty_row", "the line is empty")
    try:
        row = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Dropped("invalid_unicode", f"not UTF-8: {error.reason} at byte {error.start}")
    except (ValueError, RecursionError) as error:
        return Dropped("invalid_json", str(error))
    if not isinstance(row, dict):
        return Dropped("unknown_format", f"a JSON {type(row).__name__}, not an object")
    if "input_ids" in row:
        return _tokenized(row)
    turns = row.get("messages", row.get("conversations"))
    if not isinstance(turns, list):
        return Dropped("unknown_format", f"neither messages nor conversations nor input_ids among {sorted(row)[:8]}")
    unread = sorted(key for key in _UNREAD_BESIDE_TURNS if row.get(key))
    if unread:
        return Dropped("unknown_format", f"{', '.join(unread)} beside the turns, which is not read yet")
    return _conversation(turns)


def _tokenized(row: dict[str, Any]) -> Tokenized | Dropped:
    ids, mask = row["input_ids"], row.get("loss_mask")
    if not _ints(ids) or not _ints(mask) or len(ids) != len(mask) or not set(mask) <= {0, 1}:
        return Dropped("unknown_format", "input_ids needs a loss_mask of as many 0s and 1s")
    return Tokenized(tuple(ids), tuple(bool(flag) for flag in mask))


def _ints(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def _conversation(turns: list[Any]) -> Conversation | Dropped:
    messages = []
    for number, turn in enumerate(turns):
        message = _message(turn, f"turn {number}")
        if isinstance(message, Dropped):
            return message
        messages.append(message)
    if not messages:
        return Dropped("no_assistant_turn", "roles: []")
    return Conversation(tuple(messages))


def _message(turn: Any, where: str) -> Message | Dropped:
    if not isinstance(turn, dict):
        return Dropped("unknown_format", f"{where} is no object")
    unread = sorted(key for key in _UNREAD_IN_A_TURN if turn.get(key))
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(role, str) or role not in _ROLES:
        return Dropped("unknown_role", f"{where}: {role!r}")
    if _ROLES[role] == "assistant":
        unread += sorted(key for key in _WEIGHTS if turn.get(key, 1) != 1)
    if unread:
        return Dropped("unknown_format", f"{where} has {', '.join(unread)}, which is not read yet")
    if not isinstance(content, str):
        return Dropped("unknown_format", f"{where}: content is a {type(content).__name__}, not a string")
    if not content.strip():
        return Dropped("empty_turn", f"{where} ({role}) has no text")
    try:
        content.encode("utf-8")
    except UnicodeEncodeError as error:
        return Dropped("invalid_unicode", f"{where}: {error.reason} at character {error.start}")
    return Message(_ROLES[role], content)
