"""Where an assistant's turn begins: where the generation prompt ends, after the empty thinking that a template puts in."""

from __future__ import annotations

import re

from hs_assets.samples.conversations import Dropped
from hs_assets.samples.pieces import Place
from hs_assets.samples.tokenizer import ChatTokenizer
from hs_assets.samples.views import View, prompt_before, question

_OPEN = r"(?:<(?:\w+:)?think(?:ing)?>|\[THINK\]|<\|START_THINKING\|>|<\|channel>thought)"
_CLOSE = r"(?:</(?:\w+:)?think(?:ing)?>|\[/THINK\]|<\|END_THINKING\|>|<channel\|>)"
_EMPTY = re.compile(rf"{_OPEN}\s*{_CLOSE}")
_CLOSED = re.compile(rf"\s*{_OPEN}?\s*{_CLOSE}\s*")
_OPENED = re.compile(rf"\s*{_OPEN}\s*")
_PROMPTS_THINKING = re.compile(rf"(?:{_OPEN}\s*{_CLOSE}?|{_CLOSE})\s*$")


def lead_of(view: View, turn: int, first: int, tokenizer: ChatTokenizer) -> int | Dropped | None:
    """How many characters before its first piece, number `first` of the places, a turn begins.

    None where what the model saw before the turn is not what stands before it here.
    """
    text, place, prompt = view.text, view.located.places[first], prompt_before(view, turn, tokenizer)
    if prompt is None:
        return Dropped("mask_unsure", f"the template has no generation prompt before turn {turn}")
    plain = _PROMPTS_THINKING.sub("", prompt)
    begun = next((begun for begun in (prompt, plain) if text.startswith(begun, 0, place.start)), None)
    asked, opened = question(view, tokenizer)
    header = _PROMPTS_THINKING.sub("", opened.removeprefix(asked)) if opened.startswith(asked) else ""
    if begun is not None and not (header and header in text[len(begun) : place.start]):
        return opening_of(view, turn, place, len(begun), tokenizer, prompted=begun is prompt)
    start = text.rfind(header, 0, place.start) + len(header)
    if begun is None and without_empty_thinking(text[:start]) != without_empty_thinking(plain):
        return None
    return opening_of(view, turn, place, start, tokenizer, prompted=plain == prompt)


def opening_of(view: View, turn: int, place: Place, start: int, tokenizer: ChatTokenizer, *, prompted: bool) -> int | Dropped:
    """How much of the text from `start` to a turn's first piece, `place`, is the turn's own.

    Arguments:
        prompted: the generation prompt ends at `start`; else it goes on with tags of thinking.
    """
    opening, kind = view.text[start : place.start], view.located.pieces[place.piece].kind
    empty = None if kind in ("reasoning", "thinking") else _CLOSED.match(opening)
    if empty is not None and kind != "content":
        return len(opening) - empty.end()
    if empty is not None and empty.end() == len(opening):
        return _after_empty_thinking(view, turn, place, opening)
    if not prompted and _OPENED.fullmatch(opening):
        return 0
    if kind == "content" and opening.strip() and not tokenizer.special_pattern.match(opening.lstrip()):
        return Dropped("mask_unsure", f"the template puts {opening!r} before the words of turn {turn}")
    # White space that goes on from the prompt's is one token with it.
    return len(opening.lstrip()) if view.text[start - 1 : start].isspace() else len(opening)


def _after_empty_thinking(view: View, turn: int, place: Place, opening: str) -> int | Dropped:
    words = view.conversation.messages[turn].content
    if _CLOSED.match(words):  # the assistant wrote it itself
        return len(opening)
    if words[:1].isspace() and words[0] != view.text[place.start]:
        return Dropped("mask_unsure", f"white space of turn {turn} and of the empty thinking before it are not told apart")
    return 0


def traits_of(words: str) -> tuple[bool, bool]:
    """What of an answer's words decides where it begins: white space or an empty thinking at their start."""
    return words[:1].isspace(), _CLOSED.match(words) is not None


def without_empty_thinking(text: str) -> str:
    """The text without empty thinking and white space: what is left is what somebody said, and who."""
    return "".join(_EMPTY.sub("", text).split())
