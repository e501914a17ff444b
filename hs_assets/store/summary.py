"""The counts of a manifest, read from its first bytes: 10,000 partitions are counted in a second, without their samples."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from hs_assets.store.layout import StorePaths
from hs_assets.store.manifest import FORMAT, MANIFEST_VERSION, Ledger, Manifest, read_manifest

_HEAD_BYTES = 4096
_AFTER_HEAD, _END = b',\n "state_spec": ', b"\n}"


@dataclass(frozen=True, slots=True)
class ManifestSummary:
    """What a manifest amounts to. ``tokens`` of its samples; ``source_rows``: of how many rows of the source its rows are."""

    state_fingerprint: str
    ledger: Ledger
    tokens: int
    source_rows: int


def summary_of(manifest: Manifest) -> ManifestSummary:
    """The counts of what a manifest lists."""
    return ManifestSummary(manifest.state_fingerprint, manifest.ledger, manifest.tokens, manifest.source_rows)


def find_summary(paths: StorePaths, layer_set_id: str, partition: str) -> ManifestSummary | None:
    """The counts of a partition in a layer set, if it has a manifest there.

    As its head says; where that has none (an earlier version's), is longer than usual or odd, of the whole manifest. That
    both say the same is what `hs-assets verify` checks.

    Raises:
        StoreError: the manifest is cut, not a manifest, or cannot be opened.
        StoreVersionError: it was written by a newer version.
    """
    path = paths.manifest(layer_set_id, partition)
    try:
        with path.open("rb", buffering=0) as file:
            head, size = file.read(_HEAD_BYTES), os.fstat(file.fileno()).st_size
            whole = os.pread(file.fileno(), len(_END), max(0, size - len(_END))) == _END
    except FileNotFoundError:
        return None
    except OSError:
        return summary_of(read_manifest(path))
    text, found, _ = head.partition(_AFTER_HEAD)
    return (_from_head(text + b"}") if found and whole else None) or summary_of(read_manifest(path))


def _from_head(text: bytes) -> ManifestSummary | None:
    """The counts in the head of a manifest; None where it is not as `Manifest.write` writes it."""
    try:
        head = json.loads(text)
        said = head["ledger"]
        ledger = Ledger(said["in"], said["stored"], said["dropped"], said["failed"])
        reasons = [*ledger.dropped.values(), *ledger.failed.values()]
        counts = [ledger.rows, ledger.stored, *reasons, head["tokens"], head["source_rows"]]
        known = (head["format"], head["version"]) == (FORMAT, MANIFEST_VERSION)
        if not known or not all(type(count) is int and count >= 0 for count in counts) or not ledger.balances:
            return None
        return ManifestSummary(head["state_fingerprint"], ledger, head["tokens"], head["source_rows"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
