"""A turn as the model generated it, where the template never renders it that way.

Some templates rewrite what is before an answer as soon as the answer is there: the thinking of the tool calls that led to
it goes. The model saw the generation prompt, so the row is that prompt and the turn (`graft`). Kimi's template also shows
the thinking of a turn only if it calls a tool. The same turn with a call shows how the template writes it (`refill`).
"""

from __future__ import annotations

from dataclasses import replace

from hs_assets.samples.conversations import Conversation, Dropped, ToolCall
from hs_assets.samples.openings import lead_of, opening_of
from hs_assets.samples.stops import trail_of
from hs_assets.samples.tokenizer import ChatTokenizer
from hs_assets.samples.views import View, prompt_before, view_like

Generated = tuple[str, tuple[int, int]]
"""A text, and the span [start, end) of its last turn."""

_CALL = ToolCall("f", {}, "functions.f:0")


def graft(view: View, turn: int, tokenizer: ChatTokenizer) -> Generated | None:
    """The generation prompt of the last turn of `view`, and that turn; None where the turn does not go on from the prompt."""
    prompt, mine, text = prompt_before(view, turn, tokenizer), view.located.of_turn(turn), view.text
    if prompt is None or not view.located.in_one_place(turn):
        return None
    place = view.located.places[mine[0]]
    before = view.located.places[mine[0] - 1].end if mine[0] else 0
    joins = [end for end in range(place.start, before, -1) if prompt.endswith(text[before:end])]
    if not joins or not tokenizer.special_pattern.search(text, before, joins[0]):
        return None
    lead = opening_of(view, turn, place, joins[0], tokenizer, prompted=True)
    trail = trail_of(view, view, turn, tokenizer)
    if isinstance(lead, Dropped) or isinstance(trail, Dropped):
        return None
    moved, end = len(prompt) - joins[0], view.end_of(turn) + trail[0] + len(trail[1])
    return prompt + (text + trail[1])[joins[0] : end], (place.start - lead + moved, end + moved)


def refill(view: View, turn: int, tokenizer: ChatTokenizer) -> Generated | None:
    """The text that ends with the last turn of `view`, its reasoning in place.

    None where the template does not show it, or where with a call more of the turn changes than its reasoning.
    """
    message = view.conversation.messages[turn]
    if not message.reasoning or message.tool_calls or _kinds(view, turn) != ["content"]:
        return None
    calling = (*view.conversation.messages[:turn], replace(message, tool_calls=(_CALL,)))
    shown = view_like(Conversation(calling, view.conversation.tools), view, tokenizer)
    if shown is None or _kinds(shown, turn)[:2] != ["reasoning", "content"]:
        return None
    first = shown.located.of_turn(turn)[0]
    lead, trail = lead_of(shown, turn, first, tokenizer), trail_of(view, view, turn, tokenizer)
    if lead is None or isinstance(lead, Dropped) or isinstance(trail, Dropped):
        return None
    thought, words = shown.located.places[first : first + 2]
    start, answered = thought.start - lead, view.end_of(turn)
    without = shown.text[start : thought.start] + shown.text[thought.end : words.end]
    if not view.text[:answered].endswith(without):
        return None
    text = shown.text[: words.end] + view.text[answered:] + trail[1]
    return text, (start, words.end + trail[0] + len(trail[1]))


def _kinds(view: View, turn: int) -> list[str]:
    return [view.located.pieces[view.located.places[index].piece].kind for index in view.located.of_turn(turn)]
