"""Conversations → the text that the model sees, and the spans of it that are supervised → token ids and loss masks.

Where the template marks what the assistant generates, the marks decide; else `turns` finds each turn in the text. Where
the template renders a turn another way once others follow (earlier thinking is left out, …), each turn becomes a row of its
own: the conversation as the model saw it when it generated that turn. A conversation for which any of that is not sure is
dropped, never guessed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product

from hs_assets.samples.conversations import Conversation, Dropped, Message, Tokenized
from hs_assets.samples.encoding import encode
from hs_assets.samples.generated import graft, refill
from hs_assets.samples.marks import marked_spans
from hs_assets.samples.pieces import prints_as_code
from hs_assets.samples.template import ChatTemplate, TemplateRefusalError
from hs_assets.samples.tokenizer import ChatTokenizer
from hs_assets.samples.turns import REWRITTEN, find_turn
from hs_assets.samples.views import View, complete_view


class Supervise(StrEnum):
    """What is trained on: all of the assistant's turns, the last one alone, or every token."""

    ALL = "all"
    LAST = "last"
    EVERYTHING = "everything"


@dataclass(frozen=True, slots=True)
class Rendered:
    """A text as the model sees it, and the spans [start, end) of its characters that are supervised.

    ``turn`` is the index of the one message that is supervised, None where a row has all of them. ``left_out`` names what the
    conversation has and the template does not know.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    turn: int | None = None
    left_out: tuple[str, ...] = ()


def render_conversation(
    conversation: Conversation, tokenizer: ChatTokenizer, supervise: Supervise = Supervise.ALL
) -> tuple[Rendered, ...] | Dropped:
    """The rows of a conversation, usually one, or why they cannot be made surely."""
    forged = _forged(conversation, tokenizer)
    if forged is not None:
        return forged
    turns = [turn for turn, message in enumerate(conversation.messages) if message.role == "assistant"]
    trained = [turn for turn in (turns[-1:] if supervise is Supervise.LAST else turns) if conversation.messages[turn].trained]
    if not trained and supervise is not Supervise.EVERYTHING:
        return Dropped("no_supervised_tokens", "no turn of the assistant is trained on")
    view = complete_view(conversation, tokenizer)
    if isinstance(view, Dropped):
        return view
    if supervise is Supervise.EVERYTHING:
        row = _everything(view, tokenizer)
        return row if isinstance(row, Dropped) else (row,)
    whole = _supervised(view, trained, tokenizer)
    if not isinstance(whole, Dropped):
        return (whole,)
    if whole is not REWRITTEN and whole.reason != "not_rendered":
        return whole
    rows = []
    for turn in trained:
        row = _turn_alone(Conversation(conversation.messages[: turn + 1], conversation.tools), turn, tokenizer)
        if isinstance(row, Dropped):
            return row
        rows.append(row)
    return tuple(rows)


def render_without_reasoning(
    conversation: Conversation, tokenizer: ChatTokenizer, supervise: Supervise = Supervise.ALL
) -> tuple[Rendered, ...] | Dropped | None:
    """The rows of a conversation without its reasoning; None where it has none, or the template does know of reasoning."""
    silent = Conversation(tuple(replace(message, reasoning=None) for message in conversation.messages), conversation.tools)
    if silent == conversation or _knows_reasoning(conversation, silent, tokenizer.template):
        return None
    made = render_conversation(silent, tokenizer, supervise)
    return made if isinstance(made, Dropped) else tuple(replace(row, left_out=("reasoning",)) for row in made)


def _knows_reasoning(conversation: Conversation, silent: Conversation, template: ChatTemplate) -> bool:
    """Whether the text is another with the reasoning than without, up to any turn, in any form that the template can read."""
    for form, turn in product(template.forms(conversation), range(len(silent.messages))):
        texts = set()
        for each in (conversation, silent):
            beginning = Conversation(each.messages[: turn + 1], each.tools)
            try:
                text = template.render(beginning, form)
            except TemplateRefusalError:
                text = ""
            texts.add("" if prints_as_code(beginning, form, text) else text)
        if len(texts) > 1:
            return True
    return False


def _turn_alone(conversation: Conversation, turn: int, tokenizer: ChatTokenizer) -> Rendered | Dropped:
    """The conversation up to and including a turn, supervised on that one."""
    view = complete_view(conversation, tokenizer)
    if isinstance(view, Dropped):
        return view
    row = _supervised(view, [turn], tokenizer)
    if isinstance(row, Dropped) and not tokenizer.template.marks_generation:
        generated = refill(view, turn, tokenizer) if row.reason == "not_rendered" else graft(view, turn, tokenizer)
        row = row if generated is None else Rendered(generated[0], (generated[1],))
    if row is REWRITTEN:
        return Dropped("mask_unsure", f"the generation prompt before turn {turn} is not how the turn begins")
    return row if isinstance(row, Dropped) else replace(row, turn=turn)


def render_text(text: str, tokenizer: ChatTokenizer) -> Rendered | Dropped:
    """A plain text, all of it supervised, with the tokenizer's beginning of a text where it writes one."""
    bos = tokenizer.bos or ""
    text = text.removeprefix(bos)
    if not text.strip():
        return Dropped("empty_row", "the text is empty")
    special = tokenizer.special_pattern.search(text)
    if special is not None:
        return Dropped("special_token_in_content", f"the text contains {special.group()!r}")
    return Rendered(bos + text, ((0, len(bos + text)),))


def tokenize(rendered: Sequence[Rendered], tokenizer: ChatTokenizer) -> list[Tokenized | Dropped]:
    """Ids and mask of each row, in one batch on all cores where the tokenizer can."""
    return encode([(row.text, row.spans) for row in rendered], tokenizer)


def _forged(conversation: Conversation, tokenizer: ChatTokenizer) -> Dropped | None:
    """Text that would encode to a special token: nobody could tell it from the template's own."""
    special = tokenizer.special_pattern.search
    for turn, message in enumerate(conversation.messages):
        forged = special("\n".join(_words(message)))
        if forged is not None:
            return Dropped("special_token_in_content", f"turn {turn} ({message.role}) contains {forged.group()!r}")
    tools = json.dumps([dict(tool) for tool in conversation.tools], ensure_ascii=False) if conversation.tools else ""
    forged = special(tools)
    return None if forged is None else Dropped("special_token_in_content", f"the tools contain {forged.group()!r}")


def _words(message: Message) -> Iterator[str]:
    yield message.content
    yield from filter(None, (message.reasoning, message.name, message.tool_call_id))
    for call in message.tool_calls:
        yield json.dumps([call.name, call.id, dict(call.arguments)], ensure_ascii=False)


def _supervised(view: View, turns: Sequence[int], tokenizer: ChatTokenizer) -> Rendered | Dropped:
    """The text with the spans of `turns`; `REWRITTEN` where one of them was another when it was generated."""
    if not tokenizer.template.marks_generation:
        return _found(view, turns, tokenizer)
    spans = marked_spans(view, turns, tokenizer)
    return spans if isinstance(spans, Dropped) else Rendered(view.text, spans)


def _found(view: View, turns: Sequence[int], tokenizer: ChatTokenizer) -> Rendered | Dropped:
    text, spans = view.text, []
    for turn in turns:
        bounds = find_turn(view, turn, tokenizer)
        if isinstance(bounds, Dropped):
            return bounds
        spans.append(bounds.span(view))
        text += bounds.stop
    return Rendered(text, tuple(spans))


def _everything(view: View, tokenizer: ChatTokenizer) -> Rendered | Dropped:
    """All of the text but the turns that are not trained on."""
    left_out = []
    for turn, message in enumerate(view.conversation.messages):
        if message.trained:
            continue
        if message.role != "assistant":
            places = view.located.places
            left_out += [(places[index].start, places[index].end) for index in view.located.of_turn(turn)]
            continue
        bounds = find_turn(view, turn, tokenizer)
        if isinstance(bounds, Dropped):
            return bounds
        start, end = bounds.span(view)
        left_out.append((start, end - len(bounds.stop)))
    edges = [0, *(edge for span in sorted(left_out) for edge in span), len(view.text)]
    spans = tuple((start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end)
    return Rendered(view.text, spans)
