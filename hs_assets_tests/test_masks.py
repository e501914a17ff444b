"""A mask equals Hugging Face's own, covers what the assistant wrote and its stop, and nothing else, or the row is dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import processors

from hs_assets.samples.conversations import Conversation, Dropped, Message, Tokenized
from hs_assets.samples.masks import Rendered, Supervise, render_conversation, tokenize
from hs_assets.samples.template import Form
from hs_assets.samples.tokenizer import ChatTokenizer
from hs_assets_tests.small_tokenizer import (
    CHATML,
    KIMI,
    LLAMA3,
    MISTRAL,
    NO_STOP,
    RAISES,
    SCAFFOLD,
    SPECIAL_TOKENS,
    STRIPS_HISTORY,
    TWO_STOPS,
    adds_bos,
    chat_tokenizer,
    hf_tokenize,
    marked,
    stock,
    without_offsets,
)

STOPS = {CHATML: "<|im_end|>", KIMI: "<|im_end|>", LLAMA3: "<|eot_id|>", MISTRAL: "</s>", SCAFFOLD: "<|im_end|>"}
REASONS = {"special_token_in_content", "mask_unsure", "template_error", "not_rendered"}
Chat = tuple[Message, ...]


def chat(*contents: str, system: str | None = None) -> Chat:
    """User and assistant in turn, with a system message before them."""
    turns = tuple(Message("user" if i % 2 == 0 else "assistant", text) for i, text in enumerate(contents))
    return turns if system is None else (Message("system", system), *turns)


ORDINARY: dict[str, Chat] = {
    "one turn": chat("What is 17 × 23?", "17 × 23 = 391."),
    "system": chat("Who reads it?", "The next layer.", system="Be brief."),
    "three turns": chat("one", "two\n\nthree", "four", "fünf 😀", "six", "def add(a, b):\n    return a + b"),
    "ends on the user": chat("one", "two", "three"),
    "two users in a row": (Message("user", "one"), Message("user", "two"), Message("assistant", "three")),
    "two answers in a row": (Message("user", "one"), Message("assistant", "two"), Message("assistant", "three")),
    "words that repeat": chat("yes", "yes", "yes", "yes", "assistant", "user"),
    "reasoning": chat("one", "<think>\nhm\n</think>\n\ntwo", "three", "<think>\nso\n</think>\n\nfour"),
}


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ChatTokenizer]:
    """The tokenizer with a template; each is made once."""
    known: dict[object, ChatTokenizer] = {}

    def get(template: str, *, trims: bool | None = None, gpt2: bool = False) -> ChatTokenizer:
        key = template, trims, gpt2
        if key not in known:
            post = None if trims is None else processors.ByteLevel(trim_offsets=trims, add_prefix_space=False)
            known[key] = chat_tokenizer(tmp_path_factory.mktemp("tokenizer"), template, post, gpt2=gpt2)
        return known[key]

    return get


def render(messages: Chat, tokenizer: ChatTokenizer, supervise: Supervise = Supervise.ALL) -> tuple[Rendered, ...] | Dropped:
    return render_conversation(Conversation(messages), tokenizer, supervise)


def rows_of(messages: Chat, tokenizer: ChatTokenizer) -> list[Tokenized]:
    """Ids and mask of each row that a conversation gives."""
    rows = render(messages, tokenizer)
    assert not isinstance(rows, Dropped), rows
    return [kept(made) for made in tokenize(rows, tokenizer)]


def tokenize_one(messages: Chat, tokenizer: ChatTokenizer) -> Tokenized | Dropped:
    """Ids and mask of a conversation that is one row."""
    rows = render(messages, tokenizer)
    if isinstance(rows, Dropped):
        return rows
    assert len(rows) == 1
    return tokenize(rows, tokenizer)[0]


def kept(made: Tokenized | Dropped) -> Tokenized:
    assert isinstance(made, Tokenized), made
    return made


def text_of(messages: Chat, tokenizer: ChatTokenizer) -> str:
    return tokenizer.template.render(Conversation(messages), Form())


def supervised(made: Tokenized, tokenizer: ChatTokenizer) -> str:
    """The text of the supervised tokens, one run of them after the other."""
    return tokenizer.decode([i for i, flag in zip(made.input_ids, made.loss_mask, strict=True) if flag])


def same(made: Tokenized, reference: tuple[list[int], list[bool]]) -> bool:
    return (list(made.input_ids), list(made.loss_mask)) == reference


# Against Hugging Face


@pytest.mark.parametrize("messages", ORDINARY.values(), ids=ORDINARY.keys())
@pytest.mark.parametrize("template", [CHATML, KIMI, LLAMA3, MISTRAL], ids=["chatml", "kimi", "llama3", "mistral"])
def test_masks_equal_hugging_face(template: str, messages: Chat, load: Callable[..., ChatTokenizer]) -> None:
    """With marks, and without them, where the text is the same; by offsets, and without them."""
    reference = hf_tokenize(messages, marked(template))
    with_marks, without = load(marked(template)), load(stock(template))
    assert text_of(messages, with_marks) == text_of(messages, without)
    assert same(kept(tokenize_one(messages, with_marks)), reference)
    assert same(kept(tokenize_one(messages, without)), reference)
    for tokenizer in (with_marks, without):
        made = tokenize_one(messages, without_offsets(tokenizer))
        if template is MISTRAL and isinstance(made, Dropped):
            assert made.reason == "mask_unsure"  # an answer that begins with a space may encode otherwise alone
        else:
            assert same(kept(made), reference)


@pytest.mark.parametrize("messages", ORDINARY.values(), ids=ORDINARY.keys())
@pytest.mark.parametrize("template", [CHATML, KIMI, LLAMA3], ids=["chatml", "kimi", "llama3"])
def test_the_words_of_the_assistant_and_the_stop(template: str, messages: Chat, load: Callable[..., ChatTokenizer]) -> None:
    tokenizer = load(stock(template))
    made = kept(tokenize_one(messages, tokenizer))
    answers = "".join(m.content + STOPS[template] for m in messages if m.role == "assistant")
    assert supervised(made, tokenizer) == answers
    assert tokenizer.decode(made.input_ids) == text_of(messages, tokenizer)


@pytest.mark.parametrize("template", [CHATML, KIMI, LLAMA3, MISTRAL], ids=["chatml", "kimi", "llama3", "mistral"])
def test_stock_templates_are_neither_all_0_nor_all_1(template: str, load: Callable[..., ChatTokenizer]) -> None:
    made = kept(tokenize_one(ORDINARY["three turns"], load(stock(template))))
    runs = sum(a and not b for a, b in zip(made.loss_mask, (*made.loss_mask[1:], False), strict=True))
    assert 0 < sum(made.loss_mask) < len(made.loss_mask)
    assert runs == 3
    assert not made.loss_mask[0]


def test_a_turn_that_the_marks_leave_out_is_not_supervised(load: Callable[..., ChatTokenizer]) -> None:
    last_only = stock(KIMI).replace(
        "{% if m.role == 'assistant' %}{{ m.content + '<|im_end|>' }}",
        "{% if m.role == 'assistant' and loop.last %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}",
    )
    tokenizer, messages = load(last_only), ORDINARY["three turns"]
    made = kept(tokenize_one(messages, tokenizer))
    assert same(made, hf_tokenize(messages, last_only))
    assert supervised(made, tokenizer) == messages[-1].content + "<|im_end|>"


# Answers that templates change


@pytest.mark.parametrize("answer", ["  two", "two \n", "\ttwo\n\n"])
@pytest.mark.parametrize("template", [KIMI, LLAMA3], ids=["kept by the template", "trimmed by the template"])
def test_white_space_around_an_answer_is_as_rendered(template: str, answer: str, load: Callable[..., ChatTokenizer]) -> None:
    tokenizer, messages = load(stock(template)), chat("one", answer, "three", "four")
    made = kept(tokenize_one(messages, tokenizer))
    rendered = answer if template is KIMI else answer.strip()
    assert supervised(made, tokenizer) == f"{rendered}{STOPS[template]}four{STOPS[template]}"
    assert same(made, hf_tokenize(messages, marked(template)))


@pytest.mark.parametrize("with_offsets", [True, False])
def test_an_empty_scaffold_is_not_supervised(with_offsets: bool, load: Callable[..., ChatTokenizer]) -> None:
    tokenizer = load(stock(SCAFFOLD)) if with_offsets else without_offsets(load(stock(SCAFFOLD)))
    messages = chat("one", "two", "three", "<think>\nhm\n</think>\n\nfour", "five", "six")
    made = kept(tokenize_one(messages, tokenizer))
    assert tokenizer.decode(made.input_ids).count("<think>\n\n</think>\n\n") == 2
    assert supervised(made, tokenizer) == "two<|im_end|><think>\nhm\n</think>\n\nfour<|im_end|>six<|im_end|>"
    assert same(made, hf_tokenize(messages, marked(SCAFFOLD)))


@pytest.mark.parametrize("answer", ["  two", "\ttwo"])
def test_white_space_between_a_scaffold_and_the_words_of_an_answer(answer: str, load: Callable[..., ChatTokenizer]) -> None:
    """The scaffold ends where the answer begins, also where the answer begins with white space."""
    tokenizer, messages = load(stock(SCAFFOLD)), chat("one", answer)
    made = tokenize_one(messages, tokenizer)
    if isinstance(made, Dropped):
        assert made.reason == "mask_unsure"
    else:
        assert supervised(made, tokenizer) == answer + "<|im_end|>"


def test_an_empty_scaffold_that_the_assistant_wrote_is_supervised(load: Callable[..., ChatTokenizer]) -> None:
    tokenizer = load(stock(SCAFFOLD))
    made = kept(tokenize_one(chat("one", "<think>\n\n</think>\n\ntwo"), tokenizer))
    assert supervised(made, tokenizer) == "<think>\n\n</think>\n\ntwo<|im_end|>"


@pytest.mark.parametrize("form", [stock, marked])
def test_a_template_that_strips_earlier_reasoning(form: Callable[[str], str], load: Callable[..., ChatTokenizer]) -> None:
    """Each turn is a row of its own: reasoning, answer and stop, after what the model saw when it wrote them."""
    tokenizer = load(form(STRIPS_HISTORY))
    messages = chat(*(text for i in "abc" for text in (f"ask {i}", f"<think>\nhm {i}\n</think>\n\nsay {i}")))
    rows = render(messages, tokenizer)
    assert not isinstance(rows, Dropped)
    assert [row.turn for row in rows] == [1, 3, 5]
    for row, made in zip(rows, rows_of(messages, tokenizer), strict=True):
        assert row.turn is not None
        assert supervised(made, tokenizer) == messages[row.turn].content + "<|im_end|>"
        ids, mask = hf_tokenize(messages[: row.turn + 1], marked(STRIPS_HISTORY))
        assert list(made.input_ids) == ids
        assert list(made.loss_mask) == [flag and i >= made.loss_mask.index(True) for i, flag in enumerate(mask)]

    last = render(messages, tokenizer, Supervise.LAST)
    assert not isinstance(last, Dropped)
    assert [(row.text, row.spans) for row in last] == [(rows[-1].text, rows[-1].spans)]


@pytest.mark.parametrize("form", [stock, marked])
def test_a_template_that_raises(form: Callable[[str], str], load: Callable[..., ChatTokenizer]) -> None:
    tokenizer = load(form(RAISES))
    made = tokenize_one(ORDINARY["two users in a row"], tokenizer)
    assert isinstance(made, Dropped)
    assert made.reason == "template_error"
    assert "roles must alternate" in made.detail
    assert supervised(kept(tokenize_one(ORDINARY["one turn"], tokenizer)), tokenizer) == "17 × 23 = 391.<|im_end|>"


@pytest.mark.parametrize("with_offsets", [True, False])
def test_a_turn_without_a_stop_of_its_own(with_offsets: bool, load: Callable[..., ChatTokenizer]) -> None:
    """What ends it is the next role's token, which a row gets at its end too."""
    tokenizer = load(stock(NO_STOP)) if with_offsets else without_offsets(load(stock(NO_STOP)))
    messages = ORDINARY["three turns"]
    made = kept(tokenize_one(messages, tokenizer))
    assert supervised(made, tokenizer) == "".join(m.content + "<|role|>" for m in messages if m.role == "assistant")
    assert tokenizer.decode(made.input_ids) == text_of(messages, tokenizer) + "<|role|>"


@pytest.mark.parametrize("with_offsets", [True, False])
def test_a_turn_that_ends_with_two_special_tokens(with_offsets: bool, load: Callable[..., ChatTokenizer]) -> None:
    """The answer is closed and the turn is ended: without the second token a model never stops."""
    tokenizer = load(stock(TWO_STOPS)) if with_offsets else without_offsets(load(stock(TWO_STOPS)))
    messages = ORDINARY["one turn"]
    made = tokenize_one(messages, tokenizer)
    if isinstance(made, Dropped):
        assert made.reason == "mask_unsure"
    else:
        assert supervised(made, tokenizer) == "17 × 23 = 391.<|end_response|><|im_end|>"
        assert same(made, hf_tokenize(messages, marked(TWO_STOPS)))


@pytest.mark.parametrize("form", [stock, marked])
def test_a_template_that_wants_parts(form: Callable[[str], str], load: Callable[..., ChatTokenizer]) -> None:
    """As those for images do; of a string it would render nothing."""
    parts = KIMI.replace("m.content", "(m.content | selectattr('text') | map(attribute='text') | join)")
    tokenizer = load(form(parts))
    assert "391" not in text_of(ORDINARY["one turn"], tokenizer)
    assert supervised(kept(tokenize_one(ORDINARY["one turn"], tokenizer)), tokenizer) == "17 × 23 = 391.<|im_end|>"


@pytest.mark.parametrize("form", [stock, marked])
def test_an_answer_that_the_template_loses(form: Callable[[str], str], load: Callable[..., ChatTokenizer]) -> None:
    tokenizer = load(form(KIMI.replace("m.content + '<|im_end|>' }}</A>", "'<|im_end|>' }}</A>")))
    assert tokenize_one(ORDINARY["one turn"], tokenizer) == Dropped(
        "not_rendered", "the template leaves out the content of turn 1 (assistant)"
    )


def test_a_template_that_changes_an_answer(load: Callable[..., ChatTokenizer]) -> None:
    made = tokenize_one(ORDINARY["one turn"], load(stock(KIMI).replace("m.content", "m.content | replace('=', 'is')")))
    assert isinstance(made, Dropped)
    assert made.reason == "mask_unsure"


def test_a_template_that_puts_words_before_an_answer(load: Callable[..., ChatTokenizer]) -> None:
    """Who wrote them is not known: the generation prompt has them not."""
    words = stock(KIMI).replace(
        "{% if m.role == 'assistant' %}{{ m.content", "{% if m.role == 'assistant' %}{{ 'Answer: ' + m.content"
    )
    for template in (words, words.replace("Answer: ", "<think>hm</think>")):
        tokenizer = load(template)
        assert text_of(ORDINARY["one turn"], tokenizer) != text_of(ORDINARY["one turn"], load(stock(KIMI)))
        made = tokenize_one(ORDINARY["one turn"], tokenizer)
        assert isinstance(made, Dropped)
        assert made.reason == "mask_unsure"


@pytest.mark.parametrize("opening", ["<|im_assistant|>Assistant", "<|im_user|>assistant", "<|im_assistant|>a", "<think>\n"])
def test_a_generation_prompt_that_is_not_how_a_turn_begins(opening: str, load: Callable[..., ChatTokenizer]) -> None:
    template = stock(KIMI).replace("{{ '<|im_assistant|>assistant<|im_middle|>' }}", f"{{{{ '{opening}<|im_middle|>' }}}}")
    made = tokenize_one(ORDINARY["one turn"], load(template))
    assert isinstance(made, Dropped)
    assert made.reason == "mask_unsure"


def test_marks_around_nothing(load: Callable[..., ChatTokenizer]) -> None:
    template = stock(KIMI) + "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    assert tokenize_one(ORDINARY["one turn"], load(template)) == Dropped(
        "mask_unsure", "the template's generation marks are empty"
    )


# Tokens at the edges


@pytest.mark.parametrize("gpt2", [False, True], ids=["words of Llama 3", "words of GPT-2"])
@pytest.mark.parametrize("trims", [False, True], ids=["offsets", "trimmed offsets"])
@pytest.mark.parametrize("answer", ["\n\ntwo", "\n\n\n\ntwo", "two\n\n", "two\n\n\n", "  \n two", " two", "   two", "two  "])
@pytest.mark.parametrize("template", [CHATML, KIMI], ids=["chatml", "kimi"])
def test_white_space_that_a_token_shares_with_the_template(
    template: str, answer: str, trims: bool, gpt2: bool, load: Callable[..., ChatTokenizer]
) -> None:
    """Some tokenizers leave white space out of a token's offsets: a token over the edge is seen all the same."""
    tokenizer, messages = load(stock(template), trims=trims, gpt2=gpt2), chat("one", answer)
    made = tokenize_one(messages, tokenizer)
    if isinstance(made, Dropped):
        assert made.reason == "mask_unsure"
        assert template is CHATML
    else:
        assert supervised(made, tokenizer) == answer + "<|im_end|>"


@pytest.mark.parametrize("messages", ORDINARY.values(), ids=ORDINARY.keys())
@pytest.mark.parametrize("template", [CHATML, KIMI, LLAMA3, MISTRAL, SCAFFOLD])
def test_turns_that_encode_otherwise_alone(template: str, messages: Chat, load: Callable[..., ChatTokenizer]) -> None:
    """GPT-2 takes the line breaks before a word apart, and those at the end of a piece not: without offsets it is dropped."""
    tokenizer = load(stock(template), gpt2=True)
    reference = hf_tokenize(messages, marked(template), gpt2=True)
    assert same(kept(tokenize_one(messages, tokenizer)), reference)
    made = tokenize_one(messages, without_offsets(tokenizer))
    if isinstance(made, Dropped):
        assert made.reason == "mask_unsure"
        assert template in (LLAMA3, MISTRAL, SCAFFOLD)
    else:
        assert same(made, reference)


def test_a_token_over_the_edge_drops_the_row(load: Callable[..., ChatTokenizer]) -> None:
    tokenizer = load(stock(CHATML))
    (encoding,) = tokenizer.encode_batch(["assistant\n" + "\n\ntwo"])
    edge = len("assistant\n")
    assert any(start < edge < end for start, end in encoding.offsets)
    for one in (tokenizer, without_offsets(tokenizer), load(marked(CHATML))):
        made = tokenize_one(chat("one", "\n\ntwo"), one)
        assert isinstance(made, Dropped), one
        assert made.reason == "mask_unsure"


def test_a_token_over_the_end_of_the_marks_drops_the_row(load: Callable[..., ChatTokenizer]) -> None:
    """The template ends the answer with line breaks of its own, outside the marks."""
    template = KIMI.replace("<A>{{ m.content + '<|im_end|>' }}</A>", "<A>{{ m.content }}</A>{{ '\n\n<|im_end|>' }}")
    tokenizer = load(marked(template))
    assert supervised(kept(tokenize_one(chat("one", "two"), tokenizer)), tokenizer) == "two"
    for one in (tokenizer, without_offsets(tokenizer)):
        made = tokenize_one(chat("one", "two\n"), one)
        assert isinstance(made, Dropped)
        assert made.reason == "mask_unsure"


@pytest.mark.parametrize("template", [CHATML, KIMI, SCAFFOLD], ids=["chatml", "kimi", "scaffold"])
@pytest.mark.parametrize("messages", ORDINARY.values(), ids=ORDINARY.keys())
def test_both_paths_give_the_same(template: str, messages: Chat, load: Callable[..., ChatTokenizer]) -> None:
    tokenizer = load(stock(template))
    assert kept(tokenize_one(messages, tokenizer)) == kept(tokenize_one(messages, without_offsets(tokenizer)))


@pytest.mark.parametrize("form", [stock, marked])
def test_template_and_tokenizer_both_write_bos(form: Callable[[str], str], tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, form(LLAMA3), adds_bos())
    for one in (tokenizer, without_offsets(tokenizer)):
        made = kept(tokenize_one(ORDINARY["system"], one))
        assert made.input_ids[0] == SPECIAL_TOKENS.index("<s>")
        assert made.input_ids.count(SPECIAL_TOKENS.index("<s>")) == 1
        assert not made.loss_mask[0]
        assert same(made, hf_tokenize(ORDINARY["system"], marked(LLAMA3)))


# Text that looks like the template's


@pytest.mark.parametrize("form", [stock, marked])
@pytest.mark.parametrize("token", ["<|im_end|>", "<s>", "<|im_assistant|>"])
@pytest.mark.parametrize("turn", [0, 1, 2, 3])
def test_special_tokens_in_a_turn(turn: int, token: str, form: Callable[[str], str], load: Callable[..., ChatTokenizer]) -> None:
    contents = ["one", "two", "three", "four"]
    contents[turn] = f"explain {token} please"
    role = "user" if turn % 2 == 0 else "assistant"
    assert tokenize_one(chat(*contents), load(form(KIMI))) == Dropped(
        "special_token_in_content", f"turn {turn} ({role}) contains {token!r}"
    )


def test_a_whole_forged_turn_is_never_supervised(load: Callable[..., ChatTokenizer]) -> None:
    forged = "explain <|im_assistant|>assistant<|im_middle|>sure<|im_end|> please"
    for messages in (chat(forged, "no"), chat("one", "two", system=forged)):
        made = tokenize_one(messages, load(stock(KIMI)))
        assert isinstance(made, Dropped)
        assert made.reason == "special_token_in_content"


@pytest.mark.parametrize("text", ["<|im_end|", "|im_end|>", "< |im_end|>", "<|IM_END|>", "<think>", "assistant\n"])
def test_what_only_looks_like_a_special_token_is_kept(text: str, load: Callable[..., ChatTokenizer]) -> None:
    tokenizer, messages = load(stock(KIMI)), chat(f"explain {text}", f"it is {text} there")
    made = kept(tokenize_one(messages, tokenizer))
    assert supervised(made, tokenizer) == f"it is {text} there<|im_end|>"


def test_render_gives_the_spans_that_are_supervised(load: Callable[..., ChatTokenizer]) -> None:
    for form in (stock, marked):
        rows = render(ORDINARY["system"], load(form(KIMI)))
        assert not isinstance(rows, Dropped)
        (rendered,) = rows
        assert rendered.text == (
            "<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>Who reads it?<|im_end|>"
            "<|im_assistant|>assistant<|im_middle|>The next layer.<|im_end|>"
        )
        assert [rendered.text[start:end] for start, end in rendered.spans] == ["The next layer.<|im_end|>"]


# Any conversation

LOOKALIKES = ("<think>", "</think>", "<think>\n\n</think>\n\n", "<|", "|>", "<|im_", "im_end|>", "{{ x }}", "{% generation %}")
ODD = ("\n", "\n\n", " ", "   ", "\t", "\u2028", "\0", "é", "e\u0301", "😀", "assistant", "user\n", "one two", ".")
PIECES = st.sampled_from([*SPECIAL_TOKENS, *LOOKALIKES, *ODD])
CONTENT = st.lists(PIECES | st.text(max_size=6), min_size=1, max_size=5).map("".join).filter(str.strip)
HARMLESS = CONTENT.filter(lambda text: not any(token in text for token in SPECIAL_TOKENS))
ROLES = st.lists(st.sampled_from(["user", "assistant", "assistant"]), min_size=1, max_size=5).filter(lambda r: "assistant" in r)


def conversations(content: st.SearchStrategy[str]) -> st.SearchStrategy[Chat]:
    system = st.none() | content
    turns = ROLES.flatmap(lambda roles: st.tuples(*(st.builds(Message, st.just(role), content) for role in roles)))
    return st.builds(lambda first, rest: rest if first is None else (Message("system", first), *rest), system, turns)


def write_out(messages: Sequence[Message], template: str) -> tuple[str, str]:
    """The text of the two templates and what is supervised of it, without Jinja."""
    text = generated = ""
    for message in messages:
        body = message.content + "<|im_end|>"
        if template is CHATML:
            text += f"<|im_start|>{message.role}\n{body}\n"
        else:
            text += f"<|im_{message.role}|>{message.role}<|im_middle|>{body}"
        generated += body if message.role == "assistant" else ""
    return text, generated


def check(messages: Chat, template: str, tokenizer: ChatTokenizer) -> bool:
    """Whether the row was kept; what is kept is right."""
    text, generated = write_out(messages, template)
    made = tokenize_one(messages, tokenizer)
    if isinstance(made, Dropped):
        assert made.reason in REASONS
        return False
    assert tokenizer.decode(made.input_ids) == text
    assert supervised(made, tokenizer) == generated
    assert same(made, hf_tokenize(messages, marked(template)))
    return True


MANY = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])


@MANY
@given(conversations(CONTENT), st.sampled_from([CHATML, KIMI]), st.sampled_from([stock, marked]), st.booleans())
def test_any_conversation(
    load: Callable[..., ChatTokenizer], messages: Chat, template: str, form: Callable[[str], str], offsets: bool
) -> None:
    tokenizer = load(form(template))
    was_kept = check(messages, template, tokenizer if offsets else without_offsets(tokenizer))
    if any(token in message.content for token in SPECIAL_TOKENS for message in messages):
        assert not was_kept


@MANY
@given(conversations(HARMLESS), st.sampled_from([stock, marked]), st.booleans())
def test_any_conversation_without_special_tokens_is_kept(
    load: Callable[..., ChatTokenizer], messages: Chat, form: Callable[[str], str], offsets: bool
) -> None:
    """Under the Kimi-like template, where special tokens stand on both sides of every turn."""
    tokenizer = load(form(KIMI))
    assert check(messages, KIMI, tokenizer if offsets else without_offsets(tokenizer))


@MANY
@given(conversations(HARMLESS))
def test_any_conversation_is_kept_where_no_answer_begins_with_white_space(
    load: Callable[..., ChatTokenizer], messages: Chat
) -> None:
    """Under ChatML a line break stands before every answer, and only white space joins it in a token."""
    assume(all(message.content.strip() == message.content for message in messages))
    assert check(messages, CHATML, load(stock(CHATML)))
