"""A byte-level tokenizer trained on a few sentences, and small chat templates with and without generation marks."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from hs_assets.samples.conversations import Message
from hs_assets.samples.tokenizer import ChatTokenizer, load_tokenizer

SPECIAL_TOKENS = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|im_system|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_middle|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|end_response|>",
    "<|role|>",
    "[INST]",
    "[/INST]",
)
THINKING = ("<think>", "</think>")
"""Tokens of their own that are not special: a model may write them, and a template may split on them."""

_WORDS = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3, Qwen and Kimi split a text before they encode it: line breaks in a row are one word."""

_SENTENCES = (
    "What is the residual stream of a decoder layer, and who reads it?",
    "It is the sum of the embedding and of all that the layers before it wrote.\n\nThe next layer reads it.",
    "Bitte erkläre das noch einmal: ein Entwurfsmodell sagt mehrere Wörter voraus.",
    "def add(a, b):\n    return a + b\n\n\nprint(add(17, 23))  # 40\n",
    "1. one\n2. two\n\n\n\t3. three   and  a half",
)

# <A> … </A> stand where the generation marks go: `stock` takes them off, `marked` puts {% generation %} there.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}<A>{{ m.content + '<|im_end|>' }}</A>{% else %}{{ m.content + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
KIMI = (
    "{% for m in messages %}{{ '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' }}"
    "{% if m.role == 'assistant' %}<A>{{ m.content + '<|im_end|>' }}</A>{% else %}{{ m.content + '<|im_end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{% if m.role == 'assistant' %}<A>{{ m.content | trim + '<|eot_id|>' }}</A>"
    "{% else %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<A>{{ ' ' + m.content + eos_token }}</A>"
    "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
"""The generation prompt is empty: the opening of an assistant's turn is the end of the user's."""

SCAFFOLD = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% if '</think>' not in m.content %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "<A>{{ m.content + '<|im_end|>' }}</A>{% else %}{{ m.content + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""An answer without reasoning gets an empty scaffold that the model never wrote."""

STRIPS_HISTORY = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% set kept = m.content if loop.last else m.content.split('</think>')[-1] | trim %}"
    "{% if m.role == 'assistant' %}<A>{{ kept + '<|im_end|>' }}</A>{% else %}{{ kept + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The reasoning of all turns but the last is left out."""

RAISES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}<A>{{ m.content + '<|im_end|>' }}</A>{% else %}{{ m.content + '<|im_end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_STOP = (
    "{% for m in messages %}{{ '<|role|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}<A>{{ m.content }}</A>{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|role|>assistant\n' }}{% endif %}"
)
"""A turn ends where the next role begins; no special token of its own."""

TWO_STOPS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_middle|>' }}"
    "{% if m.role == 'assistant' %}<A>{{ m.content + '<|end_response|><|im_end|>' }}</A>"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_middle|>' }}{% endif %}"
)
"""The answer is closed, and then the turn: the model must learn both."""


def stock(template: str) -> str:
    """The template as models ship it, without generation marks."""
    return template.replace("<A>", "").replace("</A>", "")


def marked(template: str) -> str:
    """The same template with generation marks; it renders the same text."""
    return template.replace("<A>", "{% generation %}").replace("</A>", "{% endgeneration %}")


@functools.cache
def trained(gpt2: bool) -> str:
    tokenizer = Tokenizer(models.BPE())
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2)
    split = pre_tokenizers.Split(_WORDS, "isolated")
    tokenizer.pre_tokenizer = bytes_of if gpt2 else pre_tokenizers.Sequence([split, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=480, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_SENTENCES * 4, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in THINKING])
    return tokenizer.to_str()


def make_tokenizer(
    template: str | None, post_processor: processors.PostProcessor | None = None, *, gpt2: bool = False
) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers sees it, with a chat template; `gpt2` splits a text into words as GPT-2 does."""
    tokenizer = Tokenizer.from_str(trained(gpt2))
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    return fast


def adds_bos() -> processors.PostProcessor:
    """What a tokenizer with add_bos does to every text that it encodes with its special tokens."""
    return processors.TemplateProcessing(single="<s> $A", pair=None, special_tokens=[("<s>", SPECIAL_TOKENS.index("<s>"))])


def save_tokenizer(
    folder: Path, template: str | None, post_processor: processors.PostProcessor | None = None, *, gpt2: bool = False
) -> Path:
    """A folder such as a checkpoint's, with this tokenizer in it."""
    make_tokenizer(template, post_processor, gpt2=gpt2).save_pretrained(folder)
    return folder


def chat_tokenizer(
    folder: Path, template: str, post_processor: processors.PostProcessor | None = None, *, gpt2: bool = False
) -> ChatTokenizer:
    """Saved and loaded again."""
    return load_tokenizer(save_tokenizer(folder, template, post_processor, gpt2=gpt2))


class WithoutOffsets:
    """A tokenizer that cannot say which characters a token came from, as those that are Python code."""

    is_fast = False

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self.special_tokens_map = tokenizer.special_tokens_map

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: list[int], **options: bool) -> str:
        return self._tokenizer.decode(ids, **options)


def without_offsets(tokenizer: ChatTokenizer) -> ChatTokenizer:
    """The same tokenizer, made to take the path for those without offsets."""
    return dataclasses.replace(tokenizer, _tokenizer=WithoutOffsets(tokenizer._tokenizer))


def hf_tokenize(messages: Sequence[Message], marked_template: str, *, gpt2: bool = False) -> tuple[list[int], list[bool]]:
    """Hugging Face's own ids and assistant mask."""
    chat = [{"role": message.role, "content": message.content} for message in messages]
    encoded = _hf(marked_template, gpt2).apply_chat_template(chat, return_assistant_tokens_mask=True, return_dict=True)
    return [int(i) for i in encoded["input_ids"]], [bool(flag) for flag in encoded["assistant_masks"]]


@functools.cache
def _hf(template: str, gpt2: bool) -> PreTrainedTokenizerFast:
    return make_tokenizer(template, gpt2=gpt2)


def json_row(*turns: tuple[str, str], **fields: Any) -> bytes:
    """A row of a source: ``("user", "text")``, …"""
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in turns], **fields}).encode()
