"""Where each piece of a conversation stands in the rendered text.

The conversation is rendered a second time with marker words around the pieces. If that text without its markers is the
text, the markers say where every piece stands and which pieces the template leaves out; else nothing is known.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hs_assets.samples.conversations import Conversation, Message, ToolCall
from hs_assets.samples.template import ChatTemplate, Form, TemplateRefusalError, json_arguments

_THINK_TAG = re.compile(r"(</?think>)")


class Placing(Enum):
    """Where markers stand: around a whole content, or around what stands within its white space and tags of thinking.

    Many templates take these off.
    """

    OUTER = "outer"
    INNER = "inner"
    NO_IDS = "no ids"
    """Within, and none in the ids of calls, which some templates compare or measure."""
    NO_NAMES = "no names"
    """Nor in the names of functions."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some words of a turn; ``kind`` is content, thinking (in the content), reasoning, name, id or argument.

    ``call`` counts the turn's tool calls, for their names and ids.
    """

    turn: int
    kind: str
    call: int | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Piece number ``piece`` stands at the characters [start, end)."""

    piece: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Located:
    """The pieces, their places from left to right, and what the template wrote around them."""

    pieces: tuple[Piece, ...]
    places: tuple[Place, ...]
    gaps: tuple[str, ...]
    placing: Placing

    @property
    def missing(self) -> set[int]:
        """The numbers of the pieces that the template leaves out; of a call's name and id it needs only one."""
        rendered = {place.piece for place in self.places}
        named = {(self.pieces[i].turn, self.pieces[i].call) for i in rendered if self.pieces[i].call is not None}
        lost = set(range(len(self.pieces))) - rendered
        return {i for i in lost if (self.pieces[i].turn, self.pieces[i].call) not in named}

    def in_one_place(self, turn: int) -> bool:
        """Whether a turn's pieces stand once each, side by side."""
        mine = self.of_turn(turn)
        together = mine == list(range(mine[0], mine[-1] + 1)) if mine else False
        return together and len({self.places[index].piece for index in mine}) == len(mine)

    def of_turn(self, turn: int) -> list[int]:
        """The indices into ``places`` of a turn's pieces."""
        return [index for index, place in enumerate(self.places) if self.pieces[place.piece].turn == turn]


def locate(
    conversation: Conversation, template: ChatTemplate, form: Form, text: str, placings: tuple[Placing, ...] = tuple(Placing)
) -> Located | None:
    """The places of all pieces in `text`, the conversation as rendered; None where that cannot be told."""
    word = "Zkq"
    while word in text:
        word += "k"
    tried = None
    for placing in placings:
        marker = _Marker(word, placing, [], [])
        marked = _mark(conversation, marker)
        if marked == tried:
            continue
        tried = marked
        try:
            found = _read(template.render(marked, form), word, tuple(marker.pieces), placing)
        except TemplateRefusalError:  # it looks into what is marked
            continue
        if found is not None and found[0] == text and _as_written(found[1], marker.words, conversation, text):
            return found[1]
    return None


def _as_written(located: Located, words: list[str], conversation: Conversation, text: str) -> bool:
    """Whether what the assistant said and thought is rendered letter for letter; arguments have many notations."""
    said = ("content", "thinking", "reasoning")
    return all(
        text[place.start : place.end] == words[place.piece]
        for place in located.places
        if located.pieces[place.piece].kind in said
        and conversation.messages[located.pieces[place.piece].turn].role == "assistant"
    )


def prints_as_code(conversation: Conversation, form: Form, text: str) -> bool:
    """Whether the template prints arguments or parts as Python or as JSON in JSON: it wants them in another form."""
    if form.parts and ("'type': 'text'" in text or '"type": "text"' in text):
        return True
    calls = [call for message in conversation.messages for call in message.tool_calls if call.arguments]
    if form.json_arguments:
        return any(json.dumps(json_arguments(call), ensure_ascii=False)[1:-1] in text for call in calls)
    return any(repr(dict(call.arguments)) in text and repr(dict(call.arguments)) != json_arguments(call) for call in calls)


@dataclass(frozen=True, slots=True)
class _Marker:
    word: str
    placing: Placing
    pieces: list[Piece]
    words: list[str]

    def mark(self, text: str, turn: int, kind: str, call: int | None = None, *, outer: bool = False) -> str:
        core = text if outer else text.strip()
        if not core.strip():
            return text
        number, start = len(self.pieces), text.index(core)
        self.pieces.append(Piece(turn, kind, call))
        self.words.append(core)
        marked = f"{self.word}{number}o{core}{self.word}{number}c"
        return text[:start] + marked + text[start + len(core) :]


def _mark(conversation: Conversation, marker: _Marker) -> Conversation:
    messages = tuple(_mark_message(message, turn, marker) for turn, message in enumerate(conversation.messages))
    return Conversation(messages, conversation.tools)


def _mark_message(message: Message, turn: int, marker: _Marker) -> Message:
    reasoning = message.reasoning and marker.mark(message.reasoning, turn, "reasoning")
    if marker.placing is Placing.OUTER:
        content = marker.mark(message.content, turn, "content", outer=True)
    else:
        *thinking, answer = _THINK_TAG.split(message.content) if message.role == "assistant" else [message.content]
        thought = (part if _THINK_TAG.fullmatch(part) else marker.mark(part, turn, "thinking") for part in thinking)
        content = "".join(thought) + marker.mark(answer, turn, "content")
    calls = tuple(_mark_call(call, turn, number, marker) for number, call in enumerate(message.tool_calls))
    return dataclasses.replace(message, content=content, reasoning=reasoning, tool_calls=calls)


def _mark_call(call: ToolCall, turn: int, number: int, marker: _Marker) -> ToolCall:
    name, call_id = call.name, call.id
    if marker.placing is not Placing.NO_NAMES:
        name = marker.mark(name, turn, "name", number)
    if marker.placing in (Placing.OUTER, Placing.INNER):
        call_id = call_id and marker.mark(call_id, turn, "id", number)
    return ToolCall(name, _mark_values(dict(call.arguments), turn, marker), call_id)


def _mark_values(value: Any, turn: int, marker: _Marker) -> Any:
    if isinstance(value, str):
        return marker.mark(value, turn, "argument")
    if isinstance(value, Mapping):
        return {key: _mark_values(inner, turn, marker) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_mark_values(inner, turn, marker) for inner in value]
    return value


def _read(marked: str, word: str, pieces: tuple[Piece, ...], placing: Placing) -> tuple[str, Located] | None:
    """The text without its markers, and where they stood; None where they are not in pairs."""
    parts = re.split(rf"{word}(\d+)([oc])", marked)
    texts, places, gaps = [parts[0]], [], [parts[0]]
    position, opened = len(parts[0]), None
    for number, kind, text in _triples(parts):
        if kind == "o" and opened is None:
            opened = Place(number, position, position)
        elif kind == "c" and opened is not None and opened.piece == number:
            places.append(Place(number, opened.start, position))
            gaps.append(text)
            opened = None
        else:
            return None
        texts.append(text)
        position += len(text)
    return None if opened else ("".join(texts), Located(pieces, tuple(places), tuple(gaps), placing))


def _triples(parts: list[str]) -> Iterator[tuple[int, str, str]]:
    for index in range(1, len(parts), 3):
        yield int(parts[index]), parts[index + 1], parts[index + 2]
