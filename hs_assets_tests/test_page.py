"""The page of a partition, read by an HTML parser: the mask is where the table says, and no row can break out of its text."""

from __future__ import annotations

import hashlib
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hs_assets.samples.filters import PromptLimits
from hs_assets.samples.page import render_page
from hs_assets.samples.prepare import make_partition
from hs_assets.samples.prompts import PromptPartition
from hs_assets.samples.sources import Source, SourceRow
from hs_assets.samples.tokenizer import ChatTokenizer
from hs_assets_tests.small_tokenizer import CHATML, chat_tokenizer, json_row, stock

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)> &lt; ]]> \"'"
VOID = {"meta", "br", "img", "link"}


class Page(HTMLParser):
    """What a browser would see: which tags, and the text in each."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.samples: list[str] = []
        self.texts: list[str] = []
        self.marked: list[str] = []
        self.special: list[str] = []
        self.cells: list[str] = []
        self._open: list[tuple[str, str]] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self._open.append((tag, dict(attrs).get("class") or ""))
        if tag == "pre":
            self.texts.append("")
            self.marked.append("")
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        tags = [tag for tag, _ in self._open]
        if "h2" in tags:
            self.samples.append(data)
        if "td" in tags:
            self.cells[-1] += data
        if "pre" in tags:
            first = self.texts[-1] == ""
            self.texts[-1] += data.removeprefix("\n") if first else data  # a browser drops the line break after <pre>
            self.marked[-1] += data if "mark" in tags else ""
            self.special += [data] if ("span", "special") in self._open else []


@pytest.fixture
def tokenizer(tmp_path: Path) -> ChatTokenizer:
    return chat_tokenizer(tmp_path, stock(CHATML))


def partition_of(tokenizer: ChatTokenizer, *raws: bytes) -> PromptPartition:
    rows = [SourceRow(number, raw, hashlib.sha256(raw).hexdigest(), None) for number, raw in enumerate(raws)]
    return make_partition("demo-00000", Source("demo", Path("/data/<b>.jsonl")), rows, tokenizer, PromptLimits(400, 482))


def test_the_marked_text_is_the_supervised_tokens(tokenizer: ChatTokenizer) -> None:
    rows = [
        json_row(("user", "first"), ("assistant", "an answer\n\nwith lines")),
        json_row(("user", "middle"), ("assistant", "which is neither")),
        json_row(("user", "long " * 20), ("assistant", "longest")),
        json_row(("user", "low " * 15), ("assistant", "a")),
        json_row(("user", "h"), ("assistant", "much of it is an answer, and so the share is high")),
    ]
    made = partition_of(tokenizer, *rows)
    page = Page(render_page(made, tokenizer))
    by_share = sorted(made.prompts, key=lambda prompt: prompt.loss_mask.mean())
    longest = max(made.prompts, key=lambda prompt: len(prompt.input_ids))
    chosen = sorted({0, longest.row, by_share[0].row, by_share[-1].row})
    assert page.samples == [f"demo-00000/{row:04d}" for row in chosen]
    for row, text, marked in zip(chosen, page.texts, page.marked, strict=True):
        prompt = made.prompts[row]
        assert text == tokenizer.decode(prompt.input_ids.tolist())
        assert marked == tokenizer.decode(prompt.input_ids[prompt.loss_mask].tolist())
    assert set(page.special) == {"<|im_start|>", "<|im_end|>"}
    html = render_page(made, tokenizer)
    assert f"{len(longest.input_ids)} tokens, {int(longest.loss_mask.sum())} supervised ({longest.loss_mask.mean():.1%})" in html


def test_no_row_breaks_out_of_its_text(tokenizer: ChatTokenizer) -> None:
    role = HOSTILE.replace("'", "")
    bad = json_row((role, "one"), ("assistant", "two"))
    made = partition_of(tokenizer, json_row(("user", HOSTILE), ("assistant", f"\0\x1b{HOSTILE}")), bad)
    page = Page(render_page(made, tokenizer))
    assert HOSTILE in page.texts[0]
    assert page.marked[0].startswith("\\x00\\x1b" + HOSTILE)
    assert any(role in cell for cell in page.cells)
    assert not {"script", "img", "link", "iframe", "b", "a"} & set(page.tags)
    assert not {name for name, _ in page.attributes} & {"src", "href", "onerror", "style"}


def test_dropped_rows_show_each_reason_first(tokenizer: ChatTokenizer) -> None:
    made = partition_of(tokenizer, *[b""] * 7, b"{", b"[]")
    page = Page(render_page(made, tokenizer))
    assert (page.texts, len(page.cells)) == ([], 5 * 4)
    assert page.cells[2::4] == ["empty_row", "invalid_json", "unknown_format", "empty_row", "empty_row"]
    assert page.samples[0] == "9 dropped rows"


def test_an_empty_partition_has_a_page(tokenizer: ChatTokenizer) -> None:
    assert "0 rows" in render_page(partition_of(tokenizer), tokenizer)
