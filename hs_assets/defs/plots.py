"""Plots in plain text, for metadata that the UI shows as Markdown."""

from collections.abc import Mapping, Sequence

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
    bars = {f"{start:,} – {end - 1:,}": int(count) for start, end, count in zip(edges, edges[1:], counts, strict=False)}
    return bar_chart(bars, label, "samples")


def bar_chart(bars: Mapping[str, float], label: str, unit: str) -> dg.MarkdownMetadataValue:
    """A table with a bar for each value; the longest is the largest."""
    most = max(bars.values(), default=0) or 1
    lines = [f"| {label} | {unit} | |", "|---:|---:|:---|"]
    lines += [f"| {name} | {value:,} | {'█' * round(_WIDTH * value / most)} |" for name, value in bars.items()]
    return dg.MarkdownMetadataValue("\n".join(lines))
