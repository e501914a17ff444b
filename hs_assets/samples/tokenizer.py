"""The model's own tokenizer and chat template, and the hashes that say which ones they were."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hs_assets.errors import PromptError
from hs_assets.samples.template import ChatTemplate
from hs_assets.samples.template import template_sha256 as hash_of_template

_FILES = ("tokenizer*", "*.model", "*.tiktoken", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json")
_CONTROL = re.compile(r"^<[|｜].*>$|^<.*[|｜]>$")


class Table(dict[Hashable, Any]):
    """What was found out once; it starts anew where it holds as many entries as it may."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: Hashable, value: object) -> None:
        if len(self) >= self._most:
            self.clear()
        super().__setitem__(key, value)


@dataclass(frozen=True)
class ChatTokenizer:
    """A tokenizer with its chat template.

    ``special_tokens`` are the texts that encode to one special id, with that id, longest first; also those that are only
    written like one (``<｜User｜>``), which some vocabularies do not declare. ``bos`` is the text that the tokenizer puts
    before a plain text, if it does. ``known_turns`` is what `turns` found out about the template.
    """

    template: ChatTemplate
    tokenizer_sha256: str
    special_tokens: Mapping[str, int]
    bos: str | None
    _tokenizer: Any
    known_turns: Table = field(default_factory=lambda: Table(4096), compare=False, repr=False)

    @property
    def template_sha256(self) -> str:
        return self.template.sha256

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a text, as far as the tokenizer says one."""
        found = self._tokenizer.eos_token_id
        return None if found is None else int(found)

    @property
    def has_offsets(self) -> bool:
        """Whether the tokenizer says which characters a token came from."""
        return bool(self._tokenizer.is_fast)

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Any special token's text; where one begins another, the longer one."""
        return re.compile("|".join(map(re.escape, self.special_tokens)) or r"(?!)")

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered text; nothing is added to it."""
        return [int(i) for i in self._tokenizer.encode(text, add_special_tokens=False)]

    def encode_batch(self, texts: Sequence[str]) -> list[Any]:
        """`tokenizers.Encoding` of each rendered text, made on all cores; only where `has_offsets`."""
        encodings: list[Any] = self._tokenizer.backend_tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return encodings

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens included."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def load_tokenizer(model: Path, *, trust_remote_code: bool = False) -> ChatTokenizer:
    """The tokenizer in a checkpoint's folder.

    Arguments:
        trust_remote_code: run Python code that lies in that folder; it is part of the hash then.

    Raises:
        PromptError: no tokenizer there, or one without a chat template; of several templates the default one is taken.
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
    if isinstance(tokenizer.chat_template, dict):  # several, by name
        tokenizer.chat_template = tokenizer.chat_template.get("default")
    if not isinstance(tokenizer.chat_template, str):
        raise PromptError(
            "the model has no chat template", where=model, expected="chat_template.jinja or an entry in tokenizer_config.json"
        )
    return from_transformers(tokenizer, hash_files(model, with_code=trust_remote_code))


def from_transformers(tokenizer: Any, sha256: str) -> ChatTokenizer:
    """A tokenizer of transformers that has a chat template, with the hash of the files that it came from."""
    if tokenizer.is_fast:  # what tokenizer.json may ask for would cut or fill up rows without a word
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    added = {str(token): (int(i), token.special) for i, token in tokenizer.added_tokens_decoder.items()}
    special = {text: i for text, (i, is_special) in added.items() if is_special or _CONTROL.search(text)}
    bos, first = tokenizer.bos_token, tokenizer.encode("a", add_special_tokens=True)[:1]
    return ChatTokenizer(
        template=ChatTemplate(tokenizer.chat_template, dict(tokenizer.special_tokens_map)),
        tokenizer_sha256=sha256,
        special_tokens=dict(sorted(special.items(), key=lambda item: len(item[0]), reverse=True)),
        bos=bos if bos and first == [tokenizer.bos_token_id] else None,
        _tokenizer=tokenizer,
    )


def changed_since(model: Path, tokenizer_sha256: str, template_sha256: str, *, trust_remote_code: bool) -> str | None:
    """Whether the "tokenizer" or the "chat template" of a checkpoint is another than these hashes are of; None where neither is.

    The tokenizer is loaded only where the checkpoint's files leave a doubt.
    """
    same_files = hash_files(model, with_code=trust_remote_code) == tokenizer_sha256
    if same_files and (source := _template_in(model)) is not None and hash_of_template(source) == template_sha256:
        return None
    now = load_tokenizer(model, trust_remote_code=trust_remote_code)
    if now.tokenizer_sha256 != tokenizer_sha256:
        return "tokenizer"
    return "chat template" if now.template_sha256 != template_sha256 else None


def _template_in(model: Path) -> str | None:
    """The chat template in a checkpoint's files, where it is the only one."""
    if (model / "chat_template.jinja").exists():
        return (model / "chat_template.jinja").read_text(encoding="utf-8")
    path = model / "tokenizer_config.json"
    source = json.loads(path.read_text(encoding="utf-8")).get("chat_template") if path.exists() else None
    return source if isinstance(source, str) else None


def hash_files(model: Path, *, with_code: bool) -> str:
    """sha256 over the files of a checkpoint that make its tokenizer; with its code where that is trusted."""
    patterns = (*_FILES, "*.py") if with_code else _FILES
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in model.glob(pattern) if path.is_file()}):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
