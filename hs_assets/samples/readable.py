"""Token ids → the pieces of text they stand for, as people look at them."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hs_assets.samples.prompts import Prompt
from hs_assets.samples.tokenizer import ChatTokenizer

_MOST_IDS = 16
_CONTEXT_IDS = 4
_REPLACEMENT = "\ufffd"
_HIDDEN = frozenset({"Cc", "Cs", "Zl", "Zp"})
_TURNS_DIRECTION = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


@dataclass(frozen=True, slots=True)
class Piece:
    """The text of one token, or of a few that share a character. ``special``: a special token."""

    text: str
    ids: tuple[int, ...]
    supervised: bool
    special: bool


@dataclass(frozen=True, slots=True)
class Run:
    """Pieces side by side that are alike, joined."""

    text: str
    supervised: bool
    special: bool


def pieces(prompt: Prompt, tokenizer: ChatTokenizer) -> Iterator[Piece]:
    """The text of a prompt, piece by piece; joined, they are what the tokenizer decodes the whole to."""
    special = frozenset(tokenizer.special_tokens)
    ids, mask = prompt.input_ids.tolist(), prompt.loss_mask.tolist()
    start = 0
    while start < len(ids):
        end = start + 1
        text = _text(ids, start, end, tokenizer)
        # A character of several tokens decodes to U+FFFD until its last one.
        while text.endswith(_REPLACEMENT) and end < min(len(ids), start + _MOST_IDS) and mask[end] == mask[start]:
            end += 1
            text = _text(ids, start, end, tokenizer)
        yield Piece(text, tuple(ids[start:end]), bool(mask[start]), text in special)
        start = end


def _text(ids: Sequence[int], start: int, end: int, tokenizer: ChatTokenizer) -> str:
    """What the ids `start` to `end` add to those before them: alone some tokenizers take off a token's leading space."""
    before = ids[max(0, start - _CONTEXT_IDS) : start]
    context, whole = tokenizer.decode(before), tokenizer.decode([*before, *ids[start:end]])
    follows = whole.startswith(context) and not context.endswith(_REPLACEMENT)
    return whole.removeprefix(context) if follows else tokenizer.decode(ids[start:end])


def runs(given: Iterator[Piece]) -> list[Run]:
    """The same text in as few parts as possible; each special token is one of its own."""
    joined: list[Run] = []
    for piece in given:
        last = joined[-1] if joined else None
        if last is not None and not last.special and not piece.special and last.supervised == piece.supervised:
            joined[-1] = Run(last.text + piece.text, piece.supervised, special=False)
        else:
            joined.append(Run(piece.text, piece.supervised, piece.special))
    return joined


def visible(text: str) -> str:
    """The text with control characters written out, which would else move a cursor, turn a line around or vanish."""
    return "".join(c if c in "\n\t" or not _hidden(c) else c.encode("unicode_escape").decode() for c in text)


def _hidden(character: str) -> bool:
    return unicodedata.category(character) in _HIDDEN or character in _TURNS_DIRECTION
