"""The store against its own promises: every byte that a manifest names is read, and every claim about it checked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hs_assets.errors import HsAssetsError
from hs_assets.store.manifest import Manifest, StoredSample, read_manifest
from hs_assets.store.reader import Store
from hs_assets.wire.dump import token_sha256


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that does not hold. ``where`` is a sample, or a partition."""

    layer_set: str
    partition: str
    where: str
    detail: str


def count_samples(store: Store) -> int:
    """How many samples `verify` will read, as far as the manifests can be read."""
    total = 0
    for layer_set in store.layer_sets():
        for path in (store.paths.views / layer_set).glob("*.json"):
            try:
                total += len(read_manifest(path).samples)
            except HsAssetsError:
                continue  # verify names it
    return total


def verify(store: Store) -> Iterator[Problem | StoredSample]:
    """Check every sample of every layer set; gives each sample that holds, and each problem.

    Checked: manifests and ledgers, that each array can be read whole (its checksums with it), the token hash, the length
    of mask and states, and that the supervised tokens are as many as the manifest says.
    """
    for layer_set in store.layer_sets():
        for path in sorted((store.paths.views / layer_set).glob("*.json")):
            try:
                manifest = read_manifest(path)
            except HsAssetsError as error:
                yield Problem(layer_set, path.stem, path.stem, str(error))
                continue
            for sample in manifest.samples:
                try:
                    detail = _check(store, manifest, sample)
                except HsAssetsError as error:
                    detail = str(error)
                yield sample if detail is None else Problem(layer_set, manifest.partition, sample.sample_id, detail)


def _check(store: Store, manifest: Manifest, entry: StoredSample) -> str | None:
    """What is wrong with a sample, if anything is."""
    sample = store.sample(manifest, entry)
    ids = np.ascontiguousarray(sample.input_ids, "<i4")
    if token_sha256(ids.tobytes()) != entry.token_sha256:
        return "the token ids are not those of the manifest"
    mask = len(sample.loss_mask), int(sample.loss_mask.sum())
    if mask != (entry.tokens, entry.supervised_tokens):
        return f"the loss mask has {mask[0]} tokens, {mask[1]} supervised; not {entry.tokens}, {entry.supervised_tokens}"
    wanted = "r" + "-".join(str(i) for i in sample.states)
    if wanted != manifest.layer_set:
        return f"the sample has residual ids {sorted(sample.states)}"
    return None
