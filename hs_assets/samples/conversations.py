"""What a row of a source can be: a conversation, plain text, ids that are tokenised already, or a reason to drop it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
    ``name`` is who speaks, which some templates show; ``tool_call_id`` the call that a tool answers. A turn that is not
    ``trained`` is read, never supervised.
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


@dataclass(frozen=True, slots=True)
class Text:
    """A row of plain text, without turns: all of it is supervised."""

    text: str
