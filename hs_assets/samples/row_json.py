"""The bytes of one row → a JSON value, or a reason to drop it: nothing that two readers could understand differently.

Refused are other encodings than UTF-8, JSON that is cut or not JSON, keys that stand twice in an object, NaN and infinity,
and halves of surrogate pairs (``\\ud800`` alone is no character: no tokenizer can encode it).
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from hs_assets.samples.conversations import Dropped

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_LOOKED_AT = 80


class _RepeatedKeyError(ValueError):
    """A key stands twice in one object."""


def load_row(raw: bytes) -> Any | Dropped:
    """The JSON value of a row."""
    if not raw.strip():
        return Dropped("empty_row", "the line is empty")
    try:
        value = load_json(raw.decode("utf-8"))
        half = _lone_surrogate(value, "") if _SURROGATE_ESCAPE.search(raw) else None
    except UnicodeDecodeError as error:
        return Dropped("invalid_unicode", f"{_encoding(raw)}: {error.reason} at byte {error.start}")
    except _RepeatedKeyError as error:
        return Dropped("duplicate_key", str(error))
    except (ValueError, RecursionError) as error:
        utf16 = _looks_like_utf16(raw)
        return Dropped("invalid_unicode", f"{_encoding(raw)}: {error}") if utf16 else Dropped("invalid_json", _cleaned(error))
    return value if half is None else Dropped("invalid_unicode", f"half of a surrogate pair in {half}")


def load_json(text: str) -> Any:
    """The JSON value in a text.

    Raises:
        ValueError: it is not JSON, or means different things to different readers (a key twice, NaN, infinity).
        RecursionError: it is nested too deep.
    """
    return json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_finite)


def load_nested(text: str) -> Any:
    """The JSON value in a string of a row, or the string itself where it is not JSON that can be encoded again."""
    try:
        value = load_json(text)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return text
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _RepeatedKeyError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice in one object")
    return made


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"the number {number[:40]} is too large")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _cleaned(error: Exception) -> str:
    return str(error).encode("utf-8", "backslashreplace").decode()


def _encoding(raw: bytes) -> str:
    return "UTF-16, not UTF-8 (convert the file)" if _looks_like_utf16(raw) else "not UTF-8"


def _looks_like_utf16(raw: bytes) -> bool:
    """Whether there is a mark of UTF-16, or every second byte of the beginning is zero, as in UTF-16 of Latin letters."""
    start = raw[:_LOOKED_AT]
    few, many = sorted((start[::2].count(0), start[1::2].count(0)))
    return raw.startswith(_UTF16_MARKS) or (few == 0 and many >= max(2, len(start) // 2 - 1))


def _lone_surrogate(value: Any, where: str) -> str | None:
    """Where the first half of a surrogate pair stands, in the text itself or in the names of its fields."""
    if isinstance(value, str):
        half = _SURROGATE.search(value)
        return None if half is None else f"{where or 'the row'}, character {half.start()}"
    if isinstance(value, list):
        inner = (_lone_surrogate(item, f"{where}[{number}]") for number, item in enumerate(value))
        return next((found for found in inner if found), None)
    if isinstance(value, dict):
        for key, item in value.items():
            if _SURROGATE.search(key):
                return f"a key of {where or 'the row'}"
            if found := _lone_surrogate(item, f"{where}.{key}".lstrip(".")):
                return found
    return None
