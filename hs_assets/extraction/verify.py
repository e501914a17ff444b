"""The store against its own promises: every byte that a manifest names is read, and every claim about it checked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hs_assets.errors import HsAssetsError
from hs_assets.store.manifest import Manifest, StoredSample, read_manifest
from hs_assets.store.reader import Store


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
        for path in store.paths.manifests(layer_set):
            try:
                total += len(read_manifest(path).samples)
            except HsAssetsError:
                continue  # verify names it
    return total


def verify(store: Store) -> Iterator[Problem | StoredSample]:
    """Check every sample of every layer set; gives each sample that holds, and each problem.

    Checked: manifests and ledgers; that every array can be read whole, its checksums with it; token hash, and length and
    sum of the mask; that the residual ids are those of the layer set.
    """
    for layer_set in store.layer_sets():
        for path in store.paths.manifests(layer_set):
            try:
                manifest = read_manifest(path)
            except HsAssetsError as error:
                yield Problem(layer_set, path.stem, path.stem, str(error))
                continue
            for sample in manifest.samples:
                detail = _problem(store, manifest, sample)
                yield sample if detail is None else Problem(layer_set, manifest.partition, sample.sample_id, detail)


def spot_check(store: Store, manifest: Manifest, most: int) -> Iterator[Problem]:
    """Read some samples of a manifest whole, spread over it and as many as `most`, with at least one of each generation."""
    chosen = {part.generation: sample for sample in manifest.samples for part in sample.parts}
    spread = manifest.samples[:: -(-len(manifest.samples) // most) or 1]
    for sample in {one.sample_id: one for one in (*chosen.values(), *spread)}.values():
        detail = _problem(store, manifest, sample)
        if detail is not None:
            yield Problem(manifest.layer_set, manifest.partition, sample.sample_id, detail)


def _problem(store: Store, manifest: Manifest, entry: StoredSample) -> str | None:
    """What is wrong with a sample, if anything is."""
    try:
        sample = store.sample(manifest, entry)
    except HsAssetsError as error:
        return str(error)
    ids = "r" + "-".join(str(i) for i in sample.states)
    return None if ids == manifest.layer_set else f"the sample has residual ids {sorted(sample.states)}"
