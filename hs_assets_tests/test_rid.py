"""Request ids: one text, one meaning, and nobody else's traffic is taken for ours."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hs_assets.errors import WireError
from hs_assets.wire.rid import MAX_PARTITION_CHARS, Kind, Rid, is_partition_key, new_rid, parse_rid, sample_id
from hs_assets_tests.dump_material import made_spool

CHARACTERS = string.ascii_letters + string.digits + "._-"
PARTITIONS = st.text(CHARACTERS, min_size=1, max_size=MAX_PARTITION_CHARS).filter(lambda text: text not in {".", ".."})
RIDS = st.builds(
    Rid,
    st.sampled_from(Kind),
    st.text("0123456789abcdef", min_size=8, max_size=8),
    PARTITIONS | st.sampled_from(["a.0001.T5", "hs.s.9f2c01ab.a.0001.T5", "x.0001", "0001"]),
    st.integers(0, 10**7),
    st.integers(1, 10**7),
)


def test_text_of_a_request_id():
    rid = Rid(Kind.SAMPLE, "9f2c01ab", "demo-00003", 17, 512)
    assert str(rid) == "hs.s.9f2c01ab.demo-00003.0017.T512"
    assert parse_rid("hs.s.9f2c01ab.demo-00003.0017.T512") == rid
    assert parse_rid("hs.c.9f2c01ab.demo-00003.0017.T512").kind is Kind.CANARY


@settings(deadline=None)
@given(RIDS)
def test_parse_is_the_inverse_of_str(rid):
    assert parse_rid(str(rid)) == rid


@settings(deadline=None)
@given(RIDS, RIDS)
def test_different_requests_have_different_texts(one, other):
    assert (str(one) == str(other)) == (one == other)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("HEALTH_CHECK_1722", id="health check"),
        pytest.param("3f2b9c1e5d7a4b0e8c6f1a2b3c4d5e6f", id="SGLang's own"),
        pytest.param("hs.x.9f2c01ab.demo-00003.0017.T512", id="unknown kind"),
        pytest.param("hs.s.9F2C01AB.demo-00003.0017.T512", id="upper-case nonce"),
        pytest.param("hs.s.9f2c01a.demo-00003.0017.T512", id="short nonce"),
        pytest.param("hs.s.9f2c01ab.demo/00003.0017.T512", id="a path"),
        pytest.param("hs.s.9f2c01ab..0017.T512", id="no partition"),
        pytest.param("hs.s.9f2c01ab.demo-00003.017.T512", id="short row"),
        pytest.param("hs.s.9f2c01ab.demo-00003.0017.512", id="no T"),
        pytest.param("hs.s.9f2c01ab.demo-00003.0017.T", id="no length"),
        pytest.param("hs.s.9f2c01ab.demo-00003.0017.T-5", id="negative length"),
        pytest.param("hs.s.9f2c01ab.demo-00003.0017.T512 ", id="space behind"),
        pytest.param("hs.s.9f2c01ab.demo-00003.0017.T512\n", id="line break behind"),
        pytest.param(" hs.s.9f2c01ab.demo-00003.0017.T512", id="space before"),
        pytest.param("hs.s.9f2c01ab." + "p" * (MAX_PARTITION_CHARS + 1) + ".0017.T512", id="partition too long"),
    ],
)
def test_other_peoples_requests(text):
    assert parse_rid(text) is None


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("hs.s.9f2c01ab.demo-00003.0017.T0512", id="zero before the length"),
        pytest.param("hs.s.9f2c01ab.demo-00003.00017.T512", id="zero before the row"),
        pytest.param("hs.s.9f2c01ab.demo-00003.٠٠١٧.T512", id="row in Arabic digits"),
        pytest.param("hs.s.9f2c01ab.demo-00003.0017.T٥١٢", id="length in Arabic digits"),
    ],
)
def test_a_dump_would_lie_under_another_name(text):
    """The plugin names the files of a request by the text of the parsed id; so only that very text is one of ours."""
    assert parse_rid(text) is None


def test_new_request_ids():
    rids = [new_rid("demo-00003", 17, 512) for _ in range(50)]
    assert all((r.kind, r.partition, r.row, r.length) == (Kind.SAMPLE, "demo-00003", 17, 512) for r in rids)
    assert all(re.fullmatch("[0-9a-f]{8}", r.nonce) for r in rids)
    assert len({r.nonce for r in rids}) == 50
    assert new_rid("demo-00003", 17, 512, Kind.CANARY).kind is Kind.CANARY


def test_retry_differs_in_the_nonce_alone():
    rid = new_rid("demo-00003", 17, 512)
    again = rid.retry()
    assert again.nonce != rid.nonce
    assert (again.kind, again.partition, again.row, again.length) == (rid.kind, rid.partition, rid.row, rid.length)


def test_sample_id():
    assert sample_id("demo-00003", 17) == "demo-00003/0017"
    assert new_rid("demo-00003", 17, 512).sample_id == "demo-00003/0017"
    assert sample_id("demo-00003", 12345) == "demo-00003/12345"


@pytest.mark.parametrize(
    "key", ["", ".", "..", "a/b", "a,b", "a b", "a\nb", "a\n", "é", "p" * (MAX_PARTITION_CHARS + 1), "a\\b", "a\0"]
)
def test_no_partition_key(key):
    assert not is_partition_key(key)
    with pytest.raises(WireError, match="not a partition key") as caught:
        new_rid(key, 0, 1)
    assert "\n  expected: [A-Za-z0-9._-]{1,150}" in str(caught.value)


@pytest.mark.parametrize("key", ["demo-00003", "a", "...", "A_b.c-9", "p" * MAX_PARTITION_CHARS])
def test_partition_key(key):
    assert is_partition_key(key)


def test_the_longest_id_still_names_files(tmp_path):
    spool = made_spool(tmp_path / "spool")
    files = spool.dump(f"{new_rid('p' * MAX_PARTITION_CHARS, 10**7, 10**7)}.probe")
    for path in (files.data, files.commit, files.failure, files.claim, files.answer):
        path.with_name(f".{path.name}.{2**22}.tmp").touch()
        path.touch()
    assert len(list(spool.dumps.iterdir())) == 10


@pytest.mark.parametrize("digits", [10, 5000])
def test_numbers_that_no_request_has_are_not_ours(digits):
    """An id comes from whoever can reach the server; no id may raise there."""
    assert parse_rid(f"hs.s.00000000.x.{'1' * digits}.T1") is None
    assert parse_rid(f"hs.s.00000000.x.0001.T{'1' * digits}") is None
