"""Where an assistant's turn begins and ends in a rendered conversation, and whether a later turn changed it.

A turn begins where the generation prompt ends. It ends with its stop, which is found by comparing what follows the turn
where it is the last with what follows it where another comes: the last special token that both have, or the first one
where they have none in common, or the one that opens the next turn where the turn has no special token of its own.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass

from hs_assets.samples.conversations import Conversation, Dropped, Message
from hs_assets.samples.pieces import Located, Place, locate
from hs_assets.samples.template import Form, TemplateRefusalError
from hs_assets.samples.tokenizer import ChatTokenizer

_OPEN = r"(?:<(?:\w+:)?think(?:ing)?>|\[THINK\]|<\|START_THINKING\|>|<\|channel>thought)"
_CLOSE = r"(?:</(?:\w+:)?think(?:ing)?>|\[/THINK\]|<\|END_THINKING\|>|<channel\|>)"
_SCAFFOLD = re.compile(rf"{_OPEN}\s*{_CLOSE}")
_CLOSED = re.compile(rf"\s*{_OPEN}?\s*{_CLOSE}\s*")
_OPENED = re.compile(rf"\s*{_OPEN}\s*")
_PROMPTS_THINKING = re.compile(rf"(?:{_OPEN}\s*{_CLOSE}?|{_CLOSE})\s*$")
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


REWRITTEN = Dropped("mask_unsure", "the template renders a turn another way once others follow")


def find_turn(view: View, turn: int, tokenizer: ChatTokenizer) -> Bounds | Dropped:
    """The bounds of an assistant's turn; `REWRITTEN` where it, or what is before it, was rendered otherwise at first."""
    key = ("find", turn, *_facts(view))
    if key not in tokenizer.known_turns:
        tokenizer.known_turns[key] = TurnFinder(tokenizer).find(view, turn)
    found: Bounds | Dropped = tokenizer.known_turns[key]
    return found


def is_rewritten(view: View, turn: int, tokenizer: ChatTokenizer) -> bool | Dropped:
    """Whether an assistant's turn, or what is before it, was rendered otherwise when it was the last."""
    key = ("changes", turn, *_facts(view))
    if key not in tokenizer.known_turns:
        through = TurnFinder(tokenizer).through(view, turn)
        tokenizer.known_turns[key] = through if isinstance(through, Dropped) else _changes(view, through, turn)
    changes: bool | Dropped = tokenizer.known_turns[key]
    return changes


def _facts(view: View) -> tuple[Hashable, ...]:
    """All that a template can tell two conversations apart by, but for the words of their pieces."""
    located = view.located
    roles = tuple(message.role for message in view.conversation.messages)
    return roles, view.form, located.placing, located.pieces, located.gaps, tuple(place.piece for place in located.places)


class TurnFinder:
    """Finds a turn by rendering what is before it, what it ends and what may follow; nothing is kept."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._template = tokenizer.template
        self._special = tokenizer.special_pattern
        self._specials = re.compile(rf"(?:{self._special.pattern})+")

    def find(self, view: View, turn: int) -> Bounds | Dropped:
        through = self.through(view, turn)
        if isinstance(through, Dropped):
            return through
        if _changes(view, through, turn):
            return REWRITTEN
        mine = view.located.of_turn(turn)
        if mine != list(range(mine[0], mine[-1] + 1)) or len({view.located.places[i].piece for i in mine}) != len(mine):
            return Dropped("mask_unsure", f"the template renders turn {turn} in several places")
        lead = self.lead(view, turn, mine[0])
        if isinstance(lead, Dropped):
            return lead
        end = self.end(view, through, turn, mine[-1])
        return end if isinstance(end, Dropped) else Bounds(mine[0], lead, mine[-1], *end)

    def through(self, view: View, turn: int) -> View | Dropped:
        """The conversation up to and including a turn."""
        if turn == len(view.conversation.messages) - 1:
            through: View | None = view
        else:
            through = self.view(Conversation(view.conversation.messages[: turn + 1], view.conversation.tools), view)
        if through is None:
            return Dropped("mask_unsure", f"the template does not render the conversation that ends with turn {turn}")
        if not through.located.of_turn(turn):
            return Dropped("not_rendered", f"the template leaves out turn {turn} (assistant)")
        lost = [through.located.pieces[piece] for piece in sorted(through.located.missing)]
        mine = [piece.kind for piece in lost if piece.turn == turn]
        return Dropped("not_rendered", f"the template leaves out the {mine[0]} of turn {turn} (assistant)") if mine else through

    def view(self, conversation: Conversation, like: View) -> View | None:
        try:
            text = self._template.render(conversation, like.form)
        except TemplateRefusalError:
            return None
        located = locate(conversation, self._template, like.form, text, (like.located.placing,))
        return None if located is None else View(conversation, like.form, text, located)

    def prompt(self, view: View, turn: int) -> str | None:
        """What the model saw before it generated a turn."""
        before = Conversation(view.conversation.messages[:turn], view.conversation.tools)
        try:
            return self._template.render(before, view.form, prompt=True)
        except TemplateRefusalError:
            return None

    def lead(self, view: View, turn: int, first: int) -> int | Dropped:
        """How many characters before its first piece a turn begins."""
        text, place, prompt = view.text, view.located.places[first], self.prompt(view, turn)
        if prompt is None:
            return Dropped("mask_unsure", f"the template has no generation prompt before turn {turn}")
        without_thinking, header = _PROMPTS_THINKING.sub("", prompt), self._header(view)
        begun = next((begun for begun in (prompt, without_thinking) if text.startswith(begun, 0, place.start)), None)
        if begun is not None and not (header and header in text[len(begun) : place.start]):
            return self.opening(view, turn, place, len(begun), prompted=begun is prompt)
        start = text.rfind(header, 0, place.start) + len(header)
        if begun is None and _squeeze(text[:start]) != _squeeze(prompt):
            return REWRITTEN
        return self.opening(view, turn, place, start, prompted=True)

    def _header(self, view: View) -> str:
        """What opens an assistant's turn after a question."""
        text, prompt = self._question(view)
        return prompt.removeprefix(text) if prompt.startswith(text) else ""

    def _question(self, view: View) -> tuple[str, str]:
        """A single question as rendered, without and with a generation prompt; empty where the template refuses it."""
        question = Conversation((Message("user", _NEXT),), view.conversation.tools)
        try:
            text, prompt = (self._template.render(question, view.form, prompt=prompt) for prompt in (False, True))
        except TemplateRefusalError:
            return "", ""
        return text, prompt

    def opening(self, view: View, turn: int, place: Place, start: int, *, prompted: bool) -> int | Dropped:
        """How much of the text from `start` to a turn's first piece is the turn's own; not the template's empty thinking.

        Arguments:
            prompted: the generation prompt ends at `start`; else it goes on with tags of thinking.
        """
        opening, kind = view.text[start : place.start], view.located.pieces[place.piece].kind
        own = len(opening.lstrip()) if view.text[start - 1 : start].isspace() else len(opening)
        scaffold = None if kind in ("reasoning", "thinking") else _CLOSED.match(opening)
        if scaffold is not None and kind != "content":
            return len(opening) - scaffold.end()
        if scaffold is not None and scaffold.end() == len(opening):
            return self._after_scaffold(view, turn, place, opening)
        if not prompted and _OPENED.fullmatch(opening):
            return 0
        if kind == "content" and opening.strip() and not self._special.match(opening.lstrip()):
            return Dropped("mask_unsure", f"the template puts {opening!r} before the words of turn {turn}")
        return own

    def _after_scaffold(self, view: View, turn: int, place: Place, opening: str) -> int | Dropped:
        words = view.conversation.messages[turn].content
        if _CLOSED.match(words):  # the assistant wrote it itself
            return len(opening)
        if words[:1].isspace() and words[0] != view.text[place.start]:
            return Dropped(
                "mask_unsure", f"the white space of turn {turn} and of the empty thinking before it are not told apart"
            )
        return 0

    def end(self, view: View, through: View, turn: int, last: int) -> tuple[int, str] | Dropped:
        """How many characters after its last piece a turn ends, and the stop that is to be appended to the text."""
        own = through.text[_last(through, turn) :]
        following = view.text[view.located.places[last].end :]
        is_last = view is through
        after = self._followed(view, turn) if is_last else following
        if after is not None:
            common = own[: _common(own, after)]
            specials = list(self._special.finditer(common))
            if specials and self._opens_another(own, view):
                return Dropped("mask_unsure", f"the template opens another turn of the assistant after turn {turn}")
            if specials:
                return specials[-1].end(), ""
        if self._special.search(own):
            stop = self._specials.search(own) if is_last else self._special.search(following)
            if stop is not None and (is_last or not following[: stop.start()].strip()):
                return stop.end(), ""
        elif after is not None and (found := self._special.search(after)) and after[: found.start()].strip() == own.strip():
            if not is_last:
                return found.end(), ""
            if after.startswith(own):
                return len(own), after[len(own) : found.end()]
        return Dropped("mask_unsure", f"the stop of turn {turn} is not found as rendered")

    def _opens_another(self, own: str, view: View) -> bool:
        """Whether the text after a turn ends as a generation prompt does, in a template that always writes one."""
        text, prompt = self._question(view)
        shared = _common(own[::-1], prompt[::-1])
        return text == prompt and self._special.search(own[len(own) - shared :]) is not None

    def _followed(self, view: View, turn: int) -> str | None:
        """What follows the last turn once another comes after it."""
        calls = view.conversation.messages[turn].tool_calls
        answers = [Message("tool", _NEXT, name=call.name, tool_call_id=call.id) for call in calls]
        longer = Conversation((*view.conversation.messages, *(answers or [Message("user", _NEXT)])), view.conversation.tools)
        followed = self.view(longer, view)
        if followed is None or not followed.located.of_turn(turn):
            return None
        return followed.text[_last(followed, turn) :]


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def _last(view: View, turn: int) -> int:
    """Where the last piece of a turn ends."""
    return view.located.places[view.located.of_turn(turn)[-1]].end


def _changes(view: View, through: View, turn: int) -> bool:
    """Whether what was rendered when a turn was the last is another text than the beginning of the whole.

    An empty thinking that only the last turn has, and white space, are no change: no word of anybody is another.
    """
    if view is through:
        return False
    if not view.located.of_turn(turn) or view.located.missing & {place.piece for place in through.located.places}:
        return True
    first, now = through.text[: _last(through, turn)], view.text[: _last(view, turn)]
    return _squeeze(_SCAFFOLD.sub("", first)) != _squeeze(_SCAFFOLD.sub("", now))
