"""The tokenizer of a checkpoint: texts and ids as Hugging Face has them, nothing added, and hashes that say which it was."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from transformers import dynamic_module_utils

from hs_assets.errors import PromptError
from hs_assets.samples.conversations import Conversation, Message
from hs_assets.samples.template import Form
from hs_assets.samples.tokenizer import ChatTokenizer, load_tokenizer
from hs_assets_tests.small_tokenizer import (
    CHATML,
    KIMI,
    LLAMA3,
    MISTRAL,
    SPECIAL_TOKENS,
    THINKING,
    adds_bos,
    chat_tokenizer,
    make_tokenizer,
    marked,
    save_tokenizer,
    stock,
    without_offsets,
)

CHAT = Conversation((Message("system", "Be brief."), Message("user", "Erkläre das."), Message("assistant", "One.\n\nTwo 😀")))
BYTE_TOKENIZER = '''
from pathlib import Path

from transformers import PreTrainedTokenizer

Path({ran!r}).write_text("ran")


class ByteTokenizer(PreTrainedTokenizer):
    """A token is a byte; it has no offsets."""

    model_input_names = ["input_ids"]

    @property
    def vocab_size(self):
        return 256

    def get_vocab(self):
        return {{**{{chr(i): i for i in range(256)}}, **self.added_tokens_encoder}}

    def _tokenize(self, text):
        return [chr(byte) for byte in text.encode()]

    def _convert_token_to_id(self, token):
        return ord(token)

    def _convert_id_to_token(self, index):
        return chr(index)

    def convert_tokens_to_string(self, tokens):
        return b"".join(token.encode() if len(token) > 1 else bytes([ord(token)]) for token in tokens).decode()
'''


@pytest.fixture
def tokenizer(tmp_path: Path) -> ChatTokenizer:
    return chat_tokenizer(tmp_path, stock(KIMI))


@pytest.mark.parametrize("template", [CHATML, KIMI, LLAMA3, MISTRAL])
@pytest.mark.parametrize("prompt", [False, True])
def test_render_is_what_transformers_renders(template: str, prompt: bool, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, stock(template))
    chat = [dataclasses.asdict(message) for message in CHAT.messages]
    theirs = make_tokenizer(stock(template)).apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
    assert tokenizer.template.render(CHAT, Form(), prompt=prompt) == theirs


@pytest.mark.parametrize(
    ("template", "generated"),
    [
        (CHATML, "One.\n\nTwo 😀<|im_end|>"),
        (KIMI, "One.\n\nTwo 😀<|im_end|>"),
        (LLAMA3, "One.\n\nTwo 😀<|eot_id|>"),
        (MISTRAL, " One.\n\nTwo 😀</s>"),
    ],
)
def test_marks_do_not_change_the_text(template: str, generated: str, tmp_path: Path) -> None:
    without = chat_tokenizer(tmp_path / "stock", stock(template))
    with_marks = chat_tokenizer(tmp_path / "marked", marked(template))
    text, spans = with_marks.template.render_marked(CHAT, Form())
    assert text == with_marks.template.render(CHAT, Form()) == without.template.render(CHAT, Form())
    assert [text[start:end] for start, end in spans] == [generated]
    assert (with_marks.template.marks_generation, without.template.marks_generation) == (True, False)


@pytest.mark.parametrize(
    ("template", "marks"),
    [
        ("{% generation %}x{% endgeneration %}", True),
        ("{%- generation -%}x{%- endgeneration -%}", True),
        ("{%generation%}x{%endgeneration%}", True),
        ("{% if add_generation_prompt %}x{% endif %}", False),
        ("generation", False),
    ],
)
def test_marks_generation(template: str, marks: bool, tmp_path: Path) -> None:
    assert chat_tokenizer(tmp_path, template).template.marks_generation is marks


def test_encode_adds_nothing(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, stock(KIMI), adds_bos())
    inner = make_tokenizer(None, adds_bos())
    text = "What is the residual stream?"
    assert inner.encode(text) == [SPECIAL_TOKENS.index("<s>"), *tokenizer.encode(text)]
    assert tokenizer.encode_batch([text])[0].ids == tokenizer.encode(text)
    assert tokenizer.encode("") == []


@pytest.mark.parametrize(
    "text", ["plain words", "  two  spaces \n\n\n", "e\u0301 😀 \u2028 \0", "a<|im_end|>b<think>", "erkläre"]
)
def test_decode_gives_the_text_back(text: str, tokenizer: ChatTokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text
    slow = without_offsets(tokenizer)
    assert (slow.encode(text), slow.decode(slow.encode(text))) == (tokenizer.encode(text), text)


def test_offsets_are_the_characters_of_each_token(tokenizer: ChatTokenizer) -> None:
    text = "What<|im_end|> is\n\n 😀 it?"
    (encoding,) = tokenizer.encode_batch([text])
    ids, offsets = encoding.ids, encoding.offsets
    assert ids == tokenizer.encode(text)
    pieces = {text[start:end] for start, end in offsets}
    assert {"<|im_end|>", "😀"} <= pieces
    assert all(tokenizer.decode([i]) == text[a:b] for i, (a, b) in zip(ids, offsets, strict=True) if text[a:b] != "😀")


def test_special_tokens_are_the_special_ones_longest_first(tokenizer: ChatTokenizer) -> None:
    assert set(tokenizer.special_tokens) == set(SPECIAL_TOKENS)
    assert not set(tokenizer.special_tokens) & set(THINKING)
    assert list(map(len, tokenizer.special_tokens)) == sorted(map(len, SPECIAL_TOKENS), reverse=True)
    assert all(len(tokenizer.encode(token)) == 1 for token in tokenizer.special_tokens)


def test_hashes_say_what_changed(tmp_path: Path) -> None:
    first = chat_tokenizer(tmp_path / "first", stock(KIMI))
    same = chat_tokenizer(tmp_path / "same", stock(KIMI))
    assert (first.template_sha256, first.tokenizer_sha256) == (same.template_sha256, same.tokenizer_sha256)

    other_template = chat_tokenizer(tmp_path / "template", marked(KIMI))
    assert other_template.template_sha256 != first.template_sha256
    assert other_template.tokenizer_sha256 == first.tokenizer_sha256

    other_tokenizer = chat_tokenizer(tmp_path / "tokenizer", stock(KIMI), adds_bos())
    assert other_tokenizer.template_sha256 == first.template_sha256
    assert other_tokenizer.tokenizer_sha256 != first.tokenizer_sha256


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "modeling.py", "README.md"])
def test_files_that_are_no_part_of_the_tokenizer_do_not_change_its_hash(name: str, tmp_path: Path) -> None:
    before = chat_tokenizer(tmp_path, stock(KIMI)).tokenizer_sha256
    (tmp_path / name).write_text("{}")
    assert load_tokenizer(tmp_path).tokenizer_sha256 == before


@pytest.mark.parametrize("name", ["tokenizer.model", "qwen.tiktoken", "vocab.txt", "merges.txt", "added_tokens.json"])
def test_files_of_a_tokenizer_change_its_hash(name: str, tmp_path: Path) -> None:
    before = chat_tokenizer(tmp_path, stock(KIMI)).tokenizer_sha256
    (tmp_path / name).write_text("{}")
    assert load_tokenizer(tmp_path).tokenizer_sha256 != before


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="tokenizer cannot be loaded") as error:
        load_tokenizer(tmp_path)
    assert error.value.where == tmp_path
    assert "model.path" in (error.value.remedy or "")


@pytest.mark.parametrize(
    "body",
    ["", '{"version": "1.0", "added_tok', "{}", '{"version": "1.0", "added_tokens": [], "model": {"type": "OfANewerVersion"}}'],
    ids=["empty", "cut", "another file", "a newer format"],
)
def test_a_tokenizer_that_cannot_be_read(body: str, tmp_path: Path) -> None:
    save_tokenizer(tmp_path, stock(KIMI))
    (tmp_path / "tokenizer.json").write_text(body)
    with pytest.raises(PromptError, match="tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)


def test_no_chat_template(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, None)
    with pytest.raises(PromptError, match="no chat template") as error:
        load_tokenizer(tmp_path)
    assert error.value.where == tmp_path
    assert "chat_template.jinja" in str(error.value)


def test_a_chat_template_that_cannot_be_read(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, "{% for m in messages %}\n{{ m.content }\n{% endfor %}")
    with pytest.raises(PromptError, match="chat template cannot be read") as error:
        load_tokenizer(tmp_path)
    assert error.value.where == "line 2"


def test_of_several_chat_templates_the_default_is_taken(tmp_path: Path) -> None:
    inner = make_tokenizer(None)
    inner.chat_template = {"default": stock(KIMI), "rag": stock(CHATML)}
    inner.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).template.source == stock(KIMI)


@pytest.fixture
def remote_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A checkpoint whose tokenizer is Python code, and the file that the code leaves when it runs."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    model, ran = tmp_path / "model", tmp_path / "ran"
    model.mkdir()
    (model / "tokenization_bytes.py").write_text(BYTE_TOKENIZER.format(ran=str(ran)))
    added = {str(256 + i): {"content": token, "special": True, "normalized": False} for i, token in enumerate(SPECIAL_TOKENS)}
    fields = {
        "tokenizer_class": "ByteTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_bytes.ByteTokenizer", None]},
        "added_tokens_decoder": added,
        "chat_template": stock(KIMI),
        "eos_token": "<|im_end|>",
    }
    (model / "tokenizer_config.json").write_text(json.dumps(fields))
    return model, ran


def test_code_beside_the_weights_is_not_run_by_default(remote_code: tuple[Path, Path]) -> None:
    model, ran = remote_code
    with pytest.raises(PromptError, match="tokenizer cannot be loaded") as error:
        load_tokenizer(model)
    assert "model.trust_remote_code = true" in (error.value.remedy or "")
    assert not ran.exists()


def test_code_beside_the_weights_is_part_of_the_hash(remote_code: tuple[Path, Path]) -> None:
    model, ran = remote_code
    tokenizer = load_tokenizer(model, trust_remote_code=True)
    assert ran.exists()
    assert not tokenizer.has_offsets
    assert set(tokenizer.special_tokens) == set(SPECIAL_TOKENS)
    text = tokenizer.template.render(CHAT, Form())
    assert text == make_tokenizer(stock(KIMI)).apply_chat_template([dataclasses.asdict(m) for m in CHAT.messages], tokenize=False)
    assert len(tokenizer.encode("é<|im_end|>")) == 3
    assert tokenizer.decode(tokenizer.encode(text)) == text

    (model / "tokenization_bytes.py").write_text((model / "tokenization_bytes.py").read_text() + "\n# another\n")
    assert load_tokenizer(model, trust_remote_code=True).tokenizer_sha256 != tokenizer.tokenizer_sha256
