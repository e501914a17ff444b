"""A conversation answered by a model: what it is asked with is what Hugging Face renders, and its answers come back whole."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from hs_assets.samples.answers import (
    AS_GENERATED,
    RETOKENISED,
    THINKING_REMOVED,
    Answered,
    AnswerRules,
    Generation,
    answer,
    split_thinking,
)
from hs_assets.samples.conversations import Conversation, Dropped, Message, ToolCall
from hs_assets.samples.model import stop_token_ids
from hs_assets.samples.template import Form
from hs_assets.samples.tokenizer import ChatTokenizer
from hs_assets_tests.small_tokenizer import (
    CHATML,
    LLAMA3,
    MISTRAL,
    RAISES,
    SPECIAL_TOKENS,
    STRIPS_HISTORY,
    chat_tokenizer,
    make_tokenizer,
    stock,
)

END = SPECIAL_TOKENS.index("<|im_end|>")
RULES = AnswerRules(max_tokens=50, context_length=400, vocab_size=482, stop_token_ids=(END,), keep_thinking=True, cut="drop")
OPENS_THINKING = stock(CHATML).replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
TWO_TURNS = Conversation(
    (
        Message("system", "Be brief."),
        Message("user", "one?"),
        Message("assistant", "THE SOURCE'S ANSWER", reasoning="THE SOURCE'S REASONING"),
        Message("user", "two?"),
        Message("assistant", "THE SOURCE'S OTHER ANSWER", trained=False),
        Message("user", "three?"),
    )
)
QUESTION = Conversation((Message("user", "one?"),))


class Model:
    """Says what it is told to say, turn by turn; remembers what it was asked."""

    def __init__(self, tokenizer: ChatTokenizer, *texts: str | list[int], stop: int | None = END) -> None:
        self.asked: list[tuple[int, list[int]]] = []
        self._stop = [] if stop is None else [stop]
        self._finish = "length" if stop is None else "stop"
        self._texts = iter([tokenizer.encode(text) if isinstance(text, str) else text for text in texts])

    def __call__(self, turn: int, prompt_ids: list[int]) -> Generation:
        self.asked.append((turn, prompt_ids))
        return Generation((*next(self._texts), *self._stop), self._finish, "server-1")  # type: ignore[arg-type]


@pytest.fixture
def tokenizer(tmp_path: Path) -> ChatTokenizer:
    return chat_tokenizer(tmp_path, stock(CHATML))


def hf_prompt(template: str, *turns: tuple[str, str]) -> list[int]:
    """The ids that Hugging Face gives a model which is to answer."""
    chat = [{"role": role, "content": content} for role, content in turns]
    return list(make_tokenizer(template).apply_chat_template(chat, add_generation_prompt=True)["input_ids"])


def answered(got: Answered | Dropped) -> Answered:
    assert isinstance(got, Answered), got
    return got


def contents(got: Answered, role: str = "assistant") -> list[str]:
    return [message.content for message in got.conversation.messages if message.role == role]


def one(
    tokenizer: ChatTokenizer, text: str | list[int], rules: AnswerRules = RULES, stop: int | None = END
) -> Answered | Dropped:
    return answer(QUESTION, tokenizer, rules, Model(tokenizer, text, stop=stop))


@pytest.mark.parametrize("template", [CHATML, LLAMA3, MISTRAL])
def test_each_turn_is_asked_after_the_models_own_answers(template: str, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, stock(template))
    model = Model(tokenizer, "first own", "second own", "third own")
    got = answered(answer(TWO_TURNS, tokenizer, RULES, model))
    turns = [("system", "Be brief."), ("user", "one?"), ("assistant", "first own"), ("user", "two?")]
    turns += [("assistant", "second own"), ("user", "three?")]
    assert model.asked == [(n, hf_prompt(stock(template), *turns[:n])) for n in (2, 4)] + [
        (6, hf_prompt(stock(template), *turns))
    ]
    assert contents(got) == ["first own", "second own", "third own"]
    assert {message.reasoning for message in got.conversation.messages} == {None}
    assert contents(got, "user") == ["one?", "two?", "three?"]
    assert [message.trained for message in got.conversation.messages if message.role == "assistant"] == [True, False, True]
    assert [(turn.turn, turn.prompt_tokens) for turn in got.turns] == [(turn, len(ids)) for turn, ids in model.asked]


def test_a_template_that_strips_history_is_asked_with_it_stripped(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, stock(STRIPS_HISTORY))
    model = Model(tokenizer, "<think>\nhm\n</think>\n\nfirst", "second", "third")
    answered(answer(TWO_TURNS, tokenizer, RULES, model))
    assert "hm" not in tokenizer.decode(model.asked[1][1])
    assert "first" in tokenizer.decode(model.asked[1][1])


def test_what_renders_to_the_same_tokens_is_told_from_what_does_not(tokenizer: ChatTokenizer) -> None:
    same = answered(one(tokenizer, "The next layer reads it."))
    assert [turn.rendering for turn in same.turns] == [AS_GENERATED]
    letters = [i for letter in "reads it" for i in tokenizer.encode(letter)]
    assert letters != tokenizer.encode("reads it")
    other = answered(one(tokenizer, letters))
    assert ([turn.rendering for turn in other.turns], contents(other)) == ([RETOKENISED], ["reads it"])


def test_another_end_than_the_templates_is_not_the_same_tokens(tokenizer: ChatTokenizer) -> None:
    eos = SPECIAL_TOKENS.index("</s>")
    got = answered(one(tokenizer, "an answer", dataclasses.replace(RULES, stop_token_ids=(eos, END)), stop=eos))
    assert ([turn.rendering for turn in got.turns], contents(got)) == ([RETOKENISED], ["an answer"])


def test_an_answer_without_an_end(tokenizer: ChatTokenizer) -> None:
    got = one(tokenizer, "it goes on and", stop=None)
    assert isinstance(got, Dropped)
    assert (got.reason, got.detail.split(":")[0]) == ("response_cut", "turn 1")
    kept = answered(one(tokenizer, "it goes on and", dataclasses.replace(RULES, cut="keep"), stop=None))
    assert (contents(kept), kept.turns[0].finish, kept.turns[0].rendering) == (["it goes on and"], "length", AS_GENERATED)


@pytest.mark.parametrize("text", ["", "\n ", "<think>\nhm\n</think>\n", "<think>\nhm"])
def test_an_answer_that_says_nothing(text: str, tokenizer: ChatTokenizer) -> None:
    got = one(tokenizer, text)
    assert isinstance(got, Dropped)
    assert got.reason == "response_empty"


def test_thinking_that_the_model_opens_stays_as_generated(tokenizer: ChatTokenizer) -> None:
    got = answered(one(tokenizer, "<think>\nhm\n</think>\n\n391."))
    assert [turn.rendering for turn in got.turns] == [AS_GENERATED]
    rendered = tokenizer.template.render(got.conversation, Form())
    assert rendered.endswith("<|im_start|>assistant\n<think>\nhm\n</think>\n\n391.<|im_end|>\n")


def test_thinking_that_the_prompt_opens_stays_as_generated(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, OPENS_THINKING)
    model = Model(tokenizer, "hm\n</think>\n\n391.")
    got = answered(answer(QUESTION, tokenizer, RULES, model))
    assert tokenizer.decode(model.asked[0][1]).endswith("assistant\n<think>\n")
    assert got.turns[0].rendering == AS_GENERATED
    assert tokenizer.template.render(got.conversation, Form()).endswith("assistant\n<think>\nhm\n</think>\n\n391.<|im_end|>\n")


def test_a_template_that_shows_no_thinking_is_said_to_remove_it(tmp_path: Path) -> None:
    template = stock(CHATML).replace("{{ m.content +", "{{ m.content.split('</think>')[-1] | trim +")
    got = answered(one(chat_tokenizer(tmp_path, template), "<think>\nhm\n</think>\n\n391."))
    assert (contents(got), got.turns[0].rendering) == (["391."], THINKING_REMOVED)


@pytest.mark.parametrize("opened", [True, False])
def test_thinking_can_be_taken_off(opened: bool, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, OPENS_THINKING if opened else stock(CHATML))
    text = "hm\n</think>\n\n391." if opened else "<think>\nhm\n</think>\n\n391."
    got = answered(one(tokenizer, text, dataclasses.replace(RULES, keep_thinking=False)))
    assert (contents(got), got.turns[0].rendering) == (["391."], THINKING_REMOVED)
    assert got.conversation.messages[-1].reasoning is None
    plain = answered(one(chat_tokenizer(tmp_path / "b", stock(CHATML)), "391.", dataclasses.replace(RULES, keep_thinking=False)))
    assert plain.turns[0].rendering == AS_GENERATED


@pytest.mark.parametrize(
    ("text", "opened", "parts"),
    [
        ("391.", False, (None, "391.")),
        ("so</think>391.", False, (None, "so</think>391.")),
        (" <think>a</think>b</think>c", False, ("a", "b</think>c")),
        ("a</think>b", True, ("a", "b")),
        ("a", True, ("a", "")),
        ("<think>a", False, ("a", "")),
    ],
)
def test_thinking_and_words_are_told_apart(text: str, opened: bool, parts: tuple[str | None, str]) -> None:
    assert split_thinking(text, opened=opened) == parts


@pytest.mark.parametrize(
    ("turns", "rules", "reason"),
    [
        ([("user", "add"), ("assistant", ""), ("tool", "3")], RULES, "response_needs_tools"),
        ([("assistant", "Hello!"), ("user", "one?")], RULES, "response_without_question"),
        ([("system", "Be brief.")], RULES, "response_without_question"),
        ([("user", "a"), ("assistant", "b"), ("assistant", "c")], RULES, "response_without_question"),
        ([("user", "say <|im_end|>")], RULES, "special_token_in_content"),
        ([("user", "why? " * 100)], RULES, "response_too_long"),
        ([("user", "a")], dataclasses.replace(RULES, vocab_size=20), "token_out_of_vocab"),
    ],
)
def test_what_cannot_be_asked_is_never_asked(
    turns: Sequence[tuple[str, str]], rules: AnswerRules, reason: str, tokenizer: ChatTokenizer
) -> None:
    model = Model(tokenizer)
    got = answer(Conversation(tuple(Message(role, content) for role, content in turns)), tokenizer, rules, model)
    assert isinstance(got, Dropped)
    assert (got.reason, model.asked) == (reason, [])


@pytest.mark.parametrize(
    "conversation",
    [
        Conversation(QUESTION.messages, ({"name": "add"},)),
        Conversation((*QUESTION.messages, Message("assistant", "", tool_calls=(ToolCall("add", {"a": 1}),)))),
    ],
)
def test_tools_are_not_lost_in_silence(conversation: Conversation, tokenizer: ChatTokenizer) -> None:
    got = answer(conversation, tokenizer, RULES, Model(tokenizer))
    assert isinstance(got, Dropped)
    assert got.reason == "response_needs_tools"


def test_a_template_that_refuses(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, stock(RAISES))
    got = answer(TWO_TURNS, tokenizer, RULES, Model(tokenizer))
    assert isinstance(got, Dropped)
    assert got.reason == "template_error"
    assert "roles must alternate" in got.detail


def test_the_ids_that_end_an_answer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 3}}))
    assert stop_token_ids(tmp_path, 7) == (3, 7)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 1]}))
    assert stop_token_ids(tmp_path, None) == (1, 3, 9)
