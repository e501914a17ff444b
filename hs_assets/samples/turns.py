"""The turns of the assistant in a rendered conversation: where each stands, and whether a later turn changed it.

That takes some renderings more, of the beginning of the conversation. They are made once for all conversations that the
template tells apart by the words of their pieces alone.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from hs_assets.samples.conversations import Dropped
from hs_assets.samples.openings import lead_of, traits_of, without_empty_thinking
from hs_assets.samples.stops import trail_of
from hs_assets.samples.tokenizer import ChatTokenizer
from hs_assets.samples.views import View, through_turn

REWRITTEN = Dropped("mask_unsure", "the template renders a turn another way once others follow")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where a turn stands, counted from its pieces: it holds for every conversation with the same text around its pieces.

    It begins ``lead`` characters before place ``first`` and ends ``trail`` after place ``last``. ``stop`` has to be
    appended to the text, if it is not empty: the template only writes it together with the next turn.
    """

    first: int
    lead: int
    last: int
    trail: int
    stop: str = ""

    def span(self, view: View) -> tuple[int, int]:
        """The characters [start, end) of the turn, `stop` included."""
        places = view.located.places
        return places[self.first].start - self.lead, places[self.last].end + self.trail + len(self.stop)


def find_turn(view: View, turn: int, tokenizer: ChatTokenizer) -> Bounds | Dropped:
    """The bounds of an assistant's turn; `REWRITTEN` where it, or what is before it, was rendered otherwise at first."""
    key = ("find", *_facts(view, turn))
    if key not in tokenizer.known_turns:
        tokenizer.known_turns[key] = _find(view, turn, tokenizer)
    found: Bounds | Dropped = tokenizer.known_turns[key]
    return found


def is_rewritten(view: View, turn: int, tokenizer: ChatTokenizer) -> bool | Dropped:
    """Whether an assistant's turn, or what is before it, was rendered otherwise when it was the last."""
    key = ("changes", *_facts(view, turn))
    if key not in tokenizer.known_turns:
        through = through_turn(view, turn, tokenizer)
        tokenizer.known_turns[key] = through if isinstance(through, Dropped) else _changes(view, through, turn)
    changes: bool | Dropped = tokenizer.known_turns[key]
    return changes


def _facts(view: View, turn: int) -> tuple[Hashable, ...]:
    """All that a template can tell two conversations apart by, but for the words of their pieces."""
    located, messages = view.located, view.conversation.messages
    roles, order = tuple(message.role for message in messages), tuple(place.piece for place in located.places)
    return turn, roles, view.form, located.placing, located.pieces, located.gaps, order, traits_of(messages[turn].content)


def _find(view: View, turn: int, tokenizer: ChatTokenizer) -> Bounds | Dropped:
    through = through_turn(view, turn, tokenizer)
    if isinstance(through, Dropped):
        return through
    if _changes(view, through, turn):
        return REWRITTEN
    mine = view.located.of_turn(turn)
    if not view.located.in_one_place(turn):
        return Dropped("mask_unsure", f"the template renders turn {turn} in several places")
    lead = lead_of(view, turn, mine[0], tokenizer)
    if lead is None:
        return REWRITTEN
    trail = trail_of(view, through, turn, tokenizer)
    if isinstance(lead, Dropped):
        return lead
    if isinstance(trail, Dropped):
        return trail
    return Bounds(mine[0], lead, mine[-1], *trail)


def _changes(view: View, through: View, turn: int) -> bool:
    """Whether what was rendered when a turn was the last is another text than the beginning of the whole.

    An empty thinking that only the last turn has, and white space, are no change: no word of anybody is another.
    """
    if view is through:
        return False
    if not view.located.of_turn(turn) or view.located.missing & {place.piece for place in through.located.places}:
        return True
    first, now = through.text[: through.end_of(turn)], view.text[: view.end_of(turn)]
    return without_empty_thinking(first) != without_empty_thinking(now)
