"""Which rows of a prefill batch belong to which request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hs_assets.errors import RefusedError
from hs_assets.wire.rid import Rid, parse_rid


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows ``start .. start + rows`` of a batch: tokens ``prefix .. prefix + rows`` of the prompt of `rid`."""

    rid: Rid
    start: int
    rows: int
    prefix: int


def segments(rids: Sequence[str], extend_lens: Sequence[int], prefix_lens: Sequence[int]) -> list[Segment]:
    """Our requests in a batch whose rows are concatenated in the order of `rids`.

    Arguments:
        rids: every request of the batch, ours or not.
        extend_lens: tokens of each that this batch computes; may be longer than `rids` where the batch is padded.
        prefix_lens: tokens of each that were computed before (an earlier chunk; the radix cache is off).
    """
    if len(extend_lens) < len(rids) or len(prefix_lens) < len(rids):
        raise RefusedError(
            "a batch has fewer lengths than requests",
            where="forward batch",
            expected=len(rids),
            got=f"{len(extend_lens)} extend and {len(prefix_lens)} prefix lengths",
        )
    found, start = [], 0
    for text, rows, prefix in zip(rids, extend_lens[: len(rids)], prefix_lens[: len(rids)], strict=True):
        rid = parse_rid(text)
        if rid is not None and rows > 0:
            found.append(Segment(rid, start, rows, prefix))
        start += rows
    return found
