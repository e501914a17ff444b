"""Rendered texts and the spans of them that are supervised → token ids and loss masks.

With a tokenizer that knows each token's characters a span is proven by the tokens at its two ends: they begin and end
there, and their neighbours join on. Without, the special tokens are found in the text and in the ids alike, and only what
stands between two of them and holds the edge of a span is encoded in parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hs_assets.samples.conversations import Dropped, Tokenized
from hs_assets.samples.tokenizer import ChatTokenizer

Spans = tuple[tuple[int, int], ...]
_BATCH = 256


def encode(rows: Sequence[tuple[str, Spans]], tokenizer: ChatTokenizer) -> list[Tokenized | Dropped]:
    """Ids and mask of each text, True on the tokens of its spans [start, end); every text is encoded once.

    A row is dropped with `mask_unsure` where a token lies across an edge, with `invalid_unicode` where it cannot be encoded.
    """
    made: list[Tokenized | Dropped] = []
    for start in range(0, len(rows), _BATCH):
        made += _encode_batch(rows[start : start + _BATCH], tokenizer)
    return made


def _encode_batch(rows: Sequence[tuple[str, Spans]], tokenizer: ChatTokenizer) -> list[Tokenized | Dropped]:
    broken = {index: dropped for index, (text, _) in enumerate(rows) if (dropped := _not_unicode(text)) is not None}
    whole = [row for index, row in enumerate(rows) if index not in broken]
    if tokenizer.has_offsets:
        encodings = tokenizer.encode_batch([text for text, _ in whole])
        pairs = zip(whole, encodings, strict=True)
        made = iter([_with_offsets(text, spans, encoding, tokenizer) for (text, spans), encoding in pairs])
    else:
        made = iter([_without_offsets(text, spans, tokenizer) for text, spans in whole])
    return [broken[index] if index in broken else next(made) for index in range(len(rows))]


def _not_unicode(text: str) -> Dropped | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return Dropped("invalid_unicode", f"the text as rendered: {error.reason} at character {error.start}")
    return None


def _with_offsets(text: str, spans: Spans, encoding: Any, tokenizer: ChatTokenizer) -> Tokenized | Dropped:
    ids = encoding.ids
    mask = [False] * len(ids)
    for start, end in spans:
        tokens = _tokens_of(encoding, start, end, len(text))
        if tokens is None:
            return _with_gaps(text, spans, encoding, tokenizer)
        mask[tokens[0] : tokens[1]] = [True] * (tokens[1] - tokens[0])
    return Tokenized(tuple(ids), tuple(mask))


def _tokens_of(encoding: Any, start: int, end: int, length: int) -> tuple[int, int] | None:
    """The tokens [first, last) of the characters [start, end), if tokens and characters meet at both edges."""
    first = 0 if start == 0 else encoding.char_to_token(start)
    after = len(encoding) if end == length else encoding.char_to_token(end)
    if first is None or after is None:
        return None
    for token, edge in ((first, start), (after, end)):
        if token > 0 and encoding.token_to_chars(token - 1)[1] != edge:
            return None
        if token < len(encoding) and encoding.token_to_chars(token)[0] != edge:
            return None
    return first, after


def _with_gaps(text: str, spans: Spans, encoding: Any, tokenizer: ChatTokenizer) -> Tokenized | Dropped:
    """For tokenizers that leave white space out of a token's characters: what is supervised has to decode to the spans."""
    mask = [False] * len(encoding)
    pending = iter(spans)
    span = next(pending, None)
    for index, (start, end) in enumerate(encoding.offsets):
        while span is not None and start >= span[1]:
            span = next(pending, None)
        if span is None or end <= span[0]:
            continue
        if start < span[0] or end > span[1]:
            return Dropped("mask_unsure", f"token {index} lies across the edge of an answer")
        mask[index] = True
    return _decoded(text, spans, Tokenized(tuple(encoding.ids), tuple(mask)), tokenizer)


def _decoded(text: str, spans: Spans, made: Tokenized, tokenizer: ChatTokenizer) -> Tokenized | Dropped:
    supervised = [i for i, flag in zip(made.input_ids, made.loss_mask, strict=True) if flag]
    wanted, got = "".join(text[start:end] for start, end in spans), tokenizer.decode(supervised)
    if tokenizer.decode(made.input_ids) != text:  # a tokenizer that adds or drops spaces as it decodes
        wanted, got = "".join(wanted.split()), "".join(got.split())
    return made if wanted == got else Dropped("mask_unsure", "the supervised tokens do not decode to the answers")


def _without_offsets(text: str, spans: Spans, tokenizer: ChatTokenizer) -> Tokenized | Dropped:
    ids = tokenizer.encode(text)
    edges = sorted({0, len(text), *(edge for span in spans for edge in span)})
    tokens = _edge_tokens(text, ids, edges, tokenizer)
    if tokens is None:
        return Dropped("mask_unsure", "the turns encode to other ids alone than in the conversation")
    mask = [False] * len(ids)
    for start, end in spans:
        mask[tokens[start] : tokens[end]] = [True] * (tokens[end] - tokens[start])
    return _decoded(text, spans, Tokenized(tuple(ids), tuple(mask)), tokenizer)


def _edge_tokens(text: str, ids: list[int], edges: list[int], tokenizer: ChatTokenizer) -> dict[int, int] | None:
    """For each edge, the number of tokens before it; None where a token may lie across one."""
    found = list(tokenizer.special_pattern.finditer(text))
    special_ids = set(tokenizer.special_tokens.values())
    where = [index for index, i in enumerate(ids) if i in special_ids]
    if [ids[index] for index in where] != [tokenizer.special_tokens[match.group()] for match in found]:
        return None
    tokens = {0: 0, len(text): len(ids)}
    for match, index in zip(found, where, strict=True):
        tokens[match.start()], tokens[match.end()] = index, index + 1
    known = sorted(tokens)
    for left, right in pairwise(known):
        inside = [edge for edge in edges if left < edge < right]
        if not inside:
            continue
        parts = [tokenizer.encode(text[a:b]) for a, b in pairwise([left, *inside, right])]
        if [i for part in parts for i in part] != ids[tokens[left] : tokens[right]]:
            return None
        position = tokens[left]
        for edge, part in zip(inside, parts, strict=False):
            position += len(part)
            tokens[edge] = position
    return tokens
