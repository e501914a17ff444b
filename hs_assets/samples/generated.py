"""A turn as the model generated it, where the template never renders it that way.

Some templates rewrite what is before an answer as soon as the answer is there: the thinking of the tool calls that led to
it goes. The model saw the generation prompt, so the row is that prompt and the turn (`graft`). Kimi's template also shows
the thinking of a turn only if it calls a tool. The same turn with a call shows how the template writes it (`refill`).
"""

from __future__ import annotations

from dataclasses import replace

from hs_assets.samples.conversations import Conversation, Dropped, ToolCall
from hs_assets.samples.tokenizer import ChatTokenizer
from hs_assets.samples.turns import TurnFinder, View

Generated = tuple[str, tuple[int, int]]
"""A text, and the span [start, end) of its last turn."""

_CALL = ToolCall("f", {}, "functions.f:0")


def graft(view: View, turn: int, tokenizer: ChatTokenizer) -> Generated | None:
    """The generation prompt of the last turn of `view`, and that turn; None where the turn does not go on from the prompt."""
    finder, mine, text = TurnFinder(tokenizer), view.located.of_turn(turn), view.text
    prompt = finder.prompt(view, turn)
    if prompt is None or not mine or mine != list(range(mine[0], mine[-1] + 1)):
        return None
    place = view.located.places[mine[0]]
    before = view.located.places[mine[0] - 1].end if mine[0] else 0
    joins = [end for end in range(place.start, before, -1) if prompt.endswith(text[before:end])]
    if not joins or not tokenizer.special_pattern.search(text, before, joins[0]):
        return None
    lead = finder.opening(view, turn, place, joins[0], prompted=True)
    end = finder.end(view, view, turn, mine[-1])
    if isinstance(lead, Dropped) or isinstance(end, Dropped):
        return None
    moved = len(prompt) - joins[0]
    stop = view.located.places[mine[-1]].end + end[0] + len(end[1])
    return prompt + (text + end[1])[joins[0] : stop], (place.start - lead + moved, stop + moved)


def refill(view: View, turn: int, tokenizer: ChatTokenizer) -> Generated | None:
    """The text that ends with the last turn of `view`, its reasoning in place.

    None where the template does not show it, or where with a call more of the turn changes than its reasoning.
    """
    message = view.conversation.messages[turn]
    if not message.reasoning or message.tool_calls:
        return None
    finder = TurnFinder(tokenizer)
    calling = (*view.conversation.messages[:turn], replace(message, tool_calls=(_CALL,)))
    shown = finder.view(Conversation(calling, view.conversation.tools), view)
    if (
        shown is None
        or not (kinds := _kinds(shown, turn))
        or kinds[:2] != ["reasoning", "content"]
        or _kinds(view, turn) != ["content"]
    ):
        return None
    thought, words = (shown.located.places[index] for index in shown.located.of_turn(turn)[:2])
    empty = view.located.places[view.located.of_turn(turn)[0]]
    lead, end = (
        finder.lead(shown, turn, shown.located.of_turn(turn)[0]),
        finder.end(view, view, turn, view.located.of_turn(turn)[0]),
    )
    if isinstance(lead, Dropped) or isinstance(end, Dropped):
        return None
    start = thought.start - lead
    without = shown.text[start : thought.start] + shown.text[thought.end : words.end]
    if not view.text[: empty.end].endswith(without):
        return None
    text = shown.text[: words.end] + view.text[empty.end :] + end[1]
    return text, (start, words.end + end[0] + len(end[1]))


def _kinds(view: View, turn: int) -> list[str]:
    return [view.located.pieces[view.located.places[index].piece].kind for index in view.located.of_turn(turn)]
