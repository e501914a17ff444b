"""Pieces of text: joined they are the whole, each says which ids it is, and none hides a character."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hs_assets.samples.prompts import Prompt
from hs_assets.samples.readable import Run, pieces, runs, visible
from hs_assets.samples.tokenizer import ChatTokenizer, from_transformers
from hs_assets_tests.small_tokenizer import CHATML, chat_tokenizer, stock


@pytest.fixture
def tokenizer(tmp_path: Path) -> ChatTokenizer:
    return chat_tokenizer(tmp_path, stock(CHATML))


def prompt_of(ids: list[int], mask: list[bool]) -> Prompt:
    return Prompt(0, np.asarray(ids, "<i4"), np.asarray(mask, bool), "")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(["für ", "👩‍💻", "字", "<|im_end|>", "a b", "\n\n", "\ufffd", "\0"]), max_size=12))
def test_joined_they_are_the_text_and_the_ids(tokenizer: ChatTokenizer, words: list[str]) -> None:
    text = "".join(words)
    ids = tokenizer.encode(text)
    made = list(pieces(prompt_of(ids, [True] * len(ids)), tokenizer))
    assert "".join(piece.text for piece in made) == text
    assert [i for piece in made for i in piece.ids] == ids


def test_a_character_of_several_tokens_is_one_piece_and_a_special_token_is_marked(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode("字<|im_end|>a")
    assert len(ids) == 5
    character, end, a = pieces(prompt_of(ids, [False] * 4 + [True]), tokenizer)
    assert (character.text, character.ids, character.special) == ("字", tuple(ids[:3]), False)
    assert (end.text, end.special, end.supervised) == ("<|im_end|>", True, False)
    assert (a.text, a.supervised) == ("a", True)


def test_a_mask_that_cuts_a_character_is_not_hidden(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode("字")
    made = list(pieces(prompt_of(ids, [False, True, True]), tokenizer))
    assert [(piece.ids, piece.supervised) for piece in made] == [((ids[0],), False), ((ids[1], ids[2]), True)]


def test_a_tokenizer_that_decodes_a_word_alone_without_its_space() -> None:
    """As SentencePiece does."""
    vocabulary = {"▁one": 0, "▁two": 1, "<unk>": 2}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, chat_template="")
    tokenizer = from_transformers(fast, "")
    assert tokenizer.decode([1]) == "two"
    assert [piece.text for piece in pieces(prompt_of([0, 1, 1], [True] * 3), tokenizer)] == ["one", " two", " two"]


def test_runs_join_what_is_alike_and_keep_special_tokens_apart(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode("one two<|im_end|><|im_end|>three")
    split = len(tokenizer.encode("one two"))
    made = runs(pieces(prompt_of(ids, [False] * split + [True] * (len(ids) - split)), tokenizer))
    assert made == [
        Run("one two", False, False),
        Run("<|im_end|>", True, True),
        Run("<|im_end|>", True, True),
        Run("three", True, False),
    ]


def test_control_characters_become_visible() -> None:
    assert visible("a\x1b[31m\0\r\n\tb\u2028\u202e\ud800 für 👩‍💻") == "a\\x1b[31m\\x00\\r\n\tb\\u2028\\u202e\\ud800 für 👩‍💻"
