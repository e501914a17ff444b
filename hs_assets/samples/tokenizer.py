"""The model's own tokenizer and chat template, and the hashes that say which ones they were."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hs_assets.errors import PromptError
from hs_assets.samples.conversations import Message

_FILES = ("tokenizer*", "*.model", "*.tiktoken", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class ChatTokenizer:
    """A tokenizer with its chat template.

    ``special_tokens`` are the texts that encode to one special id, longest first.
    """

    template: str
    tokenizer_sha256: str
    special_tokens: tuple[str, ...]
    _tokenizer: Any

    @property
    def template_sha256(self) -> str:
        return hashlib.sha256(self.template.encode()).hexdigest()

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a text, as far as the tokenizer says one."""
        found = self._tokenizer.eos_token_id
        return None if found is None else int(found)

    @property
    def has_offsets(self) -> bool:
        """Whether the tokenizer says which characters a token came from."""
        return bool(self._tokenizer.is_fast)

    @property
    def marks_generation(self) -> bool:
        """Whether the template itself marks what the assistant generates."""
        return _GENERATION.search(self.template) is not None

    def render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """The template's text for `messages`, with the opening of an assistant turn at the end if `prompt`.

        Raises:
            Exception: whatever the template raises on messages it refuses.
        """
        return self._render(messages, prompt)[0]

    def render_marked(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """The template's text, and the spans [start, end) of its characters that ``{% generation %}`` marks."""
        return self._render(messages, prompt=False)

    def _render(self, messages: Sequence[Message], prompt: bool) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        chat = [{"role": message.role, "content": message.content} for message in messages]
        texts, spans = render_jinja_template(
            conversations=[chat],
            chat_template=self.template,
            return_assistant_tokens_mask=self.marks_generation,
            add_generation_prompt=prompt,
            **self._tokenizer.special_tokens_map,
        )
        return texts[0], [(int(a), int(b)) for a, b in spans[0]] if spans else []

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered text; nothing is added to it."""
        return [int(i) for i in self._tokenizer.encode(text, add_special_tokens=False)]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids, and for each the characters [start, end) it came from."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return [int(i) for i in encoded["input_ids"]], [(int(a), int(b)) for a, b in encoded["offset_mapping"]]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens included."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def load_tokenizer(model: Path, *, trust_remote_code: bool = False) -> ChatTokenizer:
    """The tokenizer in a checkpoint's folder.

    Arguments:
        trust_remote_code: run Python code that lies in that folder; it is part of the hash then.

    Raises:
        PromptError: no tokenizer there, or one without a chat template.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that torch is not here
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model), trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise whatever a broken file makes them stumble over
        raise PromptError(
            "the model's tokenizer cannot be loaded",
            where=model,
            got=repr(error),
            remedy="check model.path; a tokenizer that is Python code needs model.trust_remote_code = true",
        ) from error
    if not isinstance(tokenizer.chat_template, str):
        raise PromptError(
            "the model has no chat template", where=model, expected="chat_template.jinja or an entry in tokenizer_config.json"
        )
    special = (str(added) for added in tokenizer.added_tokens_decoder.values() if added.special)
    return ChatTokenizer(
        template=tokenizer.chat_template,
        tokenizer_sha256=_hash_files(model, with_code=trust_remote_code),
        special_tokens=tuple(sorted(special, key=len, reverse=True)),
        _tokenizer=tokenizer,
    )


def _hash_files(model: Path, *, with_code: bool) -> str:
    patterns = (*_FILES, "*.py") if with_code else _FILES
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in model.glob(pattern) if path.is_file()}):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
