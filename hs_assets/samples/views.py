"""A conversation as the template renders it, and the same rendered up to a turn, before one, or with another after it."""

from __future__ import annotations

from dataclasses import dataclass

from hs_assets.samples.conversations import Conversation, Dropped, Message
from hs_assets.samples.pieces import Located, locate, prints_as_code
from hs_assets.samples.template import Form, TemplateRefusalError
from hs_assets.samples.tokenizer import ChatTokenizer

_NEXT = "another"


@dataclass(frozen=True, slots=True)
class View:
    """A conversation as the template renders it, with the places of its pieces."""

    conversation: Conversation
    form: Form
    text: str
    located: Located

    @property
    def last(self) -> int:
        """The index of the assistant's last turn, -1 where it has none."""
        return max((turn for turn, message in enumerate(self.conversation.messages) if message.role == "assistant"), default=-1)

    @property
    def last_reasoning(self) -> list[int]:
        """The numbers of the pieces of that turn's reasoning."""
        reasoning = ("reasoning", "thinking")
        return [i for i, piece in enumerate(self.located.pieces) if piece.turn == self.last and piece.kind in reasoning]

    def end_of(self, turn: int) -> int:
        """Where the last piece of a turn ends."""
        return self.located.places[self.located.of_turn(turn)[-1]].end


def complete_view(conversation: Conversation, tokenizer: ChatTokenizer) -> View | Dropped:
    """The conversation in the first form in which the template renders all that it must, the last reasoning if it can."""
    refusals: list[Dropped] = []
    without_reasoning = None
    for form in tokenizer.template.forms(conversation):
        try:
            text = tokenizer.template.render(conversation, form)
        except TemplateRefusalError as refusal:
            refusals.append(Dropped("template_error", str(refusal)))
            continue
        if prints_as_code(conversation, form, text):
            refusals.append(Dropped("template_error", "the template prints what it is given as Python, or as JSON in JSON"))
            continue
        located = locate(conversation, tokenizer.template, form, text)
        if located is None:
            refusals.append(Dropped("mask_unsure", "the template changes the words of the conversation"))
            continue
        view = View(conversation, form, text, located)
        lost = _lost(view, tokenizer)
        if lost is not None:
            refusals.append(lost)
        elif view.located.missing & set(view.last_reasoning):
            without_reasoning = without_reasoning or view
        else:
            return view
    return without_reasoning or next((refusal for refusal in refusals if refusal.reason == "not_rendered"), refusals[0])


def _lost(view: View, tokenizer: ChatTokenizer) -> Dropped | None:
    """What the template leaves out that it must not: all but thinking and words of the assistant before its last turn."""
    conversation, located = view.conversation, view.located
    for number in sorted(located.missing):
        piece = located.pieces[number]
        role = conversation.messages[piece.turn].role
        if role != "assistant" or piece.kind in ("name", "id", "argument") or (piece.turn, piece.kind) == (view.last, "content"):
            return Dropped("not_rendered", f"the template leaves out the {piece.kind} of turn {piece.turn} ({role})")
    if conversation.tools:
        try:
            without = tokenizer.template.render(Conversation(conversation.messages), view.form)
        except TemplateRefusalError:  # it does look at them
            return None
        if without == view.text:
            return Dropped("not_rendered", "the template leaves out the tools")
    return None


def view_like(conversation: Conversation, like: View, tokenizer: ChatTokenizer) -> View | None:
    """Another conversation in the same form; None where the template refuses it or its pieces are not found."""
    try:
        text = tokenizer.template.render(conversation, like.form)
    except TemplateRefusalError:
        return None
    located = locate(conversation, tokenizer.template, like.form, text, (like.located.placing,))
    return None if located is None else View(conversation, like.form, text, located)


def through_turn(view: View, turn: int, tokenizer: ChatTokenizer) -> View | Dropped:
    """The conversation up to and including a turn of the assistant, all of whose words must be there."""
    through: View | None = view
    if turn != len(view.conversation.messages) - 1:
        through = view_like(Conversation(view.conversation.messages[: turn + 1], view.conversation.tools), view, tokenizer)
    if through is None:
        return Dropped("mask_unsure", f"the template does not render the conversation that ends with turn {turn}")
    if not through.located.of_turn(turn):
        return Dropped("not_rendered", f"the template leaves out turn {turn} (assistant)")
    lost = [through.located.pieces[piece] for piece in sorted(through.located.missing)]
    mine = [piece.kind for piece in lost if piece.turn == turn]
    return Dropped("not_rendered", f"the template leaves out the {mine[0]} of turn {turn} (assistant)") if mine else through


def prompt_before(view: View, turn: int, tokenizer: ChatTokenizer) -> str | None:
    """What the model saw before it generated a turn; None where the template refuses."""
    before = Conversation(view.conversation.messages[:turn], view.conversation.tools)
    try:
        return tokenizer.template.render(before, view.form, prompt=True)
    except TemplateRefusalError:
        return None


def text_after(view: View, turn: int, tokenizer: ChatTokenizer) -> str | None:
    """What follows the last turn once another comes after it: an answer of each tool that it calls, or a question."""
    calls = view.conversation.messages[turn].tool_calls
    answers = [Message("tool", _NEXT, name=call.name, tool_call_id=call.id) for call in calls]
    messages = (*view.conversation.messages, *(answers or [Message("user", _NEXT)]))
    followed = view_like(Conversation(messages, view.conversation.tools), view, tokenizer)
    if followed is None or not followed.located.of_turn(turn):
        return None
    return followed.text[followed.end_of(turn) :]


def question(view: View, tokenizer: ChatTokenizer) -> tuple[str, str]:
    """A single question as rendered, without and with a generation prompt; empty where the template refuses it."""
    asked = Conversation((Message("user", _NEXT),), view.conversation.tools)
    try:
        return tokenizer.template.render(asked, view.form), tokenizer.template.render(asked, view.form, prompt=True)
    except TemplateRefusalError:
        return "", ""
