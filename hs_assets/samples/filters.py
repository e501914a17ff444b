"""What a prompt must keep to, and what is done with one that does not: cut, or dropped with a reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from hs_assets.samples.conversations import Conversation, Dropped, Tokenized
from hs_assets.samples.masks import Supervise
from hs_assets.samples.model import ModelFacts
from hs_assets.settings import PromptSettings

TooLong = Literal["drop", "cut_at_turn", "cut"]
RoleOrder = Literal["any", "strict"]
UnrenderedReasoning = Literal["drop", "leave_out"]


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """What a prompt must keep to: ``max_tokens`` in length, ids in ``[0, vocab_size)``; all of it is in the data version.

    ``too_long``: a longer row is dropped, or cut after the last answer that fits whole, or cut at the limit.
    ``role_order`` strict: a system turn at most first, then the user; nobody twice in a row; a tool after a call only.
    ``unrendered_reasoning``: a conversation whose reasoning the chat template does not know is dropped, or made without it.
    ``supervise`` is for conversations; rows of token ids keep the mask that they came with.
    """

    max_tokens: int
    vocab_size: int
    too_long: TooLong = "drop"
    min_supervised_tokens: int = 1
    role_order: RoleOrder = "any"
    supervise: Supervise = Supervise.ALL
    unrendered_reasoning: UnrenderedReasoning = "drop"


def check_turns(conversation: Conversation, role_order: RoleOrder) -> Dropped | None:
    """Why a conversation cannot be a prompt, if it cannot: nobody answers, or the roles are in another order."""
    roles = [message.role for message in conversation.messages]
    if "assistant" not in roles:
        return Dropped("no_assistant_turn", f"roles: {', '.join(roles)}")
    if role_order == "any":
        return None
    for number, (message, before) in enumerate(zip(conversation.messages, (None, *conversation.messages), strict=False)):
        previous = before.role if before else "the beginning"
        calls = before is not None and (before.role == "tool" or bool(before.tool_calls))
        allowed = {
            "system": previous == "the beginning",
            "user": previous in {"the beginning", "system", "assistant"} and not calls,
            "assistant": previous in {"user", "tool"},
            "tool": calls,
        }
        if not allowed[message.role]:
            return Dropped("role_order", f"turn {number} ({message.role}) after {previous}")
    return None


def fit(made: Tokenized, limits: PromptLimits) -> tuple[np.ndarray, np.ndarray] | Dropped:
    """Ids int32 [L] and mask bool [L] of a row that keeps to the limits, cut to them where that is chosen."""
    try:
        ids, mask = np.asarray(made.input_ids, dtype=np.int64), np.asarray(made.loss_mask, dtype=bool)
    except OverflowError:
        return _outside(made, limits)
    if ((ids < 0) | (ids >= limits.vocab_size)).any():
        return _outside(made, limits)
    if not mask.any():
        return Dropped("no_supervised_tokens", f"none of {len(ids)} tokens is supervised")
    if len(ids) > limits.max_tokens:
        kept = _cut(mask, limits)
        if isinstance(kept, Dropped):
            return kept
        ids, mask = ids[:kept], mask[:kept]
    supervised = int(mask.sum())
    if supervised < limits.min_supervised_tokens:
        return Dropped("too_few_supervised_tokens", f"{supervised} of {len(ids)}, at least {limits.min_supervised_tokens}")
    return ids.astype("<i4"), mask


def _outside(made: Tokenized, limits: PromptLimits) -> Dropped:
    first = next(i for i in made.input_ids if not 0 <= i < limits.vocab_size)
    return Dropped("token_out_of_vocab", f"id {first} with a vocabulary of {limits.vocab_size}")


def _cut(mask: np.ndarray, limits: PromptLimits) -> int | Dropped:
    """How many tokens are kept of a row that is too long."""
    limit, first = limits.max_tokens, int(mask.argmax())
    length = f"{len(mask)} tokens, at most {limit} (prompts.max_tokens, or what SGLang takes of the model's context)"
    if first >= limit:
        return Dropped("truncated_before_supervision", f"{length}; the first supervised one is number {first}")
    if limits.too_long == "drop":
        return Dropped("too_long", length)
    if limits.too_long == "cut":
        return limit
    ends = np.flatnonzero(mask & ~np.append(mask[1:], False)) + 1
    whole = ends[ends <= limit]
    return int(whole[-1]) if len(whole) else Dropped("too_long", f"{length}; the first answer ends after {int(ends[0])}")


def limits_of(settings: PromptSettings, facts: ModelFacts) -> PromptLimits:
    """What the configuration and the model ask of a prompt."""
    return PromptLimits(
        max_tokens=min(settings.max_tokens, facts.max_prompt_tokens),
        vocab_size=facts.vocab_size,
        too_long=settings.too_long,
        min_supervised_tokens=settings.min_supervised_tokens,
        role_order=settings.role_order,
        supervise=Supervise(settings.supervise),
        unrendered_reasoning=settings.unrendered_reasoning,
    )
