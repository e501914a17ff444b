"""A row of any kind becomes a conversation, token ids, or a named reason; it never raises."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hs_assets.samples.conversations import Conversation, Dropped, Message, Tokenized, parse_row

REASONS = {
    "empty_row",
    "empty_turn",
    "invalid_json",
    "invalid_unicode",
    "no_assistant_turn",
    "unknown_format",
    "unknown_role",
}
QUESTION, ANSWER = {"role": "user", "content": "17 × 23?"}, {"role": "assistant", "content": "391."}
EXPECTED = Conversation((Message("user", "17 × 23?"), Message("assistant", "391.")))


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


def reason_of(raw: bytes) -> str:
    parsed = parse_row(raw)
    assert isinstance(parsed, Dropped), parsed
    return parsed.reason


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [QUESTION, ANSWER]},
        {"id": 7, "messages": [QUESTION, {**ANSWER, "name": "bot"}], "source": "web"},
        {"conversations": [QUESTION, ANSWER]},
        {"conversations": [{"from": "human", "value": "17 × 23?"}, {"from": "gpt", "value": "391."}]},
        {"conversations": [{"from": "user", "value": "17 × 23?"}, {"from": "assistant", "value": "391."}]},
        {"messages": [QUESTION, {**ANSWER, "tool_calls": [], "reasoning_content": None}]},
    ],
)
def test_formats(row: dict[str, Any]) -> None:
    assert parse_row(dumped(row)) == EXPECTED


def test_raw_utf8_and_escapes_are_the_same() -> None:
    row = {"messages": [QUESTION, ANSWER]}
    assert parse_row(json.dumps(row, ensure_ascii=False).encode()) == parse_row(dumped(row)) == EXPECTED


@pytest.mark.parametrize("content", ["  kept \n", "a\u2028b\u2029c", "nul \0 inside", "😀 e\u0301 \ufeff", "<|im_end|>"])
def test_text_is_kept_as_it_is(content: str) -> None:
    parsed = parse_row(json.dumps({"messages": [{**QUESTION, "content": content}, ANSWER]}, ensure_ascii=False).encode())
    assert isinstance(parsed, Conversation)
    assert parsed.messages[0].content == content


def test_system_and_users_in_a_row_are_kept_in_order() -> None:
    system = {"role": "system", "content": "Be brief."}
    parsed = parse_row(dumped({"messages": [system, QUESTION, QUESTION, ANSWER, QUESTION]}))
    assert isinstance(parsed, Conversation)
    assert [message.role for message in parsed.messages] == ["system", "user", "user", "assistant", "user"]


def test_token_ids() -> None:
    assert parse_row(b'{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}') == Tokenized((5, 6, 7), (False, True, True))


@pytest.mark.parametrize(
    "row",
    [
        {"input_ids": [1, 2]},
        {"input_ids": [1, 2], "loss_mask": None},
        {"input_ids": [1, 2], "loss_mask": [1]},
        {"input_ids": [1, 2], "loss_mask": [0, 2]},
        {"input_ids": [1, 2], "loss_mask": [0, -1]},
        {"input_ids": [1, 2], "loss_mask": ["0", "1"]},
        {"input_ids": [1, 2.0], "loss_mask": [0, 1]},
        {"input_ids": [1, "2"], "loss_mask": [0, 1]},
        {"input_ids": [1, None], "loss_mask": [0, 1]},
        {"input_ids": [[1, 2]], "loss_mask": [[0, 1]]},
        {"input_ids": "12", "loss_mask": "01"},
        {"input_ids": [False, True], "loss_mask": [0, 1]},
    ],
)
def test_token_ids_that_are_none(row: dict[str, Any]) -> None:
    assert reason_of(dumped(row)) == "unknown_format"


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "empty_row"),
        (b" \t\r", "empty_row"),
        (b"{", "invalid_json"),
        (b"\0", "invalid_json"),
        (b'{"messages": [\0]}', "invalid_json"),
        (b'{"messages": []} {"messages": []}', "invalid_json"),
        (b'\xef\xbb\xbf{"messages": []}', "invalid_json"),
        (b'{"a": "line\tbreak"}', "invalid_json"),
        (b"[" * 100_000 + b"]" * 100_000, "invalid_json"),
        (b'{"a":' * 50_000 + b"0" + b"}" * 50_000, "invalid_json"),
        (b'{"input_ids": [' + b"9" * 10_000 + b"]}", "invalid_json"),
        (b'{"messages": "\xff"}', "invalid_unicode"),
        (b'{"messages": "\xed\xa0\x80"}', "invalid_unicode"),
        ('{"messages": []}'.encode("utf-16"), "invalid_unicode"),
        (b"null", "unknown_format"),
        (b"[1]", "unknown_format"),
        (b'"text"', "unknown_format"),
        (b'{"text": "no chat"}', "unknown_format"),
        (b'{"\\ud800": 1}', "unknown_format"),
        (b'{"messages": {"role": "user"}}', "unknown_format"),
        (b'{"messages": ["hi"]}', "unknown_format"),
        (b'{"messages": []}', "no_assistant_turn"),
    ],
    ids=range(22),
)
def test_rows_that_hold_no_conversation(raw: bytes, reason: str) -> None:
    assert reason_of(raw) == reason


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([QUESTION, {**ANSWER, "content": ""}], "empty_turn"),
        ([QUESTION, {**ANSWER, "content": " \n\t"}], "empty_turn"),
        ([{**QUESTION, "content": "\u2003"}, ANSWER], "empty_turn"),
        ([QUESTION, {**ANSWER, "content": None}], "unknown_format"),
        ([QUESTION, {"role": "assistant"}], "unknown_format"),
        ([QUESTION, {**ANSWER, "content": 391}], "unknown_format"),
        ([QUESTION, {**ANSWER, "content": [{"type": "text", "text": "391."}]}], "unknown_format"),
        ([QUESTION, {**ANSWER, "tool_calls": [{"type": "function"}]}], "unknown_format"),
        ([QUESTION, {**ANSWER, "reasoning_content": "17 × 20 = 340"}], "unknown_format"),
        ([QUESTION, ANSWER, {"role": "tool", "content": "4"}], "unknown_role"),
        ([{"from": "User", "value": "?"}, {"from": "Assistant", "value": "391."}], "unknown_role"),
        ([{"content": "?"}, ANSWER], "unknown_role"),
        ([{"role": ["user"], "content": "?"}, ANSWER], "unknown_role"),
        ([{"role": "\ud800", "content": "?"}, ANSWER], "unknown_role"),
    ],
    ids=range(14),
)
def test_turns_that_cannot_be_used(turns: list[Any], reason: str) -> None:
    assert reason_of(dumped({"messages": turns})) == reason


@pytest.mark.parametrize("field", [{"tools": [{"type": "function", "function": {"name": "add"}}]}, {"system": "Be brief."}])
def test_parts_of_a_conversation_that_stand_beside_its_turns_are_not_lost_in_silence(field: dict[str, Any]) -> None:
    """Without them the model would see another prompt than the one that the answer was given to."""
    assert parse_row(dumped({"messages": [QUESTION, ANSWER], **field})) != EXPECTED


def test_a_question_without_an_answer_is_a_conversation() -> None:
    assert parse_row(dumped({"messages": [QUESTION]})) == Conversation((Message("user", QUESTION["content"]),))


@pytest.mark.parametrize("field", [{"tools": []}, {"tools": None}, {"system": ""}])
def test_empty_parts_beside_the_turns_change_nothing(field: dict[str, Any]) -> None:
    assert parse_row(dumped({"messages": [QUESTION, ANSWER], **field})) == EXPECTED


@pytest.mark.parametrize("escape", [r"\ud800", r"\udfff", r"\ud800\ud800", r"\udc00\ud800"])
def test_a_lone_surrogate(escape: str) -> None:
    raw = b'{"messages": [{"role": "user", "content": "a%sb"}, {"role": "assistant", "content": "c"}]}' % escape.encode()
    parsed = parse_row(raw)
    assert isinstance(parsed, Dropped)
    assert parsed.reason == "invalid_unicode"
    assert "turn 0" in parsed.detail
    assert "character 1" in parsed.detail


def test_a_pair_of_surrogates_is_a_character() -> None:
    raw = rb'{"messages": [{"role": "user", "content": "\ud83d\ude00"}, {"role": "assistant", "content": "c"}]}'
    parsed = parse_row(raw)
    assert isinstance(parsed, Conversation)
    assert parsed.messages[0].content == "😀"


def test_the_detail_names_the_turn() -> None:
    parsed = parse_row(dumped({"messages": [QUESTION, ANSWER, {"role": "tool", "content": "4"}]}))
    assert parsed == Dropped("unknown_role", "turn 2: 'tool'")


def check(raw: bytes) -> None:
    """What holds for every row: a conversation that can be encoded, ids with a mask, or a reason that can be written down."""
    parsed = parse_row(raw)
    if isinstance(parsed, Dropped):
        assert parsed.reason in REASONS
        parsed.detail.encode()
    elif isinstance(parsed, Conversation):
        assert any(message.role == "assistant" for message in parsed.messages)
        assert all(message.content.encode().strip() for message in parsed.messages)
    else:
        assert len(parsed.input_ids) == len(parsed.loss_mask)


@given(st.binary(max_size=200))
def test_arbitrary_bytes(raw: bytes) -> None:
    check(raw)


ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=8)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT
KEYS = st.sampled_from(["messages", "conversations", "input_ids", "loss_mask", "role", "from", "content", "value", "tool_calls"])
JSON = st.recursive(
    LEAVES | st.sampled_from(["user", "gpt"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS | ANY_TEXT, inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_arbitrary_json(value: Any) -> None:
    check(dumped(value))


@given(st.dictionaries(KEYS, st.lists(st.dictionaries(KEYS, LEAVES | st.sampled_from(["user", "gpt"]), max_size=3), max_size=3)))
def test_arbitrary_turns(row: dict[str, Any]) -> None:
    check(dumped(row))
