"""What is done with rows that are too long, supervise too little, or have their roles in another order."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hs_assets.samples.conversations import Conversation, Dropped, Message, Tokenized, ToolCall
from hs_assets.samples.filters import PromptLimits, check_turns, fit

WIDE = PromptLimits(max_tokens=1000, vocab_size=500)


def row(runs: str) -> Tokenized:
    """``"3-2+"``: three tokens that are not supervised, then two that are."""
    mask = [sign == "+" for count, sign in zip(runs[::2], runs[1::2], strict=True) for _ in range(int(count, 36))]
    return Tokenized(tuple(range(len(mask))), tuple(mask))


def kept(made: Tokenized, **limits: Any) -> tuple[int, int] | str:
    """Length and supervised tokens of what is left, or the reason."""
    result = fit(made, dataclasses.replace(WIDE, **limits))
    if isinstance(result, Dropped):
        return result.reason
    ids, mask = result
    assert ids.tolist() == list(range(len(ids)))
    assert mask.tolist() == list(made.loss_mask[: len(ids)])
    return len(ids), int(mask.sum())


def test_an_answer_that_is_cut_at_the_limit() -> None:
    """56 tokens, 41 of them the assistant's: of 30 that are kept, 15 are."""
    assert kept(row("f-z+6+"), max_tokens=30, too_long="cut") == (30, 15)
    assert kept(row("f-z+6+"), max_tokens=30, too_long="drop") == "too_long"
    assert kept(row("f-z+6+"), max_tokens=30, too_long="cut_at_turn") == "too_long"


@pytest.mark.parametrize("too_long", ["drop", "cut_at_turn", "cut"])
def test_a_prompt_that_fills_the_limit(too_long: str) -> None:
    made = Tokenized(tuple(range(305)), (False,) * 300 + (True,) * 5)
    assert kept(made, max_tokens=200, too_long=too_long) == "truncated_before_supervision"
    assert kept(made, max_tokens=300, too_long=too_long) == "truncated_before_supervision"
    assert kept(made, max_tokens=305, too_long=too_long) == (305, 5)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (19, (16, 9)),
        (16, (16, 9)),
        (15, (8, 5)),
        (8, (8, 5)),
        (7, "too_long"),
        (4, "too_long"),
        (3, "truncated_before_supervision"),
    ],
)
def test_a_cut_at_the_end_of_a_turn(limit: int, expected: Any) -> None:
    assert kept(row("3-5+4-4+4-"), max_tokens=limit, too_long="cut_at_turn") == expected


def test_a_row_that_is_not_too_long_is_not_cut() -> None:
    assert kept(row("3-5+4-"), max_tokens=12, too_long="cut_at_turn") == (12, 5)
    assert kept(row("3-5+4-"), max_tokens=12, too_long="cut") == (12, 5)


def test_too_few_supervised_tokens() -> None:
    assert kept(row("3-5+"), min_supervised_tokens=5) == (8, 5)
    assert kept(row("3-5+"), min_supervised_tokens=6) == "too_few_supervised_tokens"
    assert kept(row("3-5+"), min_supervised_tokens=3, max_tokens=5, too_long="cut") == "too_few_supervised_tokens"
    assert kept(row("3-")) == "no_supervised_tokens"
    assert kept(Tokenized((), ())) == "no_supervised_tokens"


@pytest.mark.parametrize("bad", [500, -1, 2**31, 2**63, -(2**40)])
def test_an_id_out_of_the_vocabulary(bad: int) -> None:
    assert kept(Tokenized((0, bad), (False, True))) == "token_out_of_vocab"
    assert kept(Tokenized((0, 1, bad), (False, True, True)), max_tokens=2, too_long="cut") == "token_out_of_vocab"
    assert kept(Tokenized((0, 1), (False, True)), vocab_size=2) == (2, 1)


POLICIES = st.sampled_from(["drop", "cut_at_turn", "cut"])


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 45), POLICIES, st.integers(1, 5))
def test_any_mask(mask: list[bool], limit: int, too_long: Any, least: int) -> None:
    made = Tokenized(tuple(range(len(mask))), tuple(mask))
    result = kept(made, max_tokens=limit, too_long=too_long, min_supervised_tokens=least)
    if isinstance(result, str):
        assert sum(mask[:limit]) < least or len(mask) > limit
        return
    length, supervised = result
    assert length <= limit
    assert supervised >= least
    if len(mask) > limit:
        assert too_long != "drop"
        assert length == limit or (too_long == "cut_at_turn" and mask[length - 1] and not mask[length])


def conversation(roles: str) -> Conversation:
    """``"suacot"``: system, user, assistant, assistant that calls (c), tool (t)."""
    made = {
        "s": Message("system", "x"),
        "u": Message("user", "x"),
        "a": Message("assistant", "x"),
        "c": Message("assistant", "", tool_calls=(ToolCall("f", {}),)),
        "t": Message("tool", "x"),
    }
    return Conversation(tuple(made[role] for role in roles))


@pytest.mark.parametrize("roles", ["ua", "sua", "uaua", "suau", "ucta", "ucttau", "uctcta"])
def test_roles_in_order(roles: str) -> None:
    assert check_turns(conversation(roles), "strict") is None


@pytest.mark.parametrize("roles", ["uua", "a", "au", "uaa", "usa", "ssua", "uta", "uat", "ucua", "uca", "uctua"])
def test_roles_in_another_order(roles: str) -> None:
    refused = check_turns(conversation(roles), "strict")
    assert refused is not None
    assert refused.reason == "role_order"
    assert check_turns(conversation(roles), "any") is None


@pytest.mark.parametrize("order", ["any", "strict"])
@pytest.mark.parametrize("roles", ["s", "u", "su", "uu", "t"])
def test_nobody_answers(roles: str, order: Any) -> None:
    refused = check_turns(conversation(roles), order)
    assert refused is not None
    assert refused.reason == "no_assistant_turn"
