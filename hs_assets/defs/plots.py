"""Plots in plain text, for metadata that the UI shows as Markdown."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import dagster as dg
import numpy as np

_BINS, _WIDTH = 12, 40


def histogram(values: Sequence[int], label: str) -> dg.MarkdownMetadataValue:
    """How many values lie in each of some bins of equal width, whole numbers; `label` says what they are."""
    if not values:
        return dg.MarkdownMetadataValue(f"no {label}")
    low, high = min(values), max(values)
    edges = np.unique(np.linspace(low, high + 1, _BINS + 1).round().astype(int))
    counts, _ = np.histogram(values, edges)
    names = [f"{start:,}" if end - 1 == start else f"{start:,}–{end - 1:,}" for start, end in pairwise(edges)]
    bars = {name: int(count) for name, count in zip(names, counts, strict=True)}
    return bar_chart(bars, label, "samples")


def bar_chart(bars: Mapping[str, float], label: str, unit: str) -> dg.MarkdownMetadataValue:
    """A table with a bar for each value; the longest is the largest."""
    most = max(bars.values(), default=0) or 1
    lines = [f"| {_unbroken(label)} | {_unbroken(unit)} | |", "|---:|---:|:---|"]
    lines += [f"| {_unbroken(name)} | {value:,} | {'█' * round(_WIDTH * value / most)} |" for name, value in bars.items()]
    return dg.MarkdownMetadataValue("\n".join(lines))


def _unbroken(text: str) -> str:
    """The text as the pages do not break it over two lines."""
    return text.replace(" ", "\N{NO-BREAK SPACE}").replace("–", "\N{WORD JOINER}–\N{WORD JOINER}")
