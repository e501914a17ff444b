"""What the assistant generated, as a template with ``{% generation %}`` says itself."""

from __future__ import annotations

from collections.abc import Sequence

from hs_assets.samples.conversations import Dropped
from hs_assets.samples.tokenizer import ChatTokenizer
from hs_assets.samples.turns import REWRITTEN, is_rewritten
from hs_assets.samples.views import View


def marked_spans(view: View, turns: Sequence[int], tokenizer: ChatTokenizer) -> tuple[tuple[int, int], ...] | Dropped:
    """The marked spans [start, end) of `turns`; `REWRITTEN` where one of them was another when it was generated."""
    for turn in turns:
        changes = is_rewritten(view, turn, tokenizer)
        if changes:
            return changes if isinstance(changes, Dropped) else REWRITTEN
    _, marks = tokenizer.template.render_marked(view.conversation, view.form)
    marks = sorted((start, end) for start, end in marks if start < end)
    if not marks:
        return Dropped("mask_unsure", "the template's generation marks are empty")
    spans: list[tuple[int, int]] = []
    for start, end in marks:
        owners = _owners(view, start, end)
        if len(owners) != 1 or view.conversation.messages[next(iter(owners))].role != "assistant":
            return Dropped("mask_unsure", "what the template marks is not the answers, one after another")
        if owners <= set(turns):
            joins = bool(spans) and spans[-1][1] == start
            spans[-1:] = [(spans[-1][0], end)] if joins else [*spans[-1:], (start, end)]
    if not spans:
        return Dropped("no_supervised_tokens", "the template's generation marks leave out the turns that are trained on")
    return tuple(spans)


def _owners(view: View, start: int, end: int) -> set[int]:
    """The turns whose words are in a span; of a span without any, the turn that stands before it."""
    located = view.located
    inside = {located.pieces[place.piece].turn for place in located.places if place.start < end and start < place.end}
    before = [located.pieces[place.piece].turn for place in located.places if place.end <= start]
    return inside or set(before[-1:])
