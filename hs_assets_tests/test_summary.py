"""The counts in a manifest's head are those of the rows that it lists, and are read without them."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings

from hs_assets.errors import StoreError, StoreVersionError
from hs_assets.store import summary
from hs_assets.store.layout import StorePaths
from hs_assets.store.summary import find_summary
from hs_assets_tests.test_manifest import DROPPED, MANIFEST, manifests

LAYER_SET, KEY = "r2-4-8", "demo-00000"


def counted(path):
    """What the rows in the file amount to, counted one by one."""
    body = json.loads(path.read_text())
    outcomes = Counter((row["outcome"], row["reason"]) for row in body["unstored"])
    return {
        "state_fingerprint": body["state_fingerprint"],
        "ledger": {
            "rows": body["rows"],
            "stored": len(body["samples"]),
            **{which: {r: n for (outcome, r), n in outcomes.items() if outcome == which} for which in ("dropped", "failed")},
        },
        "tokens": sum(sample["tokens"] for sample in body["samples"]),
        "source_rows": len({row["source_row"] for row in body["samples"] + body["unstored"]}),
    }


@pytest.fixture
def paths(tmp_path):
    return StorePaths(tmp_path)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(manifests())
def test_the_counts_are_those_of_the_rows(paths, manifest):
    manifest.write(paths)
    found = find_summary(paths, LAYER_SET, KEY)
    assert dataclasses.asdict(found) == counted(paths.manifest(LAYER_SET, KEY))


def test_the_rows_are_not_read(paths, monkeypatch):
    many = [dataclasses.replace(DROPPED, sample_id=f"{KEY}/{row:04d}", source_row=row // 2) for row in range(1000)]
    dataclasses.replace(MANIFEST, samples=(), unstored=tuple(many), rows=1000).write(paths)
    monkeypatch.setattr(summary, "read_manifest", None)
    assert dataclasses.asdict(find_summary(paths, LAYER_SET, KEY)) == counted(paths.manifest(LAYER_SET, KEY))


def test_more_reasons_than_the_head_usually_has(paths):
    many = [dataclasses.replace(DROPPED, sample_id=f"{KEY}/{row:04d}", reason=f"reason_{row}") for row in range(500)]
    dataclasses.replace(MANIFEST, samples=(), unstored=tuple(many), rows=500).write(paths)
    found = find_summary(paths, LAYER_SET, KEY)
    assert dataclasses.asdict(found) == counted(paths.manifest(LAYER_SET, KEY))
    assert len(found.ledger.dropped) == 500


def test_a_partition_without_a_manifest(paths):
    assert find_summary(paths, LAYER_SET, KEY) is None


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda body: body.pop("tokens"), id="not there"),
        pytest.param(lambda body: body.update(tokens="17"), id="a text"),
        pytest.param(lambda body: body.update(source_rows=None), id="null"),
        pytest.param(lambda body: body["ledger"].update(dropped=[]), id="a list"),
        pytest.param(lambda body: body["ledger"].update(stored=2), id="a ledger that does not balance"),
        pytest.param(lambda body: body["ledger"].update(stored=-1, dropped={"x": body["rows"] + 1}), id="fewer than none"),
    ],
)
def test_where_the_head_is_odd_the_rows_are_counted(paths, change):
    MANIFEST.write(paths)
    path = paths.manifest(LAYER_SET, KEY)
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body, indent=1))
    assert dataclasses.asdict(find_summary(paths, LAYER_SET, KEY)) == counted(path)


def test_a_manifest_that_is_cut(paths):
    MANIFEST.write(paths)
    path = paths.manifest(LAYER_SET, KEY)
    data = path.read_bytes()
    for length in (0, 1, 40, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(StoreError, match="a manifest cannot be read"):
            find_summary(paths, LAYER_SET, KEY)


def test_a_newer_version(paths):
    MANIFEST.write(paths)
    path = paths.manifest(LAYER_SET, KEY)
    path.write_text(path.read_text().replace('"version": 1', '"version": 2', 1))
    with pytest.raises(StoreVersionError):
        find_summary(paths, LAYER_SET, KEY)


def test_a_manifest_that_cannot_be_opened(paths):
    paths.manifest(LAYER_SET, KEY).mkdir(parents=True)
    with pytest.raises(StoreError, match="a manifest cannot be read"):
        find_summary(paths, LAYER_SET, KEY)
