"""Real public files: every row that another reader sees is a prompt with just its words, or is dropped with the right reason."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from hs_assets.errors import PromptError
from hs_assets.samples.conversations import Conversation, Dropped
from hs_assets.samples.filters import PromptLimits
from hs_assets.samples.formats import parse_row
from hs_assets.samples.prepare import make_partition
from hs_assets.samples.prompts import PromptRow
from hs_assets.samples.sources import Partitioning, Source, partition_keys, read_partition, refresh
from hs_assets.samples.tokenizer import ChatTokenizer
from hs_assets_tests.small_tokenizer import CHATML, SPECIAL_TOKENS, chat_tokenizer, stock

DATA = Path(os.environ.get("HS_ASSETS_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"no {DATA}, the public input files (HS_ASSETS_TEST_DATA)")

CHATS = sorted(path for path in DATA.glob("conversations/**/*") if path.is_file() and path.suffix != ".csv")
ENCODINGS = sorted(DATA.glob("encodings/*.json"))
LIMITS = PromptLimits(max_tokens=10**7, vocab_size=1 << 20)
ABOUT_MASKS = {"special_token_in_content", "mask_unsure", "template_error", "not_rendered"}
"""Reasons of the masks, whose own tests say when they are right."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("model"), stock(CHATML))


def rows_of(path: Path, folder: Path, tokenizer: ChatTokenizer) -> list[PromptRow]:
    """What becomes of all rows of a file."""
    source = Source("demo", path)
    keys = partition_keys(refresh(folder, [source], Partitioning(64, 10**9)))
    return [
        row for key in keys for row in make_partition(key, source, read_partition(folder, source, key), tokenizer, LIMITS).rows
    ]


@cache
def seen_by_others(path: Path) -> list[Any]:
    """The rows as `json` and `pyarrow` read them; what they refuse is None."""
    if path.suffix == ".parquet":
        return list(pq.read_table(path).to_pylist())
    try:
        whole = json.loads(path.read_bytes())
        return whole if isinstance(whole, list) else [whole]
    except (ValueError, RecursionError):
        return [_line(line) for line in path.read_bytes().removesuffix(b"\n").split(b"\n")]


def _line(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def spoken(row: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
    """Who says what, read with the knowledge of these files alone; None where it is no text."""
    for turn in row.get("messages", row.get("conversations", ())):
        content = turn.get("content", turn.get("value"))
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        for part in parts:
            yield turn.get("role", turn.get("from")), part.get("text", part.get("value")) if part["type"] == "text" else None
    if "question" in row:
        yield from (("user", row["question"]), ("assistant", row["answer"]))
    if "instruction" in row:
        yield from (("user", row["instruction"]), ("user", row["input"]), ("assistant", row["output"]))
    for text in row.get("turns", ()):
        yield "user", text
    for turn in row.get("prompt", ()):
        yield "user", turn["content"]
    if "text" in row:
        yield "assistant", row["text"]


def is_assistant(role: str) -> bool:
    return role.lower() in {"assistant", "gpt"}


def expected_reasons(rows: list[Any]) -> list[str | None]:
    """Why each row must be dropped, if it must; "masks" where it hangs on the template."""
    reasons: list[str | None] = []
    before: set[str] = set()
    for row in rows:
        said = list(spoken(row)) if isinstance(row, dict) else []
        key = json.dumps(row)
        if row is None:
            reasons.append("unreadable")
        elif key in before:
            reasons.append("duplicate")
        elif "input_ids" in row:
            reasons.append(None if any(row["loss_mask"]) else "no_supervised_tokens")
        elif row.get("tools") or any("tool_calls" in turn for turn in row.get("conversations", ())):
            reasons.append("masks")
        elif any(text is None for _, text in said):
            reasons.append("multimodal")
        elif not any(is_assistant(role) for role, _ in said):
            reasons.append("no_assistant_turn")
        elif not all(text for _, text in said) and "instruction" not in row:
            reasons.append("empty_turn")
        elif any(token in (text or "") for token in SPECIAL_TOKENS for _, text in said):
            reasons.append("masks")
        else:
            reasons.append(None)
        before.add(key)
    return reasons


@pytest.mark.parametrize("path", CHATS, ids=lambda path: path.name)
def test_every_row_of_a_public_file(path: Path, tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    rows, theirs = rows_of(path, tmp_path, tokenizer), seen_by_others(path)
    assert [number for number, _ in Counter(row.source_row for row in rows).items()] == list(range(len(theirs)))
    unsure = 0
    reasons = expected_reasons(theirs)
    for row in rows:
        reason = reasons[row.source_row]
        if not isinstance(row.content, Dropped):
            assert reason in {None, "masks"}, row.sample_id
            check_words(row, theirs[row.source_row], tokenizer)
        elif row.content.reason in ABOUT_MASKS:
            assert reason in {None, "masks"}, row.content
            unsure += reason is None
        elif reason == "unreadable":
            assert row.content.reason in {"invalid_json", "empty_row"}
        elif reason == "masks":
            assert row.content.reason == "unreadable_tool_call", row.content
        else:
            assert row.content.reason == reason, row.content
    assert unsure <= len(rows) // 20
    print(path.name, dict(Counter(row.content.reason if isinstance(row.content, Dropped) else "kept" for row in rows)))


def test_a_sheet_is_said_to_be_one(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    (path,) = DATA.glob("conversations/*.csv")
    with pytest.raises(PromptError, match=r"it is a sheet of cells(.|\n)*remedy: convert it"):
        rows_of(path, tmp_path, tokenizer)


def check_words(row: PromptRow, theirs: dict[str, Any], tokenizer: ChatTokenizer) -> None:
    """The prompt holds all that is said, in order, and supervises what the assistant says."""
    assert not isinstance(row.content, Dropped)
    if "input_ids" in theirs:
        assert row.content.input_ids.tolist() == theirs["input_ids"]
        assert row.content.loss_mask.tolist() == [bool(flag) for flag in theirs["loss_mask"]]
        return
    if row.turn is not None:
        return
    text = tokenizer.decode(row.content.input_ids.tolist())
    supervised = tokenizer.decode(row.content.input_ids[row.content.loss_mask].tolist())
    at = learned = 0
    for role, words in spoken(theirs):
        words = (words or "").strip()
        at = text.index(words, at) + len(words)
        if is_assistant(role):
            learned = supervised.index(words, learned) + len(words)


@pytest.mark.parametrize("name", ["glaive_toolcall_en_demo.json", "reason_tool_use_demo_50.jsonl"])
def test_tools_and_calls_of_public_files(name: str) -> None:
    """Each call and each tool that `json` finds is in the conversation."""
    (path,) = DATA.glob(f"conversations/*{name}")
    for row in seen_by_others(path):
        parsed = parse_row(json.dumps(row).encode()).content
        assert isinstance(parsed, Conversation)
        theirs = []
        for turn in row.get("messages", row.get("conversations")):
            content = turn.get("content", turn.get("value"))
            theirs += [json.loads(content)] if turn.get("from") == "function_call" else []
            theirs += [json.loads(part["value"]) for part in content if isinstance(part, dict) and part["type"] == "tool_call"]
        ours = [{"name": call.name, "arguments": call.arguments} for turn in parsed.messages for call in turn.tool_calls]
        assert ours == theirs
        tools = json.loads(row["tools"]) if row["tools"] else []
        assert [tool["function"]["name"] for tool in parsed.tools] == [tool.get("function", tool)["name"] for tool in tools]


@pytest.mark.parametrize("path", ENCODINGS, ids=lambda path: path.name.removeprefix("test_parsing__"))
def test_odd_encodings(path: Path, tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    """None of these holds a conversation: each row has a reason, and none that JSON forbids passes as read."""
    rows = rows_of(path, tmp_path, tokenizer)
    reasons = Counter(row.content.reason for row in rows if isinstance(row.content, Dropped))
    assert sum(reasons.values()) == len(rows)
    if path.name.startswith("test_parsing__n_") or path.name.startswith("blns") or "_y_" in path.name:
        assert len(rows) == len(seen_by_others(path))
    broken = {"invalid_json", "invalid_unicode", "duplicate_key", "empty_row"}
    if path.name.startswith("test_parsing__n_"):
        assert set(reasons) <= broken
    elif path.name.startswith("test_parsing__y_"):
        assert set(reasons) == {"duplicate_key" if "duplicated_key" in path.name else "unknown_format"}
    elif "utf16" in path.name or "UTF-16" in path.name:
        assert set(reasons) == {"invalid_unicode"}
