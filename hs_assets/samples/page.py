"""A web page of a few rows of a partition, with what is supervised marked: one file, without scripts."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from itertools import islice

from hs_assets.samples.conversations import Dropped
from hs_assets.samples.prompts import Prompt, PromptPartition, PromptRow
from hs_assets.samples.readable import Run, pieces, runs, visible
from hs_assets.samples.tokenizer import ChatTokenizer

_MOST_PIECES = 20_000
_DROPPED_ROWS = 5

_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1b1f24; --dim: #59636e; --line: #d1d9e0; --mark: #b7ebc6; --special: #6639ba; }
@media (prefers-color-scheme: dark) {
  :root { --back: #0d1117; --text: #e6edf3; --dim: #9198a1; --line: #3d444d; --mark: #1c5530; --special: #c9a7ff; }
}
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .2rem; }
p, dl { color: var(--dim); margin: .2rem 0 .6rem; overflow-wrap: anywhere; }
pre { border: 1px solid var(--line); border-radius: 6px; font: 13px/1.6 ui-monospace, monospace; overflow-wrap: anywhere; padding: .8rem; white-space: pre-wrap; }
mark { background: var(--mark); color: inherit; }
.special { color: var(--special); font-weight: 600; outline: 1px solid var(--line); border-radius: 3px; }
table { border-collapse: collapse; } td, th { border-bottom: 1px solid var(--line); overflow-wrap: anywhere; padding: .3rem .8rem .3rem 0; text-align: left; vertical-align: top; }
"""  # noqa: E501

_LEGEND = (
    '<p>Legend: <mark>supervised</mark>, not supervised, <span class="special">special token</span>; '
    "control characters are written as \\x…</p>"
)


def render_page(partition: PromptPartition, tokenizer: ChatTokenizer) -> str:
    """The page as HTML."""
    made_of = (
        f"Prompts version {partition.version}, template {partition.template_sha256[:12]}, "
        f"tokenizer {partition.tokenizer_sha256[:12]}."
    )
    counts = f"{len(partition.prompts)} prompts, {sum(partition.dropped.values())} dropped"
    body = [
        f"<h1>{_text(partition.key)}</h1>",
        f"<p>{len(partition.rows)} rows of {_text(str(partition.source.path))}: {counts}. {made_of}</p>",
        _LEGEND,
        *(_prompt(row, prompt, why, tokenizer) for row, prompt, why in _chosen(partition)),
        _dropped(partition),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(partition.key)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _chosen(partition: PromptPartition) -> list[tuple[PromptRow, Prompt, str]]:
    """The rows that are shown, each once, and why: the first, the longest, and those of least and most supervision."""
    kept = [(row, row.content) for row in partition.rows if isinstance(row.content, Prompt)]
    if not kept:
        return []
    picks = [
        ("first", kept[0]),
        ("longest", max(kept, key=lambda one: len(one[1].input_ids))),
        ("lowest share", min(kept, key=lambda one: _share(one[1]))),
        ("highest share", max(kept, key=lambda one: _share(one[1]))),
    ]
    reasons: dict[str, list[str]] = {}
    for why, (row, _) in picks:
        reasons.setdefault(row.sample_id, []).append(why)
    return [(row, prompt, ", ".join(reasons[row.sample_id])) for row, prompt in kept if row.sample_id in reasons]


def _share(prompt: Prompt) -> float:
    return float(prompt.loss_mask.mean())


def _prompt(row: PromptRow, prompt: Prompt, why: str, tokenizer: ChatTokenizer) -> str:
    length = len(prompt.input_ids)
    supervised = f"{int(prompt.loss_mask.sum()):,} supervised ({_share(prompt):.1%})"
    finishes = f", answered by {row.origin.answered_by} ({', '.join(row.origin.finish_reasons)})"
    answered = _text(finishes) if row.origin.finish_reasons else ""
    turn = f", turn {row.turn} alone" if row.turn is not None else ""
    facts = f"{why}; source row {row.source_row}{turn}, {length:,} tokens, {supervised}{answered}"
    shown = list(islice(pieces(prompt, tokenizer), _MOST_PIECES))
    left = length - sum(len(piece.ids) for piece in shown)
    rest = f"<p>… and {left:,} more tokens</p>" if left else ""
    # An HTML parser drops a line break that follows <pre> at once.
    return f"<h2>{_text(row.sample_id)}</h2>\n<p>{facts}</p>\n<pre>\n{_overlay(runs(iter(shown)))}</pre>{rest}"


def _overlay(given: Iterable[Run]) -> str:
    parts = []
    for run in given:
        text = f'<span class="special">{_text(run.text)}</span>' if run.special else _text(run.text)
        parts.append(f"<mark>{text}</mark>" if run.supervised else text)
    return "".join(parts)


def _dropped(partition: PromptPartition) -> str:
    """Some dropped rows: first one of each reason, then more, as far as there is room."""
    rows = [(row, row.content) for row in partition.rows if isinstance(row.content, Dropped)]
    if not rows:
        return ""
    firsts = {content.reason: row.sample_id for row, content in reversed(rows)}
    rows.sort(key=lambda one: (firsts[one[1].reason] != one[0].sample_id, one[0].row))
    lines = "\n".join(
        f"<tr><td>{_text(row.sample_id)}</td><td>{row.source_row}</td><td>{_text(content.reason)}</td>"
        f"<td>{_text(content.detail[:300])}</td></tr>"
        for row, content in rows[:_DROPPED_ROWS]
    )
    title = f"<h2>{len(rows)} dropped rows</h2>" + (f"\n<p>{_DROPPED_ROWS} of them:</p>" if len(rows) > _DROPPED_ROWS else "")
    return f"{title}\n<table>\n<tr><th>sample</th><th>source row</th><th>reason</th><th>detail</th></tr>\n{lines}\n</table>"


def _text(text: str) -> str:
    return escape(visible(text))
