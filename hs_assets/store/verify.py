"""The store against its own promises: every byte that a manifest names is read, and every claim about it checked."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from hs_assets.errors import HsAssetsError, StoreError
from hs_assets.store.arrays import open_array
from hs_assets.store.generation import open_generation
from hs_assets.store.layout import StorePaths
from hs_assets.store.manifest import Manifest, StoredSample, read_manifest
from hs_assets.store.processes import end_with_parent
from hs_assets.store.reader import Store

_SAMPLES_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that does not hold. ``where`` is a sample, a partition, or a file of neither; then the others are empty."""

    layer_set: str
    partition: str
    where: str
    detail: str


@dataclass(frozen=True, slots=True)
class Checked:
    """Some samples of a partition, or what concerns it as a whole; ``last`` names where the check has come to."""

    last: str
    samples: int
    problems: tuple[Problem, ...]

    @property
    def good(self) -> int:
        """Samples that hold."""
        return self.samples - len({problem.where for problem in self.problems}) if self.samples else 0


@dataclass(frozen=True, slots=True)
class _Task:
    """Samples ``start .. stop`` of a manifest; none: the manifest itself."""

    path: Path
    start: int = 0
    stop: int = 0


def count_samples(store: Store) -> int:
    """How many samples `verify` will read, as far as the manifests can be read."""
    return sum(task.stop - task.start for task in _tasks(store.paths))


def verify(store: Store, processes: int | None = None) -> Iterator[Checked]:
    """Check every sample of every layer set, in `processes` (by default one a core); gives what was checked, bit by bit.

    Checked: manifests, ledgers and lineage records; that generations have the samples where the manifest says; that every
    array can be read whole, its checksums with it; token hash, and length and sum of the mask; that the residual ids are
    those of the layer set; final norms.

    Raises:
        StoreError: one of the processes was killed.
    """
    tasks = list(_tasks(store.paths))
    processes = processes or len(os.sched_getaffinity(0))
    if processes == 1 or len(tasks) < 3:
        yield from map(partial(_check, store.paths), tasks)
    else:
        context = multiprocessing.get_context("forkserver")
        with ProcessPoolExecutor(min(processes, len(tasks)), context, end_with_parent) as pool:
            try:
                yield from pool.map(partial(_check, store.paths), tasks)
            except BrokenProcessPool as error:
                raise StoreError(
                    "a process that verified was killed",
                    where=store.paths.root,
                    got="most often by the system, for want of memory",
                    remedy="verify again with fewer --processes",
                ) from error
    yield from _final_norms(store.paths)


def spot_check(store: Store, manifest: Manifest, most: int) -> Iterator[Problem]:
    """Read some samples of a manifest whole, spread over it and as many as `most`, with at least one of each generation."""
    chosen = {part.generation: sample for sample in manifest.samples for part in sample.parts}
    spread = manifest.samples[:: -(-len(manifest.samples) // most) or 1]
    for sample in {one.sample_id: one for one in (*chosen.values(), *spread)}.values():
        for detail in _sample(store, manifest, sample):
            yield Problem(manifest.layer_set, manifest.partition, sample.sample_id, detail)


def _tasks(paths: StorePaths) -> Iterator[_Task]:
    for path in sorted(paths.views.glob("*/*.json")):
        yield _Task(path)
        try:
            samples = len(_manifest(path).samples)
        except HsAssetsError:  # the task above names it
            continue
        for start in range(0, samples, _SAMPLES_AT_ONCE):
            yield _Task(path, start, min(start + _SAMPLES_AT_ONCE, samples))


@lru_cache(maxsize=4)
def _manifest(path: Path) -> Manifest:
    return read_manifest(path)


def _check(paths: StorePaths, task: _Task) -> Checked:
    """What one task finds; it runs in any process."""
    layer_set, partition = task.path.parent.name, task.path.stem
    try:
        manifest = _manifest(task.path)
        if task.start == task.stop:
            details = list(_claims(paths, manifest, task.path))
            return Checked(partition, 0, tuple(Problem(layer_set, partition, partition, detail) for detail in details))
    except HsAssetsError as error:
        return Checked(partition, 0, (Problem(layer_set, partition, partition, str(error)),))
    store, problems = Store(paths), list[Problem]()
    samples = manifest.samples[task.start : task.stop]
    for sample in samples:
        problems += [Problem(layer_set, partition, sample.sample_id, one) for one in _sample(store, manifest, sample)]
    return Checked(samples[-1].sample_id, len(samples), tuple(problems))


def _claims(paths: StorePaths, manifest: Manifest, path: Path) -> Iterator[str]:
    """What is wrong with a manifest as a whole: its name, its ledger, and the generations that it names."""
    if (manifest.layer_set, manifest.partition) != (path.parent.name, path.stem):
        yield f"the manifest says that it is of {manifest.partition} in {manifest.layer_set}"
    said, counts = json.loads(path.read_text()), {"tokens": manifest.tokens, "source_rows": manifest.source_rows}
    if said["ledger"] != manifest.ledger.as_json():
        yield "the ledger is not that of the rows which the manifest lists"
    if odd := [name for name, count in counts.items() if said.get(name, count) != count]:  # an earlier version wrote none
        yield f"the counts of {odd} are not those of the rows which the manifest lists"
    ids = Counter([*(one.sample_id for one in manifest.samples), *(one.sample_id for one in manifest.unstored)])
    if odd := sorted(name for name, times in ids.items() if times > 1 or name.rpartition("/")[0] != manifest.partition):
        yield f"rows listed twice, or of another partition: {odd}"
    for name in sorted({part.generation for sample in manifest.samples for part in sample.parts}):
        folder = paths.generation(manifest.state_fingerprint, manifest.partition, name)
        try:
            attributes = json.loads((folder / "zarr.json").read_text())["attributes"]
            of = attributes["partition"], attributes["state_fingerprint"]
            rows, offsets = open_generation(folder).input_ids.rows, open_array(folder / "offsets").read().tolist()
            end = offsets[-1]
        except StoreError as error:
            yield str(error)
        except (OSError, LookupError, ValueError, TypeError) as error:
            yield f"generation {name} cannot be read: {error!r}"
        else:
            if of != (manifest.partition, manifest.state_fingerprint):
                yield f"generation {name} says that it is of {of[0]}, {of[1]}"
            places = set(pairwise(offsets))
            if end != rows or offsets != sorted(offsets):
                yield f"generation {name} has {rows} rows, and offsets that end at {end}"
            for sample in manifest.samples:
                for part in sample.parts:
                    if part.generation == name and (part.offset, part.offset + sample.tokens) not in places:
                        yield f"{sample.sample_id} is not where generation {name} has a sample: row {part.offset}"


def _sample(store: Store, manifest: Manifest, entry: StoredSample) -> Iterator[str]:
    """What is wrong with a sample."""
    hashes = (entry.token_sha256, entry.source_sha256)
    parts_hold = all(part.server and part.run_id and len(part.norms) == len(part.residual_ids) for part in entry.parts)
    if not parts_hold or any(len(value) != 64 or set(value) - set("0123456789abcdef") for value in hashes):
        yield "its lineage record is not whole"
    try:
        states = store.sample(manifest, entry).states
    except HsAssetsError as error:
        yield str(error)
        return
    if "r" + "-".join(str(i) for i in states) != manifest.layer_set:
        yield f"the sample has residual ids {sorted(states)}"


def _final_norms(paths: StorePaths) -> Iterator[Checked]:
    """The final norm of each model."""
    for folder in sorted(paths.model("-").parent.glob("[!.]*")):
        try:
            weight = open_array(folder / "final_norm_weight").read()
            eps = json.loads((folder / "zarr.json").read_text())["attributes"]["eps"]
            problem = None if np.isfinite(weight).all() and weight.any() and eps > 0 else f"eps {eps}, weight {weight}"
        except (OSError, LookupError, ValueError, TypeError) as error:
            problem = repr(error)
        where = f"models/{folder.name}"
        yield Checked(where, 0, (Problem("", "", where, f"the final norm cannot be used: {problem}"),) if problem else ())
