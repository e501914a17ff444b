"""Where an assistant's turn ends: with the stop that the model has to learn.

It is found by comparing what follows the turn where it is the last with what follows it where another comes: the last
special token that both have in common, or the first one where they have none, or the one that opens the next turn where
the turn has no special token of its own.
"""

from __future__ import annotations

import re

from hs_assets.samples.conversations import Dropped
from hs_assets.samples.tokenizer import ChatTokenizer
from hs_assets.samples.views import View, question, text_after


def trail_of(view: View, through: View, turn: int, tokenizer: ChatTokenizer) -> tuple[int, str] | Dropped:
    """How many characters after its last piece a turn ends, and the stop that is to be appended to the text.

    Arguments:
        through: the conversation that ends with the turn; `view` itself where that is the whole.
    """
    special, is_last = tokenizer.special_pattern, view is through
    own, following = through.text[through.end_of(turn) :], view.text[view.end_of(turn) :]
    after = text_after(view, turn, tokenizer) if is_last else following
    shared = [] if after is None else list(special.finditer(own[: _common(own, after)]))
    if shared and _opens_another(own, view, tokenizer):
        return Dropped("mask_unsure", f"the template opens another turn of the assistant after turn {turn}")
    if shared:
        return shared[-1].end(), ""
    if special.search(own):
        stop = re.search(rf"(?:{special.pattern})+", own) if is_last else special.search(following)
        if stop is not None and (is_last or not following[: stop.start()].strip()):
            return stop.end(), ""
    elif after is not None and (found := special.search(after)) and after[: found.start()].strip() == own.strip():
        if not is_last:
            return found.end(), ""
        if after.startswith(own):
            return len(own), after[len(own) : found.end()]
    none = ", where no special token of the tokenizer stands" if special.search(own) is None else ""
    return Dropped("mask_unsure", f"the stop of turn {turn} is not found: its words are followed by {own[:40]!r}{none}")


def _opens_another(own: str, view: View, tokenizer: ChatTokenizer) -> bool:
    """Whether the text after a turn ends as a generation prompt does, in a template that always writes one."""
    asked, prompt = question(view, tokenizer)
    shared = _common(own[::-1], prompt[::-1])
    return asked == prompt and tokenizer.special_pattern.search(own[len(own) - shared :]) is not None


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
