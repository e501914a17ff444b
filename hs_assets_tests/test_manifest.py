"""Manifests: what is written is read back alike, every row is accounted for, and anything cut or newer is refused."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hs_assets.errors import StoreError, StoreVersionError
from hs_assets.store.layout import StorePaths
from hs_assets.store.manifest import (
    MANIFEST_VERSION,
    Ledger,
    Manifest,
    Part,
    PromptsVersion,
    StoredSample,
    UnstoredRow,
    find_manifest,
    manifests_of,
    read_manifest,
)

PART = Part("20260101T000000-0123abcd", 128, (2, 4, 8), (1.5, 2.25, 3.0), 2**32 - 1, "server-1", "run-1", 1_760_000_000.5)
SAMPLE = StoredSample("demo-00000/0000", 0, "a" * 64, 17, 5, "b" * 64, 0, (PART,))
DROPPED = UnstoredRow("demo-00000/0001", 1, "c" * 64, "dropped", "too_long", "9000 tokens", 0)
FAILED = UnstoredRow("demo-00000/0002", 2, "d" * 64, "failed", "finite", "slot 1, token 7", 2)
MANIFEST = Manifest(
    partition="demo-00000",
    layer_set="r2-4-8",
    state_fingerprint="0123456789abcdef",
    state_spec={"model_path": "m", "tensor_parallel": 8, "flags": {"chunk": [64, None]}},
    prompts=PromptsVersion("p" * 64, "demo", "/data/demo.jsonl", "t" * 64, "k" * 64),
    rows=3,
    samples=(SAMPLE,),
    unstored=(DROPPED, FAILED),
)

TEXT = st.text(max_size=8)
WHOLE = st.integers(0, 2**40)
REAL = st.floats(allow_nan=False, allow_infinity=False)
PARTS = st.builds(
    Part, TEXT, WHOLE, st.lists(WHOLE, max_size=3).map(tuple), st.lists(REAL, max_size=3).map(tuple), WHOLE, TEXT, TEXT, REAL
)
SAMPLES = st.builds(StoredSample, TEXT, WHOLE, TEXT, WHOLE, WHOLE, TEXT, WHOLE, st.lists(PARTS, max_size=2).map(tuple))
UNSTORED = st.builds(UnstoredRow, TEXT, WHOLE, TEXT, st.sampled_from(["dropped", "failed"]), TEXT, TEXT, WHOLE)
JSON = st.recursive(
    st.none() | st.booleans() | WHOLE | REAL | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
)


@st.composite
def manifests(draw):
    samples, unstored = draw(st.lists(SAMPLES, max_size=3)), draw(st.lists(UNSTORED, max_size=3))
    return Manifest(
        partition="demo-00000",
        layer_set="r2-4-8",
        state_fingerprint=draw(TEXT),
        state_spec=draw(st.dictionaries(TEXT, JSON, max_size=3)),
        prompts=draw(st.builds(PromptsVersion, TEXT, TEXT, TEXT, TEXT, TEXT)),
        rows=len(samples) + len(unstored),
        samples=tuple(dataclasses.replace(sample, sample_id=f"demo-00000/{row:04d}") for row, sample in enumerate(samples)),
        unstored=tuple(dataclasses.replace(row, sample_id=f"demo-00000/1{n:03d}") for n, row in enumerate(unstored)),
    )


@pytest.fixture
def paths(tmp_path):
    return StorePaths(tmp_path)


def refused(path, error=StoreError):
    with pytest.raises(error) as caught:
        read_manifest(path)
    assert f"\n  where: {path}" in str(caught.value)
    return str(caught.value)


def write_body(paths, change):
    """The manifest's file with its body changed; returns its path."""
    MANIFEST.write(paths)
    path = paths.manifest("r2-4-8", "demo-00000")
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))
    return path


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(manifests())
def test_round_trip(paths, manifest):
    manifest.write(paths)
    path = paths.manifest("r2-4-8", "demo-00000")
    assert read_manifest(path) == manifest
    assert not manifest.write(paths)
    assert read_manifest(path).write(paths) is False


def test_an_equal_manifest_is_not_written_again(paths):
    assert MANIFEST.write(paths)
    path = paths.manifest("r2-4-8", "demo-00000")
    before = path.stat()
    assert not MANIFEST.write(paths)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    changed = dataclasses.replace(MANIFEST, unstored=(DROPPED, dataclasses.replace(FAILED, attempts=3)))
    assert changed.write(paths)
    assert read_manifest(path) == changed


def test_ledger():
    assert MANIFEST.ledger == Ledger(3, 1, {"too_long": 1}, {"finite": 1})
    assert MANIFEST.ledger.as_json() == {"in": 3, "stored": 1, "dropped": {"too_long": 1}, "failed": {"finite": 1}}
    assert MANIFEST.ledger.balances
    assert not dataclasses.replace(MANIFEST, rows=4).ledger.balances


@settings(deadline=None)
@given(manifests(), st.integers(-3, 3))
def test_a_ledger_balances_only_where_every_row_is_listed(manifest, difference):
    changed = dataclasses.replace(manifest, rows=manifest.rows + difference)
    assert changed.ledger.balances == (difference == 0)
    assert changed.ledger.stored == len(manifest.samples)
    counts = {**changed.ledger.dropped, **{f"failed {reason}": n for reason, n in changed.ledger.failed.items()}}
    assert sum(counts.values()) == len(manifest.unstored)


@pytest.mark.parametrize(
    "manifest",
    [
        pytest.param(dataclasses.replace(MANIFEST, rows=4), id="a row is not listed"),
        pytest.param(dataclasses.replace(MANIFEST, rows=2), id="a row too many"),
        pytest.param(dataclasses.replace(MANIFEST, unstored=(DROPPED, DROPPED)), id="a row twice"),
        pytest.param(
            dataclasses.replace(MANIFEST, unstored=(DROPPED, dataclasses.replace(FAILED, sample_id=SAMPLE.sample_id))),
            id="stored and failed",
        ),
        pytest.param(dataclasses.replace(MANIFEST, samples=(SAMPLE, SAMPLE), unstored=(DROPPED,)), id="stored twice"),
    ],
)
def test_a_ledger_that_does_not_balance_is_not_written(paths, manifest):
    MANIFEST.write(paths)
    before = paths.manifest("r2-4-8", "demo-00000").read_bytes()
    with pytest.raises(StoreError, match="a ledger does not balance") as caught:
        manifest.write(paths)
    message = str(caught.value)
    assert f"\n  where: demo-00000\n  expected: {manifest.rows} rows, each once\n  got: {{'in': {manifest.rows}," in message
    assert paths.manifest("r2-4-8", "demo-00000").read_bytes() == before


def test_truncations_are_refused(paths):
    MANIFEST.write(paths)
    path = paths.manifest("r2-4-8", "demo-00000")
    data = path.read_bytes()
    for length in range(0, len(data), 3):
        path.write_bytes(data[:length])
        message = refused(path)
        assert "a manifest cannot be read" in message
        assert "\n  remedy: remove the file, then materialise the partition again" in message


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[]", b"null", b"{}", b'{"format": "hs-assets-view"}', bytes(100)])
def test_no_manifest(tmp_path, content):
    (tmp_path / "p.json").write_bytes(content)
    assert "a manifest cannot be read" in refused(tmp_path / "p.json")


def test_a_manifest_that_is_not_there(tmp_path):
    assert "a manifest cannot be read" in refused(tmp_path / "p.json")


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(version=MANIFEST_VERSION + 1),
        lambda body: body.update(version=MANIFEST_VERSION + 1, samples={"another": "form"}),
        lambda body: body.update(format="another-view"),
    ],
    ids=["newer", "newer and of another form", "another format"],
)
def test_another_version(paths, change):
    message = refused(write_body(paths, change), StoreVersionError)
    assert "not a manifest of this version" in message
    assert f"\n  expected: ('hs-assets-view', {MANIFEST_VERSION})\n  got: " in message


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda body: body.pop("partition"), id="field missing"),
        pytest.param(lambda body: body["samples"][0].pop("parts"), id="field of a sample missing"),
        pytest.param(lambda body: body["samples"][0]["parts"][0].pop("offset"), id="field of a part missing"),
        pytest.param(lambda body: body["prompts"].pop("version"), id="field of the prompts missing"),
        pytest.param(lambda body: body.update(rows="3"), id="rows as text"),
        pytest.param(lambda body: body.update(samples=None), id="no list"),
        pytest.param(lambda body: body.update(samples=[1]), id="a list of something else"),
        pytest.param(lambda body: body.update(state_spec=[]), id="spec is a list"),
        pytest.param(lambda body: body["samples"][0].update(tokens=17.5), id="half a token"),
        pytest.param(lambda body: body["samples"][0].update(sample_id=None), id="no id"),
        pytest.param(lambda body: body["samples"][0]["parts"][0].update(residual_ids=["2"]), id="ids as text"),
        pytest.param(lambda body: body["samples"][0]["parts"][0].update(norms=["x"]), id="norms as text"),
        pytest.param(lambda body: body["samples"][0]["parts"][0].update(captured_at="now"), id="time as text"),
    ],
)
def test_a_field_that_is_missing_or_of_another_type(paths, change):
    assert "a manifest cannot be read" in refused(write_body(paths, change))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda body: body.update(rows=4), id="a row is missing"),
        pytest.param(lambda body: body["unstored"].pop(), id="an unstored row was removed"),
        pytest.param(lambda body: body["samples"].clear(), id="the samples were removed"),
        pytest.param(lambda body: body["unstored"][0].update(outcome="lost"), id="an outcome that there is not"),
    ],
)
def test_a_file_whose_ledger_does_not_balance(paths, change):
    message = refused(write_body(paths, change))
    assert "a ledger does not balance" in message
    assert "\n  expected: " in message
    assert "\n  got: {'in': " in message


def test_whole_numbers_are_good_times(paths):
    path = write_body(paths, lambda body: body["samples"][0]["parts"][0].update(captured_at=7))
    assert read_manifest(path).samples[0].parts[0].captured_at == 7


def test_finding_manifests(paths):
    assert find_manifest(paths, "r2-4-8", "demo-00000") is None
    assert manifests_of(paths, "demo-00000") == []
    other_layers = dataclasses.replace(MANIFEST, layer_set="r1-8")
    other_partition = dataclasses.replace(MANIFEST, partition="demo-00001")
    for manifest in (MANIFEST, other_layers, other_partition):
        manifest.write(paths)
    (paths.views / "r2-4-8" / ".demo-00000.json.17.tmp").write_text("{")
    assert find_manifest(paths, "r2-4-8", "demo-00000") == MANIFEST
    assert find_manifest(paths, "r1-8", "demo-00001") is None
    assert manifests_of(paths, "demo-00000") == [other_layers, MANIFEST]
    assert manifests_of(paths, "demo-00001") == [other_partition]
