"""Messages → token ids and loss mask: True on the assistant's tokens of every turn, its end-of-turn token included.

Where the template marks what the assistant generates, the marks decide. Else each turn is found by rendering the
conversation up to it and through it: what stands between the two was generated, if both are beginnings of the whole.
A conversation for which that is not sure is dropped, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from hs_assets.samples.conversations import Conversation, Dropped, Message, Tokenized
from hs_assets.samples.tokenizer import ChatTokenizer

_EMPTY_THINKING = re.compile(r"\s*<think>\s*</think>")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the model sees it, and the spans [start, end) of its characters that are supervised."""

    text: str
    spans: tuple[tuple[int, int], ...]
    turn: int | None = None


class Supervise(StrEnum):
    """Which tokens are supervised: all turns of the assistant, the last one only, or every token."""

    ALL = "all"
    LAST = "last"
    EVERYTHING = "everything"


def render_conversation(
    conversation: Conversation, tokenizer: ChatTokenizer, supervise: Supervise = Supervise.ALL
) -> tuple[Rendered, ...] | Dropped:
    """The conversation as the model sees it, with its supervised spans."""
    messages = conversation.messages
    if conversation.tools or any(message.tool_calls or message.reasoning for message in messages):
        return Dropped("template_error", "tools and reasoning are not rendered yet")
    if (forged := _forged(messages, tokenizer)) is not None:
        return forged
    rendered = render(messages, tokenizer)
    if isinstance(rendered, Dropped):
        return rendered
    if supervise is Supervise.EVERYTHING:
        return (Rendered(rendered.text, ((0, len(rendered.text)),)),)
    answers = [message for message in messages if message.role == "assistant"]
    last = len(answers) - 1 if supervise is Supervise.LAST else 0
    spans = tuple(
        span
        for number, (message, span) in enumerate(zip(answers, rendered.spans, strict=False))
        if message.trained and number >= last
    )
    return (Rendered(rendered.text, spans),)


def render_text(text: str, tokenizer: ChatTokenizer) -> Rendered | Dropped:
    """Plain text, all of it supervised."""
    forged = _forged([Message("text", text)], tokenizer)
    return Rendered(text, ((0, len(text)),)) if forged is None else forged


def tokenize(rendered: Sequence[Rendered], tokenizer: ChatTokenizer) -> list[Tokenized | Dropped]:
    """Token ids and loss mask of each."""
    return [_tokenize(one, tokenizer) for one in rendered]


def _forged(messages: Sequence[Message], tokenizer: ChatTokenizer) -> Dropped | None:
    for number, message in enumerate(messages):
        found = next((token for token in tokenizer.special_tokens if token in message.content), None)
        if found is not None:
            return Dropped("special_token_in_content", f"turn {number} ({message.role}) contains {found!r}")
    return None


def tokenize_conversation(messages: Sequence[Message], tokenizer: ChatTokenizer) -> Tokenized | Dropped:
    """Token ids and loss mask of a conversation, or why they cannot be made surely."""
    if (forged := _forged(messages, tokenizer)) is not None:
        return forged
    rendered = render(messages, tokenizer)
    return rendered if isinstance(rendered, Dropped) else _tokenize(rendered, tokenizer)


def render(messages: Sequence[Message], tokenizer: ChatTokenizer) -> Rendered | Dropped:
    """The template's text with its supervised spans."""
    try:
        return _by_marks(messages, tokenizer) if tokenizer.marks_generation else _by_prefixes(messages, tokenizer)
    except Exception as error:  # a template raises what it likes on messages it refuses
        return Dropped("template_error", f"{type(error).__name__}: {error}")


def _by_marks(messages: Sequence[Message], tokenizer: ChatTokenizer) -> Rendered | Dropped:
    text, spans = tokenizer.render_marked(messages)
    if not spans:
        return Dropped("mask_unsure", "the template's generation marks are empty")
    answers = iter([message.content.strip() for message in messages if message.role == "assistant"])
    for start, end in spans:
        words = text[start:end]
        for token in tokenizer.special_tokens:
            words = words.replace(token, "")
        words = words.strip()
        # A template may leave out the thinking of earlier turns, and so render a part of an answer.
        if not any(answer in words or (words and words in answer) for answer in answers):
            return Dropped("mask_unsure", "what the template marks is not the answers, one after another")
    return Rendered(text, tuple(spans))


def _by_prefixes(messages: Sequence[Message], tokenizer: ChatTokenizer) -> Rendered | Dropped:
    text = tokenizer.render(messages)
    spans = []
    for number, message in enumerate(messages):
        if message.role != "assistant":
            continue
        before = tokenizer.render(messages[:number], prompt=True)
        through = tokenizer.render(messages[: number + 1])
        if not through.startswith(before) or not text.startswith(through):
            return Dropped("mask_unsure", f"the template renders turn {number} another way inside the conversation")
        span = _generated(through, len(before), message.content, tokenizer.special_tokens)
        if span is None:
            return Dropped("mask_unsure", f"the answer of turn {number} and its end-of-turn token are not found as rendered")
        spans.append(span)
    return Rendered(text, tuple(spans))


def _generated(through: str, prompt_end: int, content: str, special_tokens: Sequence[str]) -> tuple[int, int] | None:
    """The span of a turn: from the generation prompt through the special tokens that end the answer.

    An empty thinking scaffold before the answer is the template's, and left out.
    """
    scaffold = _EMPTY_THINKING.match(through, prompt_end)
    is_scaffold = scaffold is not None and not _EMPTY_THINKING.match(content)
    first = scaffold.end() if scaffold is not None and is_scaffold else prompt_end
    words = content if _follows(through, first, content) else content.strip()
    found = through.find(words, first)
    if found < 0 or through[first:found].strip():
        return None
    answer_end = found + len(words)
    stop = end = answer_end + len(through[answer_end:]) - len(through[answer_end:].lstrip())
    while token := next((token for token in special_tokens if through.startswith(token, end)), None):
        end += len(token)
    return None if end == stop else (found if is_scaffold else prompt_end, end)


def _follows(text: str, start: int, words: str) -> bool:
    """Whether `words` come next in `text`, after white space at most."""
    found = text.find(words, start)
    return found >= 0 and not text[start:found].strip()


def _tokenize(rendered: Rendered, tokenizer: ChatTokenizer) -> Tokenized | Dropped:
    made = _by_offsets(rendered, tokenizer) if tokenizer.has_offsets else _by_pieces(rendered, tokenizer)
    if isinstance(made, Dropped):
        return made
    supervised = [i for i, flag in zip(made.input_ids, made.loss_mask, strict=True) if flag]
    wanted, got = "".join(rendered.text[a:b] for a, b in rendered.spans), tokenizer.decode(supervised)
    if tokenizer.decode(made.input_ids) != rendered.text:  # a tokenizer that adds or drops spaces as it decodes
        wanted, got = "".join(wanted.split()), "".join(got.split())
    return made if wanted == got else Dropped("mask_unsure", "the supervised tokens do not decode to the answers")


def _by_pieces(rendered: Rendered, tokenizer: ChatTokenizer) -> Tokenized | Dropped:
    """Without offsets: encode what is supervised and what is not apart, if that gives the ids of the whole."""
    ids: list[int] = []
    mask: list[bool] = []
    bounds = [0, *(bound for span in rendered.spans for bound in span), len(rendered.text)]
    for number, (start, end) in enumerate(pairwise(bounds)):
        piece = tokenizer.encode(rendered.text[start:end])
        ids += piece
        mask += [number % 2 == 1] * len(piece)
    if ids != tokenizer.encode(rendered.text):
        return Dropped("mask_unsure", "the turns encode to other ids alone than in the conversation")
    return Tokenized(tuple(ids), tuple(mask))


def _by_offsets(rendered: Rendered, tokenizer: ChatTokenizer) -> Tokenized | Dropped:
    ids, offsets = tokenizer.encode_with_offsets(rendered.text)
    mask = [False] * len(ids)
    spans = iter(rendered.spans)
    span = next(spans, None)
    for index, (start, end) in enumerate(offsets):
        while span is not None and start >= span[1]:
            span = next(spans, None)
        if span is None or end <= span[0]:
            continue
        if start < span[0] or end > span[1]:
            return Dropped("mask_unsure", f"token {index} lies across the edge of an answer")
        mask[index] = True
    return Tokenized(tuple(ids), tuple(mask))
