"""A conversation answered by the model itself: every assistant turn in order, each after the model's own earlier answers.

Who asks the model is not decided here: `answer` is given a function for it. What it generated becomes a message in the way
that renders to the same tokens; where no way does, that is noted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from hs_assets.samples.conversations import Conversation, Dropped, Message
from hs_assets.samples.template import TemplateRefusalError
from hs_assets.samples.tokenizer import ChatTokenizer

AS_GENERATED, RETOKENISED, THINKING_REMOVED = "as_generated", "retokenised", "thinking_removed"
"""How a turn renders: to the very tokens that the model generated, to others, or without its thinking."""

_THINK, _END_THINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Generation:
    """What the model generated after a prompt. ``finish``: ``stop`` (then ``stopped_by`` is the last of ``output_ids``)
    or ``length``. ``server``: which process."""

    output_ids: tuple[int, ...]
    finish: Literal["stop", "length"]
    server: str

    def words(self, stop_token_ids: Sequence[int]) -> tuple[int, ...]:
        """The ids without the stop."""
        stopped = self.finish == "stop" and self.output_ids and self.output_ids[-1] in stop_token_ids
        return self.output_ids[:-1] if stopped else self.output_ids


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn that the model answered; ``rendering`` is one of the three words above."""

    turn: int
    prompt_tokens: int
    output_tokens: int
    finish: str
    rendering: str
    server: str


@dataclass(frozen=True, slots=True)
class Answered:
    """A conversation whose assistant turns are the model's own, and how each came about."""

    conversation: Conversation
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """What an answer must keep to.

    ``max_tokens`` of an answer; a prompt and its answer stay within ``context_length``; ids lie in ``[0, vocab_size)``.
    ``cut``: what becomes of an answer that reached ``max_tokens``.
    """

    max_tokens: int
    context_length: int
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    keep_thinking: bool
    cut: Literal["drop", "keep"]


Ask = Callable[[int, list[int]], Generation]
"""Gets the number of a turn and the prompt's ids; gives what the model generated, or raises."""


def answer(conversation: Conversation, tokenizer: ChatTokenizer, rules: AnswerRules, ask: Ask) -> Answered | Dropped:
    """Have the model answer each assistant turn, and the last turn if it is the user's.

    Raises:
        Exception: whatever `ask` raises.
    """
    refused = _why_not(conversation, tokenizer)
    if refused is not None:
        return refused
    messages: list[Message] = []
    turns = []
    for number, message in enumerate(_with_last_answer(conversation)):
        if message.role != "assistant":
            messages.append(message)
            continue
        prompt = _prompt(messages, tokenizer, rules)
        if isinstance(prompt, Dropped):
            return prompt
        text, ids = prompt
        generation = ask(number, ids)
        made = _message(messages, text, ids, generation, tokenizer, rules, trained=message.trained)
        if isinstance(made, Dropped):
            return Dropped(made.reason, f"turn {number}: {made.detail}")
        answered, rendering = made
        messages.append(answered)
        turns.append(Turn(number, len(ids), len(generation.output_ids), generation.finish, rendering, generation.server))
    return Answered(Conversation(tuple(messages)), tuple(turns))


def _why_not(conversation: Conversation, tokenizer: ChatTokenizer) -> Dropped | None:
    """Why a conversation cannot be answered again, if it cannot."""
    if conversation.tools or any(message.role == "tool" or message.tool_calls for message in conversation.messages):
        return Dropped("response_needs_tools", "the model's own calls would need answers of the tools, which are not at hand")
    before = None
    for number, message in enumerate(_with_last_answer(conversation)):
        if message.role == "assistant" and before != "user":
            return Dropped(
                "response_without_question", f"turn {number} of the assistant follows {before or 'nothing'}, not the user"
            )
        before = message.role
        forged = tokenizer.special_pattern.search(message.content)
        if message.role != "assistant" and forged is not None:
            return Dropped("special_token_in_content", f"turn {number} ({message.role}) contains {forged.group()!r}")
    return None


def _with_last_answer(conversation: Conversation) -> tuple[Message, ...]:
    """The turns, with one for the answer to the user's last words."""
    messages = conversation.messages
    return messages if messages and messages[-1].role == "assistant" else (*messages, Message("assistant", ""))


def _prompt(messages: list[Message], tokenizer: ChatTokenizer, rules: AnswerRules) -> tuple[str, list[int]] | Dropped:
    """Text and ids that the model is asked with."""
    text = _render(messages, tokenizer, prompt=True)
    if isinstance(text, Dropped):
        return text
    ids = tokenizer.encode(text)
    outside = next((i for i in ids if not 0 <= i < rules.vocab_size), None)
    if outside is not None:
        return Dropped("token_out_of_vocab", f"id {outside} with a vocabulary of {rules.vocab_size}")
    if len(ids) + rules.max_tokens > rules.context_length:
        detail = f"{len(ids)} tokens and an answer of {rules.max_tokens} are more than the context of {rules.context_length}"
        return Dropped("response_too_long", detail)
    return text, ids


def _render(messages: list[Message], tokenizer: ChatTokenizer, *, prompt: bool) -> str | Dropped:
    conversation, refusals = Conversation(tuple(messages)), []
    for form in tokenizer.template.forms(conversation):
        try:
            return tokenizer.template.render(conversation, form, prompt=prompt)
        except TemplateRefusalError as refusal:
            refusals.append(str(refusal))
    return Dropped("template_error", refusals[0])


def _message(
    before: list[Message],
    prompt: str,
    prompt_ids: list[int],
    generation: Generation,
    tokenizer: ChatTokenizer,
    rules: AnswerRules,
    *,
    trained: bool,
) -> tuple[Message, str] | Dropped:
    """The answer as a message, and how it renders."""
    if generation.finish == "length" and rules.cut == "drop":
        return Dropped("response_cut", f"no end within {len(generation.output_ids)} tokens")
    words = tokenizer.decode(generation.words(rules.stop_token_ids))
    opening = prompt[prompt.rindex(_THINK) :] if prompt.rstrip().endswith(_THINK) else ""
    thinking, content = split_thinking(words, opened=bool(opening))
    if not content.strip():
        return Dropped("response_empty", "nothing but thinking" if thinking else f"finished by {generation.finish} at once")
    parted = Message("assistant", content.lstrip("\n"), (thinking or "").strip("\n") or None, trained=trained)
    if thinking and thinking.strip() and not rules.keep_thinking:
        return dataclasses.replace(parted, reasoning=None), THINKING_REMOVED
    whole = Message("assistant", opening + words, trained=trained)
    generated = [*prompt_ids, *generation.output_ids]
    rendered = {}
    for way in dict.fromkeys((parted, whole)):
        text = _render([*before, way], tokenizer, prompt=False)
        if isinstance(text, Dropped):
            return text
        if tokenizer.encode(text)[: len(generated)] == generated:
            return way, AS_GENERATED
        rendered[way] = text
    same_words = next((way for way, text in rendered.items() if text.startswith(prompt + words)), None)
    if same_words is not None:
        return same_words, RETOKENISED
    return parted, RETOKENISED if (thinking or "").strip() in rendered[parted] else THINKING_REMOVED


def split_thinking(text: str, *, opened: bool) -> tuple[str | None, str]:
    """What the model thought, and what it said.

    Arguments:
        opened: the prompt ends with ``<think>``, so that the text begins inside.
    """
    inside = text if opened else text.lstrip().removeprefix(_THINK) if text.lstrip().startswith(_THINK) else None
    if inside is None:
        return None, text
    thinking, closed, content = inside.partition(_END_THINK)
    return (thinking, content) if closed else (inside, "")
