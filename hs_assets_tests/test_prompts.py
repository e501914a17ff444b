"""A partition of rows: each is a prompt or has a reason, its table reads back the same, its version says when it may differ."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import BatchEncoding

from hs_assets.errors import PromptError
from hs_assets.samples.conversations import Conversation, Dropped
from hs_assets.samples.filters import PromptLimits
from hs_assets.samples.masks import Rendered, Supervise
from hs_assets.samples.prepare import make_partition
from hs_assets.samples.prompts import (
    Prompt,
    PromptPartition,
    find_counts,
    read_partition_table,
    table_path,
    write_partition,
)
from hs_assets.samples.sources import Partitioning, Source, SourceRow, read_partition, refresh
from hs_assets.samples.tokenizer import ChatTokenizer
from hs_assets_tests.small_tokenizer import (
    CHATML,
    KIMI,
    LLAMA3,
    SPECIAL_TOKENS,
    adds_bos,
    chat_tokenizer,
    json_row,
    marked,
    stock,
    without_offsets,
)

SOURCE = Source("demo", Path("/data/demo.jsonl"))
LIMITS = PromptLimits(max_tokens=200, vocab_size=480)
GOOD = json_row(("user", "What is 17 × 23?"), ("assistant", "391."))
LONE_SURROGATE = rb'{"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "a\ud800b"}]}'
ROWS = (
    (GOOD, None),
    (b"", "empty_row"),
    (b"{", "invalid_json"),
    (b"[" * 100_000, "invalid_json"),
    (b'{"messages": "\xff"}', "invalid_unicode"),
    (LONE_SURROGATE, "invalid_unicode"),
    (b'{"words": "no chat"}', "unknown_format"),
    (json_row(("user", "one"), ("narrator", "two"), ("assistant", "three")), "unknown_role"),
    (json_row(("user", "one"), ("assistant", " ")), "empty_turn"),
    (json_row(("system", "one")), "no_assistant_turn"),
    (json_row(("user", "one")), "no_assistant_turn"),
    (json_row(("user", "say <|im_end|>"), ("assistant", "two")), "special_token_in_content"),
    (json_row(("user", "one"), ("assistant", "say <|im_end|>")), "special_token_in_content"),
    (json_row(("user", "one " * 200), ("assistant", "two")), "truncated_before_supervision"),
    (json_row(("user", "one"), ("assistant", "two " * 200)), "too_long"),
    (b'{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}', None),
    (b'{"input_ids": [0, 479], "loss_mask": [0, 1]}', None),
    (b'{"input_ids": [5, 480], "loss_mask": [0, 1]}', "token_out_of_vocab"),
    (b'{"input_ids": [-1, 5], "loss_mask": [0, 1]}', "token_out_of_vocab"),
    (b'{"input_ids": [4294967296, 5], "loss_mask": [0, 1]}', "token_out_of_vocab"),
    (b'{"input_ids": [5, 6], "loss_mask": [0, 0]}', "no_supervised_tokens"),
    (b'{"input_ids": [], "loss_mask": []}', "no_supervised_tokens"),
    (json_row(("user", "the last"), ("assistant", "is kept")), None),
)


@pytest.fixture
def tokenizer(tmp_path: Path) -> ChatTokenizer:
    return chat_tokenizer(tmp_path / "model", stock(KIMI))


def deep_call(depth: int) -> bytes:
    """A call whose argument is nested so deep."""
    arguments = '{"a": ' * depth + "1" + "}" * depth
    call = f'{{"function": {{"name": "f", "arguments": {arguments}}}}}'
    return f'{{"messages": [{{"role": "user", "content": "a"}}, {{"role": "assistant", "tool_calls": [{call}]}}]}}'.encode()


def source_row(number: int, raw: bytes, duplicate_of: str | None = None) -> SourceRow:
    return SourceRow(number, raw, hashlib.sha256(raw).hexdigest(), duplicate_of)


def partition(tokenizer: ChatTokenizer, *raws: bytes, limits: PromptLimits = LIMITS, first: int = 0) -> PromptPartition:
    rows = [source_row(first + number, raw) for number, raw in enumerate(raws)]
    return make_partition("demo-00003", SOURCE, rows, tokenizer, limits)


def reasons(made: PromptPartition) -> list[str | None]:
    return [row.content.reason if isinstance(row.content, Dropped) else None for row in made.rows]


def same(one: PromptPartition, other: PromptPartition) -> bool:
    """Whether two partitions are equal, arrays included."""

    def plain(made: PromptPartition) -> object:
        contents = [
            row.content
            if isinstance(row.content, Dropped)
            else (row.content.row, row.content.input_ids.tolist(), row.content.loss_mask.tolist(), row.content.token_sha256)
            for row in made.rows
        ]
        return dataclasses.replace(made, rows=()), [dataclasses.replace(row, content=None) for row in made.rows], contents

    return plain(one) == plain(other)


# What becomes of a row


def test_every_row_is_a_prompt_or_has_a_reason(tokenizer: ChatTokenizer) -> None:
    made = partition(tokenizer, *(raw for raw, _ in ROWS))
    assert reasons(made) == [reason for _, reason in ROWS]
    assert len(made.prompts) + sum(made.dropped.values()) == len(ROWS)
    assert made.dropped["invalid_unicode"] == 2
    assert made.dropped["token_out_of_vocab"] == 3


def test_a_row_does_not_depend_on_its_neighbours(tokenizer: ChatTokenizer) -> None:
    together = partition(tokenizer, *(raw for raw, _ in ROWS))
    for number, (raw, _) in enumerate(ROWS):
        alone = partition(tokenizer, raw).rows[0].content
        beside = together.rows[number].content
        if isinstance(alone, Dropped):
            assert beside == alone
        else:
            assert isinstance(beside, Prompt)
            assert beside.token_sha256 == alone.token_sha256


def test_a_tokenizer_whose_template_gives_a_batch_encoding(tokenizer: ChatTokenizer) -> None:
    turns = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A question."}]
    theirs = tokenizer._tokenizer.apply_chat_template(turns, tokenize=True, return_dict=True)
    assert isinstance(theirs, BatchEncoding)
    (prompt,) = partition(tokenizer, json.dumps({"messages": turns}).encode()).prompts
    assert prompt.input_ids.tolist() == theirs["input_ids"]


def test_a_row_of_a_conversation(tokenizer: ChatTokenizer) -> None:
    (row,) = partition(tokenizer, GOOD, first=192).rows
    assert (row.sample_id, row.row, row.source_row) == ("demo-00003/0000", 0, 192)
    assert row.source_sha256 == hashlib.sha256(GOOD).hexdigest()
    prompt = row.content
    assert isinstance(prompt, Prompt)
    assert (prompt.input_ids.dtype, prompt.loss_mask.dtype) == (np.int32, np.bool_)
    assert tokenizer.decode(prompt.input_ids.tolist()) == (
        "<|im_user|>user<|im_middle|>What is 17 × 23?<|im_end|><|im_assistant|>assistant<|im_middle|>391.<|im_end|>"
    )
    assert tokenizer.decode(prompt.input_ids[prompt.loss_mask].tolist()) == "391.<|im_end|>"
    little_endian = b"".join(int(i).to_bytes(4, "little") for i in prompt.input_ids)
    assert prompt.token_sha256 == hashlib.sha256(little_endian).hexdigest()


def test_a_row_of_token_ids_is_taken_as_it_is(tokenizer: ChatTokenizer) -> None:
    (prompt,) = partition(tokenizer, b'{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}').prompts
    assert prompt.input_ids.tolist() == [5, 6, 7]
    assert prompt.loss_mask.tolist() == [False, True, True]


def test_the_length_that_is_allowed(tokenizer: ChatTokenizer) -> None:
    (prompt,) = partition(tokenizer, GOOD).prompts
    length = len(prompt.input_ids)
    assert reasons(partition(tokenizer, GOOD, limits=PromptLimits(length, 480))) == [None]
    made = partition(tokenizer, GOOD, limits=PromptLimits(length - 1, 480))
    assert made.rows[0].content == Dropped(
        "too_long", f"{length} tokens, at most {length - 1} (prompts.max_tokens, or what SGLang takes of the model's context)"
    )


def test_a_tokenizer_with_more_ids_than_the_model(tokenizer: ChatTokenizer) -> None:
    """Added tokens may lie behind the last row of the embedding; one such id kills a server."""
    (prompt,) = partition(tokenizer, GOOD).prompts
    largest = int(prompt.input_ids.max())
    made = partition(tokenizer, GOOD, limits=PromptLimits(200, largest))
    assert made.rows[0].content == Dropped("token_out_of_vocab", f"id {largest} with a vocabulary of {largest}")
    assert reasons(partition(tokenizer, GOOD, limits=PromptLimits(200, largest + 1))) == [None]


def test_a_duplicate_is_dropped_and_says_of_what(tokenizer: ChatTokenizer) -> None:
    rows = [source_row(0, GOOD), source_row(1, GOOD, "other:7"), source_row(2, b"{", "demo:1")]
    made = make_partition("demo-00000", SOURCE, rows, tokenizer, LIMITS)
    assert reasons(made) == [None, "duplicate", "duplicate"]
    assert made.rows[1].content == Dropped("duplicate", "the same bytes as other:7")


def test_a_lone_surrogate_drops_its_row_alone(tokenizer: ChatTokenizer) -> None:
    made = partition(tokenizer, GOOD, LONE_SURROGATE, json_row(("user", "one"), ("assistant", "two")))
    assert reasons(made) == [None, "invalid_unicode", None]


@pytest.mark.parametrize("depth", [10, 100, 300, 500, 700, 900, 950, 980, 5000])
def test_arguments_that_are_nested_deep_drop_their_row_alone(depth: int, tokenizer: ChatTokenizer) -> None:
    (first, reason, last) = reasons(partition(tokenizer, GOOD, deep_call(depth), GOOD))
    assert (first, last) == (None, None)
    assert reason in {"invalid_json", "not_rendered", "mask_unsure", "template_error"}


def test_rows_with_and_without_a_tools_column(tokenizer: ChatTokenizer) -> None:
    """1,000 rows of text, a third of which have a column more: none is lost."""
    raws = [json.dumps({"text": f"row {n}", **({"tools": None} if n % 3 else {})}).encode() for n in range(1000)]
    made = partition(tokenizer, *raws)
    assert [tokenizer.decode(prompt.input_ids.tolist()) for prompt in made.prompts] == [f"row {n}" for n in range(1000)]
    assert all(prompt.loss_mask.all() for prompt in made.prompts)
    assert [row.source_row for row in made.rows] == list(range(1000))


def test_one_row_with_half_a_character_in_a_batch(tokenizer: ChatTokenizer) -> None:
    raws = [json_row(("user", f"question {n}"), ("assistant", f"answer {n}")) for n in range(64)]
    raws[20] = LONE_SURROGATE
    made = partition(tokenizer, *raws)
    assert [row.source_row for row in made.rows if isinstance(row.content, Dropped)] == [20]
    assert made.dropped == {"invalid_unicode": 1}
    words = [tokenizer.decode(prompt.input_ids.tolist()) for prompt in made.prompts]
    assert all(f"question {n}<" in text for n, text in zip([*range(20), *range(21, 64)], words, strict=True))


def test_an_answer_that_is_cut_at_the_limit(tokenizer: ChatTokenizer) -> None:
    row = json_row(("user", "one"), ("assistant", "two three " * 20))
    (whole,) = partition(tokenizer, row).prompts
    limit = int(whole.loss_mask.argmax()) + 7
    cut = dataclasses.replace(LIMITS, max_tokens=limit, too_long="cut")
    (prompt,) = partition(tokenizer, row, limits=cut).prompts
    assert prompt.input_ids.tolist() == whole.input_ids[:limit].tolist()
    assert int(prompt.loss_mask.sum()) == 7
    assert prompt.token_sha256 == hashlib.sha256(whole.input_ids[:limit].tobytes()).hexdigest() != whole.token_sha256
    at_turn = dataclasses.replace(cut, too_long="cut_at_turn")
    assert reasons(partition(tokenizer, row, limits=at_turn)) == ["too_long"]


def test_a_conversation_that_is_cut_after_its_first_answer(tokenizer: ChatTokenizer) -> None:
    row = json_row(("user", "one"), ("assistant", "two"), ("user", "three " * 30), ("assistant", "four"))
    first = json_row(("user", "one"), ("assistant", "two"))
    limits = dataclasses.replace(LIMITS, max_tokens=60, too_long="cut_at_turn")
    (cut,), (alone,) = partition(tokenizer, row, limits=limits).prompts, partition(tokenizer, first).prompts
    assert cut.input_ids.tolist() == alone.input_ids.tolist()
    assert cut.loss_mask.tolist() == alone.loss_mask.tolist()


@pytest.mark.parametrize(
    ("supervise", "words"),
    [
        (Supervise.ALL, "two<|im_end|>four<|im_end|>"),
        (Supervise.LAST, "four<|im_end|>"),
    ],
)
def test_what_is_supervised(supervise: Supervise, words: str, tokenizer: ChatTokenizer) -> None:
    row = json_row(("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four"))
    (prompt,) = partition(tokenizer, row, limits=dataclasses.replace(LIMITS, supervise=supervise)).prompts
    assert tokenizer.decode(prompt.input_ids[prompt.loss_mask].tolist()) == words


def test_everything_is_supervised(tokenizer: ChatTokenizer) -> None:
    limits = dataclasses.replace(LIMITS, supervise=Supervise.EVERYTHING)
    (prompt,) = partition(tokenizer, GOOD, limits=limits).prompts
    assert prompt.loss_mask.all()
    (ids,) = partition(tokenizer, b'{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}', limits=limits).prompts
    assert ids.loss_mask.tolist() == [False, True, True]


def test_a_turn_that_is_not_trained_on(tokenizer: ChatTokenizer) -> None:
    turns = [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")]
    messages = [{"role": role, "content": text, "weight": int(text == "four")} for role, text in turns]
    (prompt,) = partition(tokenizer, json.dumps({"messages": messages}).encode()).prompts
    assert tokenizer.decode(prompt.input_ids[prompt.loss_mask].tolist()) == "four<|im_end|>"


def test_roles_out_of_order(tokenizer: ChatTokenizer) -> None:
    row = json_row(("user", "one"), ("user", "two"), ("assistant", "three"))
    assert reasons(partition(tokenizer, row)) == [None]
    assert reasons(partition(tokenizer, row, limits=dataclasses.replace(LIMITS, role_order="strict"))) == ["role_order"]


def test_a_format_that_is_set(tokenizer: ChatTokenizer) -> None:
    row = source_row(0, b'{"prompt": "one", "completion": "two", "text": "three"}')
    made = [
        make_partition("demo-00000", dataclasses.replace(SOURCE, format=name), [row], tokenizer, LIMITS) for name in ("", "text")
    ]
    assert [one.formats for one in made] == [{"question_answer": 1}, {"text": 1}]
    assert [tokenizer.decode(one.prompts[0].input_ids.tolist())[-10:] for one in made] == ["two<|im_end|>"[-10:], "three"]
    assert made[0].version != made[1].version


def several(conversation: Conversation, tokenizer: ChatTokenizer, supervise: Supervise) -> tuple[Rendered, ...]:
    """What a template that rewrites history gives: a row for each answer."""
    made = []
    for number, message in enumerate(conversation.messages):
        if message.role == "assistant":
            before = "".join(turn.content + "<|im_end|>" for turn in conversation.messages[:number])
            made.append(Rendered(before + message.content, ((len(before), len(before) + len(message.content)),), number))
    return tuple(made)


def test_a_row_that_gives_several(tokenizer: ChatTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are numbered through, each says its turn, and each is accounted for; also those of them that are dropped."""
    monkeypatch.setattr("hs_assets.samples.prepare.render_conversation", several)
    three = json_row(
        ("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four " * 300), ("assistant", "five")
    )
    made = partition(tokenizer, GOOD, three, b"{", GOOD[:-1] + b" }", first=64)
    assert [row.row for row in made.rows] == list(range(6))
    assert [row.sample_id for row in made.rows] == [f"demo-00003/{number:04d}" for number in range(6)]
    assert [row.source_row for row in made.rows] == [64, 65, 65, 65, 66, 67]
    assert [row.turn for row in made.rows] == [1, 1, 3, 4, None, 1]
    assert reasons(made) == [None, None, "too_long", "truncated_before_supervision", "invalid_json", None]
    assert [prompt.row for prompt in made.prompts] == [0, 1, 5]
    assert (made.source_rows, made.formats) == (4, {"messages": 3, "unknown": 1})
    assert tokenizer.decode(made.prompts[1].input_ids.tolist()) == "one<|im_end|>two"
    write_partition(made, tmp_path)
    assert same(read_partition_table(tmp_path, made.key), made)
    assert pq.read_table(table_path(tmp_path, made.key))["turn"].to_pylist() == [1, 1, 3, 4, None, 1]


def test_template_and_tokenizer_both_write_bos(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, stock(LLAMA3), adds_bos())
    (prompt,) = partition(tokenizer, GOOD).prompts
    assert prompt.input_ids[0] == SPECIAL_TOKENS.index("<s>")
    assert (prompt.input_ids == SPECIAL_TOKENS.index("<s>")).sum() == 1


def test_no_assistant_words_under_the_marks(tmp_path: Path) -> None:
    """A template that marks nothing in this row: dropped, not stored as all 0."""
    template = stock(KIMI) + "{% if messages | length > 5 %}{% generation %}{{ 'x' }}{% endgeneration %}{% endif %}"
    assert reasons(partition(chat_tokenizer(tmp_path, template), GOOD)) == ["mask_unsure"]


def test_both_paths_make_the_same_prompts(tokenizer: ChatTokenizer) -> None:
    raws = [raw for raw, _ in ROWS]
    assert same(partition(tokenizer, *raws), partition(without_offsets(tokenizer), *raws))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=30) | st.sampled_from([raw for raw, _ in ROWS if len(raw) < 1000]), max_size=6))
def test_any_rows_are_accounted_for(tokenizer: ChatTokenizer, tmp_path: Path, raws: list[bytes]) -> None:
    made = partition(tokenizer, *raws)
    assert len(made.rows) == len(raws) == len(made.prompts) + sum(made.dropped.values())
    write_partition(made, tmp_path / "prompts")
    assert same(read_partition_table(tmp_path / "prompts", made.key), made)


# From a file


def test_from_a_file_to_prompts(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    """CRLF, a mark at the beginning, U+2028 inside a row, a duplicate, an empty line, NUL, and no newline at the end."""
    odd = '{"messages": [{"role": "user", "content": "a\u2028b"}, {"role": "assistant", "content": "c"}]}'.encode()
    source = Source("odd", tmp_path / "odd.jsonl")
    source.path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join([GOOD, odd, GOOD, b"", b"\0", odd + b" "]))
    refresh(tmp_path / "index", [source], Partitioning(64, 1_000_000))
    rows = read_partition(tmp_path / "index", source, "odd-00000")
    made = make_partition("odd-00000", source, rows, tokenizer, LIMITS)
    assert reasons(made) == [None, None, "duplicate", "empty_row", "invalid_json", None]
    assert "a\u2028b" in tokenizer.decode(made.prompts[1].input_ids.tolist())


# The version


@pytest.mark.parametrize(
    "change",
    [
        lambda rows, limits: (rows[:-1], limits),
        lambda rows, limits: (rows[::-1], limits),
        lambda rows, limits: ([*rows[:-1], source_row(2, b"{}")], limits),
        lambda rows, limits: ([*rows[:-1], dataclasses.replace(rows[-1], duplicate_of="demo:0")], limits),
        lambda rows, limits: (rows, dataclasses.replace(limits, max_tokens=199)),
        lambda rows, limits: (rows, dataclasses.replace(limits, max_tokens=400)),
        lambda rows, limits: (rows, dataclasses.replace(limits, vocab_size=479)),
        lambda rows, limits: (rows, dataclasses.replace(limits, too_long="cut")),
        lambda rows, limits: (rows, dataclasses.replace(limits, min_supervised_tokens=2)),
        lambda rows, limits: (rows, dataclasses.replace(limits, role_order="strict")),
        lambda rows, limits: (rows, dataclasses.replace(limits, supervise=Supervise.LAST)),
    ],
    ids=range(11),
)
def test_the_version_changes_with_what_prompts_are_made_of(
    change: Callable[[list[SourceRow], PromptLimits], tuple[list[SourceRow], PromptLimits]], tokenizer: ChatTokenizer
) -> None:
    rows = [source_row(number, raw) for number, (raw, _) in enumerate(ROWS[:3])]
    before = make_partition("demo-00000", SOURCE, rows, tokenizer, LIMITS)
    assert make_partition("demo-00000", SOURCE, rows, tokenizer, LIMITS).version == before.version
    changed, limits = change(rows, LIMITS)
    assert make_partition("demo-00000", SOURCE, changed, tokenizer, limits).version != before.version


def test_the_version_changes_with_template_and_tokenizer(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    other_template = chat_tokenizer(tmp_path / "template", stock(CHATML))
    other_tokenizer = chat_tokenizer(tmp_path / "tokenizer", stock(KIMI), adds_bos())
    made = [partition(one, GOOD) for one in (tokenizer, other_template, other_tokenizer)]
    assert len({one.version for one in made}) == 3
    assert made[1].template_sha256 != made[0].template_sha256
    assert made[2].tokenizer_sha256 != made[0].tokenizer_sha256


def test_the_version_does_not_change_with_the_place_of_the_source(tokenizer: ChatTokenizer) -> None:
    rows = [source_row(0, GOOD)]
    moved = make_partition("demo-00000", dataclasses.replace(SOURCE, path=Path("/elsewhere")), rows, tokenizer, LIMITS)
    assert moved.version == make_partition("demo-00000", SOURCE, rows, tokenizer, LIMITS).version


def test_one_version_is_one_set_of_prompts(tmp_path: Path) -> None:
    """A template that writes the time into the text: the same version must not stand for other ids a moment later."""
    clock = "{{ '<|im_system|>' + strftime_now('%M:%S.%f') + '<|im_end|>' }}"
    tokenizer = chat_tokenizer(tmp_path, clock + marked(KIMI))
    one, other = partition(tokenizer, GOOD), partition(tokenizer, GOOD)
    assert one.version != other.version or same(one, other)


# The table on disk


def test_a_table_reads_back_the_same(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    made = partition(tokenizer, *(raw for raw, _ in ROWS), first=192)
    path = write_partition(made, tmp_path / "prompts")
    assert path == table_path(tmp_path / "prompts", "demo-00003") == tmp_path / "prompts" / "demo-00003.parquet"
    read = read_partition_table(tmp_path / "prompts", "demo-00003")
    assert same(read, made)
    assert [(prompt.input_ids.dtype, prompt.loss_mask.dtype) for prompt in read.prompts] == [(np.int32, np.bool_)] * 4
    assert read.dropped == made.dropped


def test_an_empty_partition_reads_back(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    made = partition(tokenizer)
    write_partition(made, tmp_path)
    assert same(read_partition_table(tmp_path, made.key), made)


def test_the_table_can_be_read_without_this_package(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    table = pq.read_table(write_partition(partition(tokenizer, GOOD, b"{"), tmp_path))
    kept, dropped = table.to_pylist()
    assert len(kept["input_ids"]) == len(kept["loss_mask"])
    assert (kept["dropped"], dropped["dropped"], dropped["input_ids"]) == (None, "invalid_json", None)
    assert [kept["sample_id"], dropped["sample_id"]] == ["demo-00003/0000", "demo-00003/0001"]
    metadata = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    assert metadata["source_path"] == "/data/demo.jsonl"
    assert "no shift" in metadata["coordinates"]


def test_a_table_replaces_the_last_one_and_leaves_nothing_else(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    write_partition(partition(tokenizer, GOOD, b"{"), tmp_path / "prompts")
    second = partition(tokenizer, GOOD)
    write_partition(second, tmp_path / "prompts")
    assert same(read_partition_table(tmp_path / "prompts", "demo-00003"), second)
    assert [path.name for path in (tmp_path / "prompts").iterdir()] == ["demo-00003.parquet"]


def test_prompts_that_were_not_made(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="were not made yet") as error:
        read_partition_table(tmp_path, "demo-00003")
    assert error.value.where == "demo-00003"
    assert error.value.remedy == "materialise prompts first"


@pytest.mark.parametrize("content", ["\ud7ff", "a" * 10_000, "\0", "'\n\""])
def test_details_of_dropped_rows_can_be_written(content: str, tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    rows = [json.dumps({content: 1}).encode(), json.dumps({"messages": [{"role": content, "content": content}]}).encode()]
    made = partition(tokenizer, *rows)
    assert reasons(made) == ["unknown_format", "unknown_role"]
    write_partition(made, tmp_path)
    assert same(read_partition_table(tmp_path, made.key), made)


def test_a_template_that_quotes_the_row_in_its_error(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path / "model", "{{ raise_exception('bad: ' + messages[0].content) }}")
    made = partition(tokenizer, json_row(("user", "\0 😀 \u2028"), ("assistant", "two")))
    assert reasons(made) == ["template_error"]
    write_partition(made, tmp_path)
    assert same(read_partition_table(tmp_path, made.key), made)


REASONED = b"""{"messages": [{"role": "user", "content": "one"},
    {"role": "assistant", "content": "two", "reasoning_content": "three"}]}""".replace(b"\n", b"")


@pytest.mark.parametrize("template", [CHATML, LLAMA3])
def test_reasoning_that_the_template_does_not_know(template: str, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path / "model", stock(template))
    silent = json_row(("user", "one"), ("assistant", "two"))
    (dropped,) = partition(tokenizer, REASONED).rows
    assert isinstance(dropped.content, Dropped)
    assert dropped.content == Dropped("not_rendered", "the template leaves out the reasoning of turn 1 (assistant)")
    left_out = dataclasses.replace(LIMITS, unrendered_reasoning="leave_out")
    made = partition(tokenizer, REASONED, silent, limits=left_out)
    with_it, without = made.rows
    assert isinstance(with_it.content, Prompt)
    assert isinstance(without.content, Prompt)
    assert with_it.content.token_sha256 == without.content.token_sha256
    assert with_it.content.loss_mask.tolist() == without.content.loss_mask.tolist()
    assert (with_it.unread, without.unread) == (("reasoning",), ())
    write_partition(made, tmp_path)
    assert same(read_partition_table(tmp_path, made.key), made)


def test_a_table_that_is_damaged(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    path = write_partition(partition(tokenizer, GOOD, LONE_SURROGATE, first=9), tmp_path)
    whole = path.read_bytes()
    for size in (0, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        for read in (read_partition_table, find_counts):
            with pytest.raises(PromptError, match="a table of prompts cannot be read") as error:
                read(tmp_path, "demo-00003")
            assert (error.value.where, error.value.remedy) == (path, "materialise prompts of this partition again")
