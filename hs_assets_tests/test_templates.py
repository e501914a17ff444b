"""Masks under the chat templates of real models: what is supervised is what the assistant wrote, and the stop after it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
from collections import Counter
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import _compile_jinja_template

from hs_assets.samples.conversations import Conversation, Dropped, Tokenized
from hs_assets.samples.masks import Rendered, render_conversation, render_without_reasoning, tokenize
from hs_assets.samples.template import RENDER_DATE, TemplateRefusalError
from hs_assets_tests.small_tokenizer import without_offsets
from hs_assets_tests.template_material import CASES, chat_tokenizer_of, hugging_face_tokenizer, needs_data, template_names

# Of each family, what ends a turn and what ends one that calls a tool, as their model cards and generation configs say.
STOPS = {
    "DeepSeek|deepseek": "<｜end▁of▁sentence｜>",
    "gemma-4|diffusion_gemma": ("<turn|>", "<|tool_response>"),
    "gemma": "<end_of_turn>",
    "Qwen|qwen|QwQ|nemotron|Nemotron|lfm2|LFM2|SmolLM3|Kimi|MiMo|Hermes|StepFun|Step-3.5|Bielik": "<|im_end|>",
    "llama3|Llama-3|functionary": ("<|eot_id|>", "<|eom_id|>"),
    "GLM|glm": ("<|user|>", "<|observation|>"),
    "istral|Devstral|llava": "</s>",
    "gpt-oss|gptoss": ("<|end|>", "<|return|>", "<|call|>"),
    "phi3|Phi-3": "<|end|>",
    "cohere|Cohere|command-r": "<|END_OF_TURN_TOKEN|>",
    "granite": "<|end_of_text|>",
    "Seed-OSS": "<seed:eos>",
    "Apertus": "<|assistant_end|>",
    "Apriel-1.5": ("<|end|>", "</s>"),
    "GigaChat": "<|message_sep|>",
    "Reka": "<sep>",
    "idefics3": "<end_of_utterance>",
}
HEADROOM = {"mask_unsure": 26, "not_rendered": 236, "template_error": 82}
"""At most so many of the pairs of a template and a case may be dropped: fewer is better."""

pytestmark = needs_data
NAMES = template_names()


@functools.cache
def rows_of(name: str, case: str) -> tuple[Rendered, ...] | Dropped:
    return render_conversation(CASES[case].conversation, chat_tokenizer_of(name))


def stops_of(name: str) -> tuple[str, ...]:
    stops = next(stops for family, stops in STOPS.items() if re.search(family, name))
    return (stops,) if isinstance(stops, str) else stops


def openai(conversation: Conversation, parts: bool) -> list[dict[str, Any]]:
    """The messages as OpenAI's interface has them, made here anew."""
    chat = []
    for message in conversation.messages:
        content = [{"type": "text", "text": message.content}] if parts else message.content
        turn: dict[str, Any] = {"role": message.role, "content": content}
        if message.reasoning:
            turn |= {"reasoning_content": message.reasoning, "thinking": message.reasoning}
        if message.tool_calls:
            functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in message.tool_calls]
            calls = zip(message.tool_calls, functions, strict=True)
            turn["tool_calls"] = [{"type": "function", "id": call.id, "function": function} for call, function in calls]
        if message.role == "tool":
            turn |= {"name": message.name, "tool_call_id": message.tool_call_id}
        chat.append(turn)
    return chat


def hugging_face(name: str, conversation: Conversation, **options: Any) -> Any:
    """transformers' own rendering; TemplateError and such where the template refuses."""
    tools = [dict(tool) for tool in conversation.tools] or None
    tokenizer = hugging_face_tokenizer(name)
    _compile_jinja_template(tokenizer.chat_template).globals["strftime_now"] = RENDER_DATE.strftime  # else it is today
    chat = openai(conversation, parts=re.search("idefics|llava", name) is not None)
    return tokenizer.apply_chat_template(chat, tools=tools, **options)


def hugging_face_prompt(name: str, conversation: Conversation) -> str:
    try:
        return str(hugging_face(name, conversation, tokenize=False, add_generation_prompt=True))
    except (TemplateError, TypeError):
        return ""


def beginning(case: str, row: Rendered) -> Conversation:
    """The part of the conversation that a row holds."""
    conversation = CASES[case].conversation
    return conversation if row.turn is None else Conversation(conversation.messages[: row.turn + 1], conversation.tools)


def supervised_text(name: str, row: Rendered) -> tuple[list[str], str]:
    """What the supervised tokens of a row decode to, a run of them at a time; and what the others do."""
    tokenizer = chat_tokenizer_of(name)
    (made,) = tokenize([row], tokenizer)
    assert isinstance(made, Tokenized), made
    assert tokenizer.decode(made.input_ids) == row.text
    flagged = itertools.groupby(zip(made.loss_mask, made.input_ids, strict=True), key=lambda pair: pair[0])
    runs = [(flag, tokenizer.decode([token for _, token in run])) for flag, run in flagged]
    return [text for flag, text in runs if flag], "\0".join(text for flag, text in runs if not flag)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_exactly_the_words_of_the_assistant_and_the_stop(name: str, case: str) -> None:
    """Words are unique to their message, so a word that is missing, or one too many, shows."""
    rows = rows_of(name, case)
    if isinstance(rows, Dropped):
        assert rows.reason in HEADROOM
        assert rows.detail
        return
    case_, marked = CASES[case], "_training" in name or name.endswith("lfm2_2_5")
    assert [row.turn for row in rows] in ([None], list(case_.words))
    for row in rows:
        runs, others = supervised_text(name, row)
        turns = list(case_.words) if row.turn is None else [row.turn]
        position, text = 0, "".join(runs)
        for turn in turns:
            starts = [text.find(part, position) for part in case_.words[turn]]
            assert -1 not in starts
            assert not any(part in others for part in case_.words[turn])
            position = max(starts)
        for turn, message in enumerate(case_.conversation.messages):
            if turn not in turns:
                assert not any(foreign and foreign in text for foreign in (message.content, message.reasoning))
        if not marked:  # there the marks decide, of white space and empty thinking too
            assert all(run.endswith(stops_of(name)) for run in runs)
            assert "<think></think>" not in re.sub(r"\s", "", text)


_TAGS = r"(?:</?(?:seed:)?think(?:ing)?>|\[/?THINK\]|<\|(?:START|END)_THINKING\|>|<\|channel>thought|<channel\|>)*"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [name for name in NAMES if "_training" not in name and "lfm2_2_5" not in name])
def test_a_turn_is_what_stands_between_its_prompt_and_the_next_turn(name: str, case: str) -> None:
    """By transformers' own rendering of the prompt, for the last turn of each row."""
    rows = rows_of(name, case)
    for row in () if isinstance(rows, Dropped) else rows:
        turn = max(CASES[case].words) if row.turn is None else row.turn
        before = Conversation(CASES[case].conversation.messages[:turn], CASES[case].conversation.tools)
        tokenizer = chat_tokenizer_of(name)
        prompts = [hugging_face_prompt(name, before)]
        for form in tokenizer.template.forms(CASES[case].conversation):  # where it wants another form than OpenAI's
            with contextlib.suppress(TemplateRefusalError):
                prompts.append(tokenizer.template.render(before, form, prompt=True))
        start, end = row.spans[-1]
        opened = [re.sub(_TAGS + r"\Z", "", "".join(prompt.split())) for prompt in prompts]
        begun = "".join(row.text[:start].split())
        if name == "trl/diffusion_gemma":  # after the answer of a tool its prompt lacks what it renders
            begun = begun.removesuffix("<|turn>model")
            opened += [prompt.removesuffix("<|turn>model") for prompt in opened]
        assert any(re.fullmatch(re.escape(prompt) + _TAGS, begun) for prompt in opened if prompt)
        after = tokenizer.special_pattern.findall(row.text[end:])
        assert not after or (re.search("phi3|Phi-3|Apriel", name) and after == ["</s>"])  # the end of the text, after the stop


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [name for name in NAMES if "_training" in name or "lfm2_2_5" in name])
def test_marks_give_the_mask_of_hugging_face(name: str, case: str) -> None:
    rows = rows_of(name, case)
    for row in () if isinstance(rows, Dropped) else rows:
        conversation = beginning(case, row)
        encoded = hugging_face(name, conversation, return_assistant_tokens_mask=True, return_dict=True)
        assert hugging_face(name, conversation, tokenize=False) == row.text
        (made,) = tokenize([row], chat_tokenizer_of(name))
        assert isinstance(made, Tokenized)
        assert list(made.input_ids) == list(encoded["input_ids"])
        assert list(made.loss_mask) == last_turn(encoded["assistant_masks"], row, made)


def last_turn(mask: list[int], row: Rendered, made: Tokenized) -> list[bool]:
    """Hugging Face's mask, of which a row of one turn has the last run, or the last runs where they are of one turn."""
    first = 0 if row.turn is None else made.loss_mask.index(True)
    while first and mask[first - 1] and mask[first]:
        first -= 1
    return [bool(flag) and index >= first for index, flag in enumerate(mask)]


# What trl's marks hold beside the words and the stop: white space and an end of text that come after it, and what the
# generation prompt or an empty thinking gives.
_BESIDE = re.compile(r"\s*(</s>)?|\s*<think>\s*(</think>\s*)?|<｜Assistant｜>|<\|start\|>(assistant)?")


@pytest.mark.parametrize("name", [name for name in NAMES if "_training" in name])
def test_without_marks_the_mask_is_that_of_the_marked_template(name: str) -> None:
    """Wherever the two templates render the same text."""
    compared = 0
    for case in CASES:
        rows = rows_of(name.removesuffix("_training"), case)
        for row in () if isinstance(rows, Dropped) else rows:
            conversation = beginning(case, row)
            try:
                encoded = hugging_face(name, conversation, return_assistant_tokens_mask=True, return_dict=True)
                text = hugging_face(name, conversation, tokenize=False)
            except (TemplateError, TypeError):
                continue
            if text != row.text:
                continue
            compared += 1
            (made,) = tokenize([row], chat_tokenizer_of(name.removesuffix("_training")))
            assert isinstance(made, Tokenized)
            theirs, decode = last_turn(encoded["assistant_masks"], row, made), chat_tokenizer_of(name).decode
            compared_masks = zip(made.input_ids, made.loss_mask, theirs, strict=True)
            runs = itertools.groupby(compared_masks, key=lambda token: (token[1], token[2]))
            different = [(ours, decode([i for i, _, _ in run])) for (ours, theirs_), run in runs if ours != theirs_]
            # Gemma's stop of a call is beside trl's marks.
            assert all(text == "<|tool_response>" if ours else _BESIDE.fullmatch(text) for ours, text in different)
    print(f"{name}: {compared} rows compared")


def test_the_share_that_is_dropped() -> None:
    """The measure of this module; `pytest -s` shows the table."""
    reasons: Counter[str] = Counter()
    details: dict[tuple[str, str], list[str]] = {}
    for name in NAMES:
        for case in CASES:
            rows = rows_of(name, case)
            reasons[rows.reason if isinstance(rows, Dropped) else "kept"] += 1
            if isinstance(rows, Dropped):
                details.setdefault((rows.reason, re.sub(r"turn \d", "a turn", rows.detail)), []).append(f"{name}: {case}")
    for (reason, detail), pairs in sorted(details.items(), key=lambda item: -len(item[1])):
        print(f"{len(pairs):4} {reason}: {detail}  ({pairs[0]}{', …' if len(pairs) > 1 else ''})")
    print(dict(reasons), f"of {len(NAMES) * len(CASES)}")
    assert all(reasons[reason] <= most for reason, most in HEADROOM.items())
    assert set(reasons) <= {"kept", *HEADROOM}


def test_reasoning_is_left_out_exactly_where_the_template_never_shows_it() -> None:
    """By transformers' own rendering: with the reasoning and without it, up to every turn."""
    outcomes: Counter[str] = Counter()
    for name, case in itertools.product(NAMES, CASES):
        conversation, dropped = CASES[case].conversation, rows_of(name, case)
        if not isinstance(dropped, Dropped) or dropped.reason != "not_rendered":
            continue
        silent = Conversation(tuple(dataclasses.replace(m, reasoning=None) for m in conversation.messages), conversation.tools)
        rows = render_without_reasoning(conversation, chat_tokenizer_of(name))
        if rows is None:
            outcomes["stays dropped"] += 1
            continue
        assert silent != conversation
        assert rows_same(rows, render_conversation(silent, chat_tokenizer_of(name)))
        outcomes["still lacks something" if isinstance(rows, Dropped) else "kept"] += 1
        for turn in range(len(conversation.messages)):
            with contextlib.suppress(TemplateError, TypeError):
                beginnings = [Conversation(each.messages[: turn + 1], each.tools) for each in (conversation, silent)]
                with_it, without = (hugging_face(name, each, tokenize=False) for each in beginnings)
                assert with_it == without
    print(dict(outcomes))
    assert outcomes["kept"] > 0


def rows_same(rows: tuple[Rendered, ...] | Dropped, silent: tuple[Rendered, ...] | Dropped) -> bool:
    if isinstance(rows, Dropped) or isinstance(silent, Dropped):
        return rows == silent
    assert all(row.left_out == ("reasoning",) for row in rows)
    return tuple(dataclasses.replace(row, left_out=()) for row in rows) == silent


def test_a_tokenizer_without_offsets_gives_the_same_or_drops() -> None:
    outcomes: Counter[str] = Counter()
    for name in NAMES:
        tokenizer = chat_tokenizer_of(name)
        for case in ("three turns", "reasoning and tools"):
            rows = rows_of(name, case)
            for row in () if isinstance(rows, Dropped) else rows:
                (made,), (other,) = tokenize([row], tokenizer), tokenize([row], without_offsets(tokenizer))
                if isinstance(other, Dropped):
                    assert other.reason == "mask_unsure"
                    outcomes["dropped"] += 1
                else:
                    assert other == made
                    outcomes["same"] += 1
    print(dict(outcomes))
    assert outcomes["dropped"] * 20 <= outcomes["same"]
