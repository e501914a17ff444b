"""Rows of one partition → prompts: parsed, rendered, tokenised in one batch, and filtered; each is one or has a reason.

A row gives several where the template rewrites history: one for each turn that is trained on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from hs_assets.samples.answers import Answered
from hs_assets.samples.conversations import Conversation, Dropped, Text, Tokenized
from hs_assets.samples.filters import PromptLimits, check_turns, fit
from hs_assets.samples.formats import ParsedRow, parse_row
from hs_assets.samples.masks import Rendered, render_conversation, render_text, render_without_reasoning, tokenize
from hs_assets.samples.prompts import Origin, Prompt, PromptPartition, PromptRow
from hs_assets.samples.responses import Responses
from hs_assets.samples.sources import Source, SourceRow
from hs_assets.samples.tokenizer import ChatTokenizer
from hs_assets.wire.dump import token_sha256
from hs_assets.wire.rid import sample_id

PROMPTS_VERSION = 2
"""Changes when the same rows would give other prompts."""

_Made = Rendered | Tokenized | Dropped


@dataclass(frozen=True, slots=True)
class _Given:
    """A row of the source, what it holds or was answered, and by whom."""

    row: SourceRow
    parsed: ParsedRow
    origin: Origin


def make_partition(
    key: str,
    source: Source,
    rows: Sequence[SourceRow],
    tokenizer: ChatTokenizer,
    limits: PromptLimits,
    responses: Responses | None = None,
) -> PromptPartition:
    """The prompts of a partition, numbered over all that its rows give.

    Arguments:
        responses: a model's answers to these very rows, which take the place of the source's.
    """
    given = _given(rows, source, responses)
    made = [(one, each) for one in given for each in _render(one.parsed, tokenizer, limits)]
    tokenized = iter(tokenize([each for _, each in made if isinstance(each, Rendered)], tokenizer))
    prompts = []
    for number, (one, each) in enumerate(made):
        content = _fit(number, next(tokenized) if isinstance(each, Rendered) else each, limits)
        prompts.append(
            PromptRow(
                sample_id(key, number),
                number,
                one.row.number,
                one.row.sha256,
                content,
                each.turn if isinstance(each, Rendered) else None,
                one.parsed.format,
                (*one.parsed.unread, *(each.left_out if isinstance(each, Rendered) else ())),
                one.origin,
            )
        )
    facts = (PROMPTS_VERSION, tokenizer.template_sha256, tokenizer.tokenizer_sha256, asdict(limits), source.format)
    # The prompts themselves too: a template may look at the clock.
    contents = [(row.source_sha256, row.turn, _identity(row.content)) for row in prompts]
    identity = json.dumps([facts, contents, responses and responses.version])
    version = hashlib.sha256(identity.encode()).hexdigest()[:16]
    options = prompt_options(source, limits, responses)
    return PromptPartition(key, version, source, tokenizer.template_sha256, tokenizer.tokenizer_sha256, tuple(prompts), options)


def prompt_options(source: Source, limits: PromptLimits, responses: Responses | None) -> str:
    """16 hex digits: other settings, or other answers, give others. Template and tokenizer are not in it."""
    facts = (PROMPTS_VERSION, source.format, asdict(limits), responses and responses.version)
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _given(rows: Sequence[SourceRow], source: Source, responses: Responses | None) -> list[_Given]:
    parsed = [parse_source_row(row, source.format) for row in rows]
    if responses is None:
        return [_Given(row, one, Origin()) for row, one in zip(rows, parsed, strict=True)]
    return [
        _answered(row, one, answers.content, responses.answered_by)
        for row, one, answers in zip(rows, parsed, responses.rows, strict=True)
    ]


def _answered(row: SourceRow, parsed: ParsedRow, answers: Answered | Dropped, answered_by: str) -> _Given:
    if isinstance(answers, Dropped):
        return _Given(row, replace(parsed, content=answers), Origin())
    finish_reasons, renderings = (tuple(names) for names in zip(*((t.finish, t.rendering) for t in answers.turns), strict=True))
    return _Given(row, replace(parsed, content=answers.conversation), Origin(answered_by, finish_reasons, renderings))


def parse_source_row(row: SourceRow, row_format: str) -> ParsedRow:
    """What a row of a source holds; a row that repeats another is dropped."""
    parsed = parse_row(row.raw, row_format)
    if row.duplicate_of is None:
        return parsed
    return ParsedRow(Dropped("duplicate", f"the same bytes as {row.duplicate_of}"), parsed.format, parsed.unread)


def _render(parsed: ParsedRow, tokenizer: ChatTokenizer, limits: PromptLimits) -> Sequence[_Made]:
    content = parsed.content
    if isinstance(content, Conversation):
        refused = check_turns(content, limits.role_order)
        try:
            rendered = refused or _render_conversation(content, tokenizer, limits)
        except RecursionError:
            rendered = Dropped("invalid_json", "tools or arguments of calls are nested too deep to be rendered")
        return [rendered] if isinstance(rendered, Dropped) else rendered
    return [render_text(content.text, tokenizer) if isinstance(content, Text) else content]


def _render_conversation(
    conversation: Conversation, tokenizer: ChatTokenizer, limits: PromptLimits
) -> tuple[Rendered, ...] | Dropped:
    rendered = render_conversation(conversation, tokenizer, limits.supervise)
    if isinstance(rendered, Dropped) and rendered.reason == "not_rendered" and limits.unrendered_reasoning == "leave_out":
        return render_without_reasoning(conversation, tokenizer, limits.supervise) or rendered
    return rendered


def _fit(number: int, made: Tokenized | Dropped, limits: PromptLimits) -> Prompt | Dropped:
    kept = made if isinstance(made, Dropped) else fit(made, limits)
    if isinstance(kept, Dropped):
        return kept
    ids, mask = kept
    return Prompt(number, ids, mask, token_sha256(ids.tobytes()))


def _identity(content: Prompt | Dropped) -> tuple[str, str]:
    if isinstance(content, Dropped):
        return content.reason, content.detail
    return content.token_sha256, hashlib.sha256(content.loss_mask.tobytes()).hexdigest()
