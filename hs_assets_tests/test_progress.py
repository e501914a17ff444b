"""Progress in words, at a clock that the test turns."""

from __future__ import annotations

import pytest

from hs_assets.extraction.progress import Progress


def test_a_line_every_ten_seconds_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    progress = Progress(40, "requests", said.append)
    for seconds, done, tokens in ((5, 1, 500), (10.5, 0, 0), (15, 5, 2500), (21, 10, 21_000), (40, 40, 80_000)):
        now = 100.0 + seconds
        progress.tell(done, tokens)
    assert said == [
        "0 of 40 requests, 0 tokens, 0 tokens/s, none is done yet",
        "10 of 40 requests, 21,000 tokens, 1,000 tokens/s, 63 s left",
        "40 of 40 requests, 80,000 tokens, 2,000 tokens/s, 0 s left",
    ]
