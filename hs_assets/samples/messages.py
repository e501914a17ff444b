"""One turn of a conversation → a message, from the spellings of OpenAI, LLaMA-Factory, ShareGPT and NeMo."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hs_assets.samples.conversations import Dropped, Message, ToolCall
from hs_assets.samples.tools import CALL_PARTS, read_calls

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", "ai"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython", "tool_response", "function_response"), "tool"),
    **dict.fromkeys(CALL_PARTS, "assistant"),
}
"""Role as it is written, in small letters → role of a `Message`."""

_ROLE, _CONTENT = ("role", "from"), ("content", "value")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_CALLS = ("tool_calls", "function_call")
_WEIGHTS = ("loss_weight", "weight", "loss", "train")
_MEDIA = ("image", "audio", "video", "file")
_UNREAD = frozenset([*_MEDIA, *(f"{kind}s" for kind in _MEDIA), "documents", "reasoning_details", "refusal", "prefix", "partial"])
"""What would change the text that the model sees, or what is trained on, if it were read."""

_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING_PARTS = ("reasoning", "thinking")


@dataclass(slots=True)
class _Body:
    """What a turn says: in this order, if at all."""

    reasoning: str = ""
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)


def read_turn(turn: Any, where: str) -> Message | Dropped:
    """The message of a turn; `where` is named in reasons."""
    if not isinstance(turn, dict):
        return Dropped("unknown_format", f"{where} is no object")
    spelled = _one(turn, _ROLE)
    role = ROLES.get(spelled.lower()) if isinstance(spelled, str) else None
    if role is None:
        return Dropped("unknown_role", f"{where}: {spelled!r}")
    if unread := sorted(key for key in _UNREAD.intersection(turn) if turn[key]):
        return Dropped("unread_column", f"{where} has {', '.join(unread)}, which is not read and changes what the model sees")
    trained = _trained(turn, role, where)
    if isinstance(trained, Dropped):
        return trained
    body = _body(turn, str(spelled).lower(), where)
    if isinstance(body, Dropped):
        return body
    if role != "assistant" and (body.reasoning or body.calls):
        return Dropped("unknown_format", f"{where} ({role}) has reasoning or calls of tools, which only an assistant has")
    if role in {"user", "assistant"} and not (body.text.strip() or body.reasoning.strip() or body.calls):
        return Dropped("empty_turn", f"{where} ({spelled}) has no text")
    name, call = turn.get("name"), turn.get("tool_call_id")
    if not isinstance(name, str | None) or not isinstance(call, str | int | None):
        return Dropped("unknown_format", f"{where}: name and tool_call_id are strings")
    call_id = None if call is None else str(call)
    return Message(role, body.text, body.reasoning or None, tuple(body.calls), name or None, call_id, trained)


def _one(turn: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    """The value of the first of `keys` that is there and not null."""
    return next((turn[key] for key in keys if turn.get(key) is not None), None)


def _trained(turn: Mapping[str, Any], role: str, where: str) -> bool | Dropped:
    """Whether the turn's weight is 1 (trained) or 0; others cannot be kept by a mask of two values."""
    if turn.keys().isdisjoint(_WEIGHTS):
        return True
    weights = {turn[key] for key in _WEIGHTS if isinstance(turn.get(key), bool | int | float)}
    odd = [key for key in _WEIGHTS if not isinstance(turn.get(key), bool | int | float | None)]
    if odd or len(weights) > 1 or not weights <= {0, 1}:
        return Dropped("loss_weight", f"{where}: a weight of {sorted(weights) or odd}, where only 0 and 1 can be kept")
    if role != "assistant" and weights == {1} and any(key in turn for key in ("loss_weight", "loss", "train")):
        return Dropped("loss_weight", f"{where}: a turn of the {role} that is to be trained on")
    return weights != {0}


def _body(turn: Mapping[str, Any], spelled: str, where: str) -> _Body | Dropped:
    """Content, reasoning and calls, from the content and from the fields beside it."""
    contents = [turn[key] for key in _CONTENT if turn.get(key) not in (None, "")]
    if len(contents) > 1 and contents[0] != contents[1]:
        return Dropped("unknown_format", f"{where} has both content and value, which differ")
    content = contents[0] if contents else ""
    body: _Body | Dropped
    if spelled in CALL_PARTS:
        calls = read_calls(content, where)
        return calls if isinstance(calls, Dropped) else _Body(calls=list(calls))
    if isinstance(content, list):
        body = _join(content, where)
    elif isinstance(content, str):
        body = _Body(text=content)
    elif ROLES[spelled] == "tool":
        body = _Body(text=json.dumps(content, ensure_ascii=False))
    else:
        return Dropped("unknown_format", f"{where}: content is a {type(content).__name__}, not a string")
    return body if isinstance(body, Dropped) else _beside(turn, body, where)


def _beside(turn: Mapping[str, Any], body: _Body, where: str) -> _Body | Dropped:
    """The same with the reasoning and the calls that have fields of their own."""
    if turn.keys().isdisjoint((*_REASONING, *_CALLS)):
        return body
    for key in _REASONING:
        value = turn.get(key)
        if not isinstance(value, str | None):
            return Dropped("unknown_format", f"{where}: {key} is a {type(value).__name__}, not a string")
        if value and body.reasoning and value != body.reasoning:
            return Dropped("unknown_format", f"{where} has several reasonings, which differ")
        body.reasoning = value or body.reasoning
    for key in _CALLS:
        calls = read_calls(turn.get(key), where)
        if isinstance(calls, Dropped):
            return calls
        if calls and body.calls:
            return Dropped("unknown_format", f"{where} has calls of tools in two places")
        body.calls = list(calls) or body.calls
    return body


def _join(parts: list[Any], where: str) -> _Body | Dropped:
    """The parts of a content, texts joined as they are; their order must be that of a `_Body`."""
    body, stage = _Body(), 0
    for part in parts:
        kind, value = ("text", part) if isinstance(part, str) else _part(part)
        if kind.startswith(_MEDIA) or kind.removeprefix("input_").startswith(_MEDIA):
            return Dropped("multimodal", f"{where} has a part of type {kind!r}; only text can be read")
        order = next((n for n, kinds in enumerate((_REASONING_PARTS, _TEXT_PARTS, CALL_PARTS)) if kind in kinds), None)
        if order is None:
            return Dropped("unknown_part", f"{where} has a part of type {kind[:40]!r}")
        if order < stage:
            return Dropped("part_order", f"{where}: {kind} after what it should come before (reasoning, text, calls)")
        stage = order
        if order == 2:
            calls = read_calls(value, where)
            if isinstance(calls, Dropped):
                return calls
            body.calls += calls
        elif not isinstance(value, str):
            return Dropped("unknown_part", f"{where}: a part of type {kind} without text")
        elif order == 1:
            body.text += value
        else:
            body.reasoning += value
    return body


def _part(part: Any) -> tuple[str, Any]:
    """Type and value of a part; LLaMA-Factory keys every value ``value``, others by the type."""
    if not isinstance(part, dict) or not isinstance(kind := part.get("type", "text"), str):
        return "", None
    keys = ("value", "text", kind)
    return kind, next((part[key] for key in keys if part.get(key) is not None), part if kind in CALL_PARTS else None)
