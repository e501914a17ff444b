"""Which rows of a batch belong to which request: checked against rows that carry their own names."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hs_assets.capture.batch import Segment, segments
from hs_assets.errors import RefusedError
from hs_assets.wire.rid import Kind, Rid
from hs_assets_tests.dump_material import make_rid

OURS = st.builds(
    Rid,
    st.sampled_from(Kind),
    st.sampled_from(["0123abcd", "ffffffff"]),
    st.sampled_from(["demo-00000", "a.0001.T5"]),
    st.integers(0, 20_000),
    st.integers(1, 9_000),
)
FOREIGN = st.sampled_from(["HEALTH_CHECK_17", "3f2b9c1e", "", "hs.s.nothex..0.T1", "hs.s.0123abcd.demo-00000.0000"])
REQUESTS = st.lists(st.tuples(OURS | FOREIGN, st.integers(0, 7), st.integers(0, 50)), max_size=12)
PADDING = st.lists(st.integers(0, 9), max_size=4)


@settings(deadline=None)
@given(REQUESTS, PADDING, PADDING)
def test_rows_find_their_requests(requests, more_lens, more_prefixes):
    rids = [str(rid) for rid, _, _ in requests]
    extend_lens = [rows for _, rows, _ in requests] + more_lens
    prefix_lens = [prefix for _, _, prefix in requests] + more_prefixes
    rows_of_batch = [(number, prefix + i) for number, (_, rows, prefix) in enumerate(requests) for i in range(rows)]

    found = segments(rids, extend_lens, prefix_lens)

    numbers = [rows_of_batch[segment.start][0] for segment in found]
    assert numbers == [number for number, (rid, rows, _) in enumerate(requests) if isinstance(rid, Rid) and rows > 0]
    for segment, number in zip(found, numbers, strict=True):
        assert segment.rid == requests[number][0]
        rows = rows_of_batch[segment.start : segment.start + segment.rows]
        assert rows == [(number, segment.prefix + i) for i in range(extend_lens[number])]


def test_lengths_37_and_4000_in_one_batch():
    short, long = make_rid(37, 0), make_rid(4000, 1)
    found = segments([str(short), "HEALTH_CHECK", str(long)], [37, 1, 4000], [0, 0, 0])
    assert found == [Segment(short, 0, 37, 0), Segment(long, 38, 4000, 0)]


def test_second_chunk_beside_a_new_prompt():
    long, new = make_rid(100, 0), make_rid(30, 1)
    found = segments([str(long), str(new)], [36, 28], [64, 0])
    assert found == [Segment(long, 0, 36, 64), Segment(new, 36, 28, 0)]


def test_pad_rows_at_the_end_are_nobodys():
    rid = make_rid(5)
    assert segments([str(rid)], [5, 3], [0, 0]) == [Segment(rid, 0, 5, 0)]
    assert segments([], [8], [0]) == []


@pytest.mark.parametrize(("extend_lens", "prefix_lens"), [([5], [0, 0]), ([5, 5], [0]), ([], [])])
def test_fewer_lengths_than_requests(extend_lens, prefix_lens):
    with pytest.raises(RefusedError, match="a batch has fewer lengths than requests") as caught:
        segments([str(make_rid(5, 0)), str(make_rid(5, 1))], extend_lens, prefix_lens)
    message = str(caught.value)
    assert "\n  expected: 2\n" in message
    assert f"\n  got: {len(extend_lens)} extend and {len(prefix_lens)} prefix lengths" in message
