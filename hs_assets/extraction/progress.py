"""How far a long work is, said every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

SAY_SECONDS = 10.0


class Progress:
    """Says every `SAY_SECONDS`, and at the end, how much is done of `total` things, how fast, and how long the rest takes."""

    def __init__(self, total: int, things: str, say: Callable[[str], None]) -> None:
        self._total, self._things, self._say = total, things, say
        self._began = self._said = time.monotonic()

    def tell(self, done: int, tokens: int) -> None:
        """Note that so many things, of so many tokens, are done by now."""
        now = time.monotonic()
        if now - self._said <= SAY_SECONDS and done < self._total:
            return
        self._said, seconds = now, max(now - self._began, 1e-9)
        left = f"{(self._total - done) * seconds / done:.0f} s left" if done else "none is done yet"
        self._say(f"{done} of {self._total} {self._things}, {tokens:,} tokens, {tokens / seconds:,.0f} tokens/s, {left}")
