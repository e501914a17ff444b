"""A row of any format becomes a conversation, text, token ids, or a named reason; it never raises, and loses nothing."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hs_assets.samples.conversations import Conversation, Dropped, Message, Text, Tokenized, ToolCall
from hs_assets.samples.formats import FORMATS, parse_row
from hs_assets.settings import RowFormat

REASONS = {
    "ambiguous_format",
    "duplicate_key",
    "empty_row",
    "empty_turn",
    "invalid_json",
    "invalid_unicode",
    "loss_weight",
    "multimodal",
    "no_assistant_turn",
    "part_order",
    "unknown_format",
    "unknown_part",
    "unknown_role",
    "unread_column",
    "unreadable_tool_call",
    "unreadable_tools",
}
QUESTION, ANSWER = {"role": "user", "content": "17 × 23?"}, {"role": "assistant", "content": "391."}
EXPECTED = Conversation((Message("user", "17 × 23?"), Message("assistant", "391.")))
TWO_LINES = Conversation((Message("user", "17 ×\n23?"), Message("assistant", "391.")))
ASKED = Conversation(EXPECTED.messages[:1])
SCHEMA = {"name": "add", "description": "a sum", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOL = {"type": "function", "function": SCHEMA}
ADD = ToolCall("add", {"a": 17, "b": 23})


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


def read(row: Any, row_format: str = "") -> Any:
    return parse_row(dumped(row), row_format).content


def reason_of(raw: bytes) -> str:
    parsed = parse_row(raw).content
    assert isinstance(parsed, Dropped), parsed
    return parsed.reason


def shared(turns: list[tuple[str, str]]) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": text} for role, text in turns]}


# Formats


@pytest.mark.parametrize(
    ("row_format", "row", "expected"),
    [
        ("messages", {"messages": [QUESTION, ANSWER]}, EXPECTED),
        ("messages", {"id": 7, "messages": [QUESTION, ANSWER], "source": "web", "label": True}, EXPECTED),
        ("messages", {"messages": [QUESTION, {**ANSWER, "tool_calls": [], "reasoning_content": None}]}, EXPECTED),
        ("messages", {"messages": json.dumps([QUESTION, ANSWER])}, EXPECTED),
        ("messages", {"messages": [QUESTION]}, ASKED),
        ("conversations", {"conversations": [QUESTION, ANSWER]}, EXPECTED),
        ("conversations", shared([("human", "17 × 23?"), ("gpt", "391.")]), EXPECTED),
        ("conversations", shared([("user", "17 × 23?"), ("assistant", "391.")]), EXPECTED),
        ("nemo", {**shared([("User", "17 × 23?"), ("Assistant", "391.")]), "mask": "User", "system": "", "type": ""}, EXPECTED),
        ("turns", {"turns": ["17 × 23?"], "reference": ["391"], "question_id": 81}, ASKED),
        ("turns", {"turns": ["one", "two"]}, Conversation((Message("user", "one"), Message("user", "two")))),
        ("prompt", {"prompt": "17 × 23?"}, ASKED),
        ("prompt", {"prompt": [QUESTION]}, ASKED),
        ("prompt", {"prompt": [QUESTION], "answer": "391"}, ASKED),
        ("question_answer", {"question": "17 × 23?", "answer": "391."}, EXPECTED),
        ("question_answer", {"query": "17 × 23?", "response": "391."}, EXPECTED),
        ("question_answer", {"prompt": "17 × 23?", "completion": "391."}, EXPECTED),
        ("alpaca", {"instruction": "17 × 23?", "input": "", "output": "391."}, EXPECTED),
        (
            "alpaca",
            {"instruction": "17 ×", "input": "23?", "output": "391."},
            Conversation((Message("user", "17 ×\n23?"), Message("assistant", "391."))),
        ),
        ("alpaca", {"instruction": "17 × 23?", "text": "Below is an instruction", "response": "391."}, EXPECTED),
        ("alpaca", {"instruction": "17 × 23?"}, ASKED),
        (
            "alpaca",
            {"instruction": "17 × 23?", "output": "391.", "history": [["one", "two"]]},
            Conversation((Message("user", "one"), Message("assistant", "two"), *EXPECTED.messages)),
        ),
        (
            "prompt_completion",
            {"prompt": [QUESTION, ANSWER, QUESTION], "completion": [ANSWER]},
            Conversation(
                (
                    Message("user", "17 × 23?", trained=False),
                    Message("assistant", "391.", trained=False),
                    Message("user", "17 × 23?", trained=False),
                    Message("assistant", "391."),
                )
            ),
        ),
        ("text", {"text": "no chat", "url": "https://example.org"}, Text("no chat")),
        ("input_ids", {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, Tokenized((5, 6, 7), (False, True, True))),
        ("input_ids", {"input_ids": [5, 6], "loss_mask": [False, True]}, Tokenized((5, 6), (False, True))),
        ("input_ids", {"input_ids": [5, 6]}, Tokenized((5, 6), (True, True))),
        ("input_ids", {"input_ids": [5, 6], "loss_mask": None, "attention_mask": [1, 1]}, Tokenized((5, 6), (True, True))),
    ],
)
def test_formats(row_format: str, row: dict[str, Any], expected: Any) -> None:
    parsed = parse_row(dumped(row))
    assert (parsed.content, parsed.format) == (expected, row_format)
    assert parse_row(dumped(row), row_format) == parsed


def test_the_configuration_knows_the_formats() -> None:
    assert get_args(RowFormat) == ("", *FORMATS)


def test_a_format_can_be_set() -> None:
    """A row with both: which one is read is the user's choice, and what is not read is named."""
    row = {"prompt": [QUESTION], "completion": [ANSWER], "text": "17 × 23? 391."}
    assert read(row, "prompt") == ASKED
    assert read(row, "text") == Text("17 × 23? 391.")
    assert parse_row(dumped(row), "text").unread == ("completion", "prompt")
    assert read(row, "messages").reason == "unknown_format"


def test_what_is_not_needed_is_named() -> None:
    row = {"messages": [QUESTION, ANSWER], "id": 7, "label": False, "note": "", "nothing": None, "text": "17 × 23? 391."}
    assert parse_row(dumped(row)).unread == ("id", "label", "text")


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [QUESTION, ANSWER], "conversations": [QUESTION]},
        {"messages": [QUESTION, ANSWER], "input_ids": [1]},
        {"question": "a", "prompt": "b", "answer": "c"},
        {"question": "a", "answer": "c", "response": "d"},
        {"messages": [QUESTION, ANSWER], "system": "Be brief.", "system_prompt": "Be long."},
        {"messages": [{"role": "system", "content": "Be brief."}, QUESTION, ANSWER], "system": "Be long."},
        {"messages": [QUESTION, ANSWER], "tools": [{"name": "f"}], "functions": [{"name": "f"}]},
    ],
)
def test_rows_that_say_two_things(row: dict[str, Any]) -> None:
    assert reason_of(dumped(row)) == "ambiguous_format"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [QUESTION, ANSWER], "images": ["a.png"]},
        {"messages": [QUESTION, ANSWER], "chat_template_kwargs": {"thinking": True}},
        {"messages": [QUESTION, ANSWER], "documents": [{"title": "a", "text": "b"}]},
        {"messages": [QUESTION, {**ANSWER, "images": ["a.png"]}]},
        {"messages": [QUESTION, {**ANSWER, "reasoning_details": [{"text": "hm"}]}]},
        {"question": "a", "answer": "b", "context": "c"},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"text": "a", "system": "b"},
        {"input_ids": [1, 2], "labels": [-100, 2]},
        {"input_ids": [1, 2], "attention_mask": [0, 1]},
        {"input_ids": [1, 2], "attention_mask": 1},
        {**shared([("User", "a"), ("Assistant", "b")]), "mask": "Assistant"},
        {"conversations": [{"from": "User", "value": "a", "label": "x"}], "mask": "User", "type": "TEXT_TO_VALUE"},
    ],
)
def test_columns_that_change_what_the_model_sees_are_not_lost_in_silence(row: dict[str, Any]) -> None:
    assert reason_of(dumped(row)) == "unread_column"


# Turns


@pytest.mark.parametrize(
    ("spelled", "role"),
    [
        *((name, "user") for name in ("human", "user", "User", "HUMAN", "prompter")),
        *((name, "assistant") for name in ("gpt", "assistant", "Assistant", "chatgpt", "bing", "bard", "model", "bot")),
        *((name, "system") for name in ("system", "System", "developer")),
        *((name, "tool") for name in ("tool", "observation", "function", "ipython", "function_response")),
    ],
)
def test_roles(spelled: str, role: str) -> None:
    for turn in ({"from": spelled, "value": "x"}, {"role": spelled, "content": "x"}):
        assert read({"conversations": [QUESTION, turn]}).messages[1] == Message(role, "x")


def test_a_system_text_beside_the_turns_is_the_first_turn() -> None:
    system = Message("system", "Be brief.")
    expected = Conversation((system, *EXPECTED.messages))
    assert read({"messages": [QUESTION, ANSWER], "system": "Be brief."}) == expected
    assert read({"system_prompt": "Be brief.", "question": "17 × 23?", "response": "391."}) == expected
    first = {"role": "system", "content": "Be brief."}
    assert read({"messages": [first, QUESTION, ANSWER], "system": "Be brief."}) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "text", "text": "39"}, {"type": "text", "text": "1."}], Message("assistant", "391.")),
        ([{"type": "text", "value": "391."}], Message("assistant", "391.")),
        (["39", "1."], Message("assistant", "391.")),
        ([{"type": "output_text", "text": "391."}], Message("assistant", "391.")),
        ([{"type": "reasoning", "value": "hm"}, {"type": "text", "value": "391."}], Message("assistant", "391.", "hm")),
        ([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "391."}], Message("assistant", "391.", "hm")),
        (
            [
                {"type": "text", "value": "a"},
                {"type": "tool_call", "value": json.dumps({"name": "add", "arguments": {"a": 17, "b": 23}})},
            ],
            Message("assistant", "a", tool_calls=(ADD,)),
        ),
        (
            [{"type": "tool_call", "value": '{"name": "f", "arguments": {}}'}] * 2,
            Message("assistant", "", tool_calls=(ToolCall("f", {}),) * 2),
        ),
    ],
)
def test_parts(content: list[Any], message: Message) -> None:
    assert read({"messages": [QUESTION, {"role": "assistant", "content": content}]}).messages[1] == message


@pytest.mark.parametrize("kind", ["image", "image_url", "input_image", "audio", "input_audio", "video_url", "file"])
def test_what_is_no_text_drops_the_row(kind: str) -> None:
    parts = [{"type": "text", "text": "Who?"}, {"type": kind, kind: "1.jpg"}]
    parsed = read({"messages": [{"role": "user", "content": parts}, ANSWER]})
    assert parsed.reason == "multimodal"
    assert kind in parsed.detail


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([{"type": "text", "text": "a"}, {"type": "reasoning", "value": "b"}], "part_order"),
        ([{"type": "tool_call", "value": '{"name": "f", "arguments": {}}'}, {"type": "text", "text": "a"}], "part_order"),
        ([{"type": "refusal", "refusal": "no"}], "unknown_part"),
        ([{"type": "text", "text": 7}], "unknown_part"),
        ([{"type": "tool_call", "value": "add(1, 2)"}], "unreadable_tool_call"),
        ([7], "unknown_part"),
        ([], "empty_turn"),
    ],
)
def test_parts_that_cannot_be_kept(parts: list[Any], reason: str) -> None:
    assert read({"messages": [QUESTION, {"role": "assistant", "content": parts}]}).reason == reason


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_beside_the_content(key: str) -> None:
    parsed = read({"messages": [QUESTION, {**ANSWER, key: "17 × 20 = 340"}]})
    assert parsed.messages[1] == Message("assistant", "391.", "17 × 20 = 340")
    assert read({"messages": [{**QUESTION, key: "hm"}, ANSWER]}).reason == "unknown_format"
    assert read({"messages": [QUESTION, {**ANSWER, key: ["hm"]}]}).reason == "unknown_format"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_weight": 0.0}, Message("assistant", "391.", trained=False)),
        ({"weight": 0}, Message("assistant", "391.", trained=False)),
        ({"train": False}, Message("assistant", "391.", trained=False)),
        ({"loss_weight": 1.0, "weight": 1}, Message("assistant", "391.")),
        ({"weight": None}, Message("assistant", "391.")),
    ],
)
def test_weights_of_turns(fields: dict[str, Any], message: Message) -> None:
    assert read({"messages": [{**QUESTION, "loss_weight": 0.0}, {**ANSWER, **fields}]}).messages[1] == message


@pytest.mark.parametrize(
    "fields", [{"weight": 0.5}, {"loss_weight": 2}, {"weight": -1}, {"weight": "1"}, {"weight": 1, "loss_weight": 0}]
)
def test_weights_that_a_mask_cannot_keep(fields: dict[str, Any]) -> None:
    assert read({"messages": [QUESTION, {**ANSWER, **fields}]}).reason == "loss_weight"


def test_a_user_who_is_to_be_trained_on() -> None:
    assert read({"messages": [{**QUESTION, "loss_weight": 1.0}, ANSWER]}).reason == "loss_weight"


# Tools


@pytest.mark.parametrize("tools", [[TOOL], [SCHEMA], json.dumps([TOOL]), json.dumps(SCHEMA), [json.dumps(TOOL)]])
def test_tools(tools: Any) -> None:
    assert read({"messages": [QUESTION, ANSWER], "tools": tools}) == Conversation(EXPECTED.messages, (TOOL,))


@pytest.mark.parametrize("tools", [None, "", [], "[]", "null"])
def test_no_tools(tools: Any) -> None:
    assert read({"messages": [QUESTION, ANSWER], "tools": tools}) == EXPECTED


@pytest.mark.parametrize("tools", ["add", 7, [7], ["add"], [{"type": "function"}], [{"function": {"description": "no name"}}]])
def test_tools_that_are_none(tools: Any) -> None:
    assert read({"messages": [QUESTION, ANSWER], "tools": tools}).reason == "unreadable_tools"


ARGUMENTS = {"a": 17, "b": 23}


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}], ids=["null", "empty", "absent"])
@pytest.mark.parametrize("arguments", [ARGUMENTS, json.dumps(ARGUMENTS)], ids=["object", "string"])
@pytest.mark.parametrize("nested", [True, False], ids=["function", "flat"])
def test_calls_of_tools(content: dict[str, Any], arguments: Any, nested: bool) -> None:
    function = {"name": "add", "arguments": arguments}
    call = {"id": "c1", "type": "function", "function": function} if nested else {"id": "c1", **function}
    turn = {"role": "assistant", **content, "tool_calls": [call]}
    answer = {"role": "tool", "tool_call_id": "c1", "name": "add", "content": ""}
    expected = Message("assistant", "", tool_calls=(ToolCall("add", ARGUMENTS, "c1"),))
    assert read({"messages": [QUESTION, turn, answer, ANSWER]}).messages[1:3] == (
        expected,
        Message("tool", "", name="add", tool_call_id="c1"),
    )


def test_calls_as_turns_of_their_own() -> None:
    call = json.dumps({"name": "add", "arguments": ARGUMENTS})
    row = shared([("human", "17 + 23?"), ("function_call", call), ("observation", '{"sum": 40}'), ("gpt", "40.")])
    assert read({**row, "tools": json.dumps([SCHEMA])}) == Conversation(
        (
            Message("user", "17 + 23?"),
            Message("assistant", "", tool_calls=(ADD,)),
            Message("tool", '{"sum": 40}'),
            Message("assistant", "40."),
        ),
        (TOOL,),
    )


def test_the_old_function_call() -> None:
    turn = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": json.dumps(ARGUMENTS)}}
    assert read({"messages": [QUESTION, turn], "functions": [SCHEMA]}) == Conversation(
        (EXPECTED.messages[0], Message("assistant", "", tool_calls=(ADD,))), (TOOL,)
    )


@pytest.mark.parametrize(
    "call",
    [
        {"name": "add", "arguments": "{"},
        {"name": "add", "arguments": "[1]"},
        {"name": "add", "arguments": [1]},
        {"name": "add", "arguments": '{"a": 1, "a": 2}'},
        {"name": "add", "arguments": '{"a": "\\ud800"}'},
        {"name": "add", "input": {"a": 1}},
        {"arguments": {}},
        {"type": "custom", "name": "add", "arguments": {}},
        {"type": ["function"], "name": "add", "arguments": {}},
        {"function": "add"},
        "add",
        7,
    ],
)
def test_calls_that_cannot_be_read(call: Any) -> None:
    assert read({"messages": [QUESTION, {"role": "assistant", "tool_calls": [call]}]}).reason == "unreadable_tool_call"


def test_rows_with_and_without_a_tools_column() -> None:
    """Of 1,000 rows of text none is lost for want of a column that others have."""
    rows = [{"text": f"row {number}", **({"tools": None} if number % 3 else {})} for number in range(1000)]
    assert [read(row) for row in rows] == [Text(f"row {number}") for number in range(1000)]


# Text


def test_raw_utf8_and_escapes_are_the_same() -> None:
    row = {"messages": [QUESTION, ANSWER]}
    assert parse_row(json.dumps(row, ensure_ascii=False).encode()).content == read(row) == EXPECTED


@pytest.mark.parametrize("content", ["  kept \n", "a\u2028b\u2029c", "nul \0 inside", "😀 e\u0301 \ufeff", "<|im_end|>"])
def test_text_is_kept_as_it_is(content: str) -> None:
    parsed = parse_row(json.dumps({"messages": [{**QUESTION, "content": content}, ANSWER]}, ensure_ascii=False).encode()).content
    assert isinstance(parsed, Conversation)
    assert parsed.messages[0].content == content


def test_system_and_users_in_a_row_are_kept_in_order() -> None:
    system = {"role": "system", "content": "Be brief."}
    parsed = read({"messages": [system, QUESTION, QUESTION, ANSWER, QUESTION]})
    assert isinstance(parsed, Conversation)
    assert [message.role for message in parsed.messages] == ["system", "user", "user", "assistant", "user"]


@pytest.mark.parametrize(
    "row",
    [
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
        (b'{"messages": [], "messages": []}', "duplicate_key"),
        (b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "duplicate_key"),
        (b'{"messages": [{"role": "user", "content": NaN}]}', "invalid_json"),
        (b'{"input_ids": [1], "score": -1e999}', "invalid_json"),
        (b'{"a": "line\tbreak"}', "invalid_json"),
        (b"[" * 100_000 + b"]" * 100_000, "invalid_json"),
        (b'{"a":' * 50_000 + b"0" + b"}" * 50_000, "invalid_json"),
        (b'{"input_ids": [' + b"9" * 10_000 + b"]}", "invalid_json"),
        (b'{"messages": "\xff"}', "invalid_unicode"),
        (b'{"messages": "\xed\xa0\x80"}', "invalid_unicode"),
        ('{"messages": []}'.encode("utf-16"), "invalid_unicode"),
        ('{"messages": []}'.encode("utf-16-le"), "invalid_unicode"),
        ('{"messages": []}'.encode("utf-16-be"), "invalid_unicode"),
        (b"null", "unknown_format"),
        (b"[1]", "unknown_format"),
        (b'"text"', "unknown_format"),
        (b'{"words": "no chat"}', "unknown_format"),
        (b'{"text": 7}', "unknown_format"),
        (b'{"turns": [["a"]]}', "unknown_format"),
        (b'{"\\ud800": 1}', "invalid_unicode"),
        (b'{"messages": {"role": "user"}}', "unknown_format"),
        (b'{"messages": ["hi"]}', "unknown_format"),
        (b'{"messages": []}', "no_assistant_turn"),
    ],
    ids=range(30),
)
def test_rows_that_hold_no_conversation(raw: bytes, reason: str) -> None:
    assert reason_of(raw) == reason


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([QUESTION, {**ANSWER, "content": ""}], "empty_turn"),
        ([QUESTION, {**ANSWER, "content": " \n\t"}], "empty_turn"),
        ([{**QUESTION, "content": "\u2003"}, ANSWER], "empty_turn"),
        ([QUESTION, {**ANSWER, "content": None}], "empty_turn"),
        ([QUESTION, {"role": "assistant"}], "empty_turn"),
        ([QUESTION, {**ANSWER, "content": 391}], "unknown_format"),
        ([QUESTION, {**ANSWER, "value": "392."}], "unknown_format"),
        ([QUESTION, {**ANSWER, "name": 7}], "unknown_format"),
        ([QUESTION, ANSWER, {"role": "narrator", "content": "4"}], "unknown_role"),
        ([{"content": "?"}, ANSWER], "unknown_role"),
        ([{"role": ["user"], "content": "?"}, ANSWER], "unknown_role"),
        ([{"role": "\ud800", "content": "?"}, ANSWER], "invalid_unicode"),
    ],
    ids=range(12),
)
def test_turns_that_cannot_be_used(turns: list[Any], reason: str) -> None:
    assert reason_of(dumped({"messages": turns})) == reason


@pytest.mark.parametrize("escape", [r"\ud800", r"\udfff", r"\ud800\ud800", r"\udc00\ud800"])
def test_a_lone_surrogate(escape: str) -> None:
    raw = b'{"messages": [{"role": "user", "content": "a%sb"}, {"role": "assistant", "content": "c"}]}' % escape.encode()
    parsed = parse_row(raw).content
    assert isinstance(parsed, Dropped)
    assert parsed.reason == "invalid_unicode"
    assert parsed.detail == "half of a surrogate pair in messages[0].content, character 1"


def test_a_pair_of_surrogates_is_a_character() -> None:
    raw = rb'{"messages": [{"role": "user", "content": "\ud83d\ude00"}, {"role": "assistant", "content": "c"}]}'
    parsed = parse_row(raw).content
    assert isinstance(parsed, Conversation)
    assert parsed.messages[0].content == "😀"


def test_the_detail_names_the_turn() -> None:
    parsed = read({"messages": [QUESTION, ANSWER, {"role": "narrator", "content": "4"}]})
    assert parsed == Dropped("unknown_role", "turn 2: 'narrator'")


def check(raw: bytes) -> None:
    """What holds for every row: a conversation that can be encoded, ids with a mask, or a reason that can be written down."""
    parsed = parse_row(raw).content
    if isinstance(parsed, Dropped):
        assert parsed.reason in REASONS
        parsed.detail.encode()
    elif isinstance(parsed, Conversation):
        assert parsed.messages
        for message in parsed.messages:
            assert message.role in {"system", "user", "assistant", "tool"}
            assert message.role == "assistant" or not (message.tool_calls or message.reasoning)
            said = message.content.strip() or message.reasoning or message.tool_calls
            assert said or message.role in {"system", "tool"}
        repr(parsed).encode()
    elif isinstance(parsed, Text):
        assert parsed.text.encode().strip()
    else:
        assert len(parsed.input_ids) == len(parsed.loss_mask)


@given(st.binary(max_size=200))
def test_arbitrary_bytes(raw: bytes) -> None:
    check(raw)


ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=8)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT
KEYS = st.sampled_from(
    [
        *("messages", "conversations", "turns", "prompt", "completion", "text", "question", "answer", "system", "mask"),
        *("instruction", "input", "output", "history", "input_ids", "loss_mask", "tools"),
        *("role", "from", "content", "value", "reasoning", "tool_calls", "weight", "type", "name", "arguments", "function"),
    ]
)
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
