"""Reading a store: samples in order, or single pieces of them. Only what manifests name is ever read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, overload

import numpy as np

from hs_assets.errors import StoreError
from hs_assets.store.arrays import MissingRowsError, StoredArray
from hs_assets.store.generation import REMEDY, Generation, open_generation
from hs_assets.store.layout import StorePaths, check
from hs_assets.store.manifest import Manifest, Part, StoredSample, read_manifest
from hs_assets.store.masks import read_masks
from hs_assets.wire.dump import token_sha256
from hs_assets.wire.rid import is_partition_key


@dataclass(frozen=True, slots=True)
class Lineage:
    """Where a sample came from: from its states back to the row of a file."""

    sample_id: str
    layer_set: str
    state_fingerprint: str
    state_spec: dict[str, Any]
    parts: tuple[Part, ...]
    token_sha256: str
    partition: str
    prompts_version: str
    template_sha256: str
    tokenizer_sha256: str
    source_name: str
    source_path: str
    source_row: int
    source_sha256: str


@dataclass(frozen=True, slots=True)
class Eagle3Sample:
    """One sample of L tokens.

    ``input_ids`` int32 [L]; ``loss_mask`` bool [L], True where ``input_ids`` is supervised (no shift); ``states``: residual
    id → [L, H] (bfloat16 of ml_dtypes, or float32), the largest id being the final state, before the norm.
    """

    sample_id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    states: dict[int, np.ndarray]
    lineage: Lineage


def open_store(path: str | Path) -> Store:
    """The store in a folder, for reading.

    Raises:
        StoreError: there is none.
        StoreVersionError: a newer version wrote it.
    """
    return Store(check(Path(path)))


class Store:
    """A store opened for reading; see `open_store`."""

    def __init__(self, paths: StorePaths) -> None:
        self.paths = paths

    def layer_sets(self) -> list[str]:
        """Ids of the layer sets that have samples, such as ``r3-31-59-61``."""
        return sorted(folder.name for folder in self.paths.views.iterdir()) if self.paths.views.is_dir() else []

    def manifests(self, layer_set_id: str) -> list[Manifest]:
        """The manifests of a layer set, in the order of their partitions."""
        if layer_set_id not in self.layer_sets():
            raise StoreError(
                "no such layer set in the store", where=self.paths.root, expected=self.layer_sets(), got=layer_set_id
            )
        return [read_manifest(path) for path in self.paths.manifests(layer_set_id)]

    def layer_set(self, layer_set_id: str) -> LayerSetView:
        """All samples of a layer set, in the order of their ids."""
        return LayerSetView(self, self.manifests(layer_set_id))

    def read(self, sample_id: str, layers: Iterable[int] | None = None, tokens: slice = slice(None)) -> dict[int, np.ndarray]:
        """Some states of one sample as a dict, residual id → [tokens, H]; touches only the chunks that hold them.

        Arguments:
            layers: residual ids; by default those of the first layer set that has the sample.
            tokens: a slice with step 1, in tokens of the sample.

        Raises:
            StoreError: no such sample, or no such residual id of it.
        """
        wanted = None if layers is None else tuple(layers)
        return self.states(*self.find(sample_id, wanted), wanted, tokens)

    def find(self, sample_id: str, layers: tuple[int, ...] | None = None) -> tuple[Manifest, StoredSample]:
        """The first manifest that has a sample (with all of `layers`), and its entry."""
        found = False
        for manifest, sample in self.find_all(sample_id):
            found = True
            if set(layers or ()) <= set(_residual_ids(sample)):
                return manifest, sample
        if found:
            problem, got = "no such states of this sample in the store", f"layer sets {self.layer_sets()}"
            raise StoreError(problem, where=sample_id, expected=f"residual ids {layers}", got=got)
        raise StoreError(
            "no such sample in the store",
            where=self.paths.root,
            got=sample_id,
            remedy="an id is <partition>/<row, 4 digits>; hs-assets status lists the partitions",
        )

    def find_all(self, sample_id: str) -> Iterator[tuple[Manifest, StoredSample]]:
        """The manifests that have a sample, and its entry in each, by layer set.

        Raises:
            StoreError: the next manifest of its partition cannot be read.
        """
        partition = sample_id.rpartition("/")[0]
        for layer_set_id in self.layer_sets() if is_partition_key(partition) else ():
            manifest = _current_manifest(self.paths.manifest(layer_set_id, partition))
            for sample in manifest.samples if manifest else ():
                if sample.sample_id == sample_id and manifest is not None:
                    yield manifest, sample

    def sample(self, manifest: Manifest, sample: StoredSample) -> Eagle3Sample:
        """A sample, read whole."""
        ids, mask = self.ids_and_mask(manifest, sample)
        return Eagle3Sample(sample.sample_id, ids, mask, self.states(manifest, sample), lineage(manifest, sample))

    def ids_and_mask(self, manifest: Manifest, sample: StoredSample) -> tuple[np.ndarray, np.ndarray]:
        """``input_ids`` int32 [L] and ``loss_mask`` bool [L] of a sample, which are those that the manifest claims."""
        with self._not_removed(manifest, sample):
            return self._ids_and_mask(manifest, sample)

    def _ids_and_mask(self, manifest: Manifest, sample: StoredSample) -> tuple[np.ndarray, np.ndarray]:
        part = sample.parts[0]
        try:
            ids = self._generation(manifest, part).input_ids.read(part.offset, part.offset + sample.tokens)
            mask = _masks(self.paths, manifest.partition, manifest.prompts.version)[sample.mask]
        except (OSError, LookupError, ValueError, TypeError) as error:
            raise StoreError("ids or mask cannot be read", where=sample.sample_id, got=repr(error), remedy=REMEDY) from error
        seen = token_sha256(ids.data), len(mask), int(mask.sum())
        claimed = sample.token_sha256, sample.tokens, sample.supervised_tokens
        if seen != claimed:
            problem = "ids or mask are not those of the manifest"
            raise StoreError(problem, where=sample.sample_id, expected=claimed, got=seen, remedy=REMEDY)
        return ids, mask

    def states(
        self,
        manifest: Manifest,
        sample: StoredSample,
        layers: Iterable[int] | None = None,
        tokens: slice = slice(None),
        out: Mapping[int, np.ndarray] | None = None,
    ) -> dict[int, np.ndarray]:
        """States of a sample as a dict, residual id → [tokens, H]; touches only the chunks that hold them.

        Arguments:
            layers: residual ids; by default all that the manifest has of the sample.
            tokens: a slice with step 1, in tokens of the sample.
            out: residual id → where its states go, C-contiguous [tokens, H] of the stored dtype; by default new arrays.

        Raises:
            StoreError: states are missing or damaged, or there is no such residual id.
        """
        start, stop, step = tokens.indices(sample.tokens)
        stop = max(start, stop)
        if step != 1:
            raise StoreError("tokens are read in steps of 1", where=sample.sample_id, got=tokens)
        parts = {residual_id: part for part in sample.parts for residual_id in part.residual_ids}
        wanted = sorted(parts if layers is None else set(layers))
        states = {}
        for residual_id in wanted:
            if residual_id not in parts:
                problem = "no such states of this sample in its layer set"
                raise StoreError(problem, where=sample.sample_id, expected=sorted(parts), got=residual_id)
            part = parts[residual_id]
            where = f"{sample.sample_id}, residual id {residual_id}, generation {part.generation}"
            into = None if out is None else out[residual_id]
            with self._not_removed(manifest, sample):
                array = self._generation(manifest, part).states.get(residual_id)
                states[residual_id] = _rows(array, part.offset + start, part.offset + stop, into, where)
        return states

    def state_layout(self, manifest: Manifest, sample: StoredSample) -> tuple[int, np.dtype[Any]]:
        """Hidden size and dtype of a sample's states."""
        array = next(iter(self._generation(manifest, sample.parts[0]).states.values()))
        return array.row_shape[0], array.dtype

    @contextmanager
    def _not_removed(self, manifest: Manifest, sample: StoredSample) -> Iterator[None]:
        """Where a sample cannot be read because it was removed on purpose meanwhile, raise the StoreError that says so."""
        try:
            yield
        except StoreError as error:
            if self.paths.manifest(manifest.layer_set, manifest.partition).exists():
                raise
            raise StoreError(
                "the sample was removed since the store was opened",
                where=f"{sample.sample_id} in layer set {manifest.layer_set}",
                got=error.problem,
                remedy="open the store again; gc --old-layer-sets removes replaced layer sets, hs-assets remove whole partitions",
            ) from error

    def _generation(self, manifest: Manifest, part: Part) -> Generation:
        return open_generation(self.paths.generation(manifest.state_fingerprint, manifest.partition, part.generation))


class LayerSetView(Sequence[Eagle3Sample]):
    """The samples of a layer set; ``view[i]`` reads one whole, ``view.entries`` knows all without reading any."""

    def __init__(self, store: Store, manifests: list[Manifest]) -> None:
        self.store = store
        self.entries: list[tuple[Manifest, StoredSample]] = [(m, sample) for m in manifests for sample in m.samples]

    def __len__(self) -> int:
        return len(self.entries)

    @overload
    def __getitem__(self, index: int) -> Eagle3Sample: ...

    @overload
    def __getitem__(self, index: slice) -> list[Eagle3Sample]: ...

    def __getitem__(self, index: int | slice) -> Eagle3Sample | list[Eagle3Sample]:
        if isinstance(index, slice):
            return [self.store.sample(*entry) for entry in self.entries[index]]
        return self.store.sample(*self.entries[index])


def lineage(manifest: Manifest, sample: StoredSample) -> Lineage:
    """The lineage record of a sample."""
    prompts = manifest.prompts
    return Lineage(
        sample_id=sample.sample_id,
        layer_set=manifest.layer_set,
        state_fingerprint=manifest.state_fingerprint,
        state_spec=manifest.state_spec,
        parts=sample.parts,
        token_sha256=sample.token_sha256,
        partition=manifest.partition,
        prompts_version=prompts.version,
        template_sha256=prompts.template_sha256,
        tokenizer_sha256=prompts.tokenizer_sha256,
        source_name=prompts.source_name,
        source_path=prompts.source_path,
        source_row=sample.source_row,
        source_sha256=sample.source_sha256,
    )


def _rows(array: StoredArray | None, start: int, stop: int, out: np.ndarray | None, where: str) -> np.ndarray:
    """Rows of a state array; `where` is named in errors."""
    if array is None:
        raise StoreError("the generation of a sample has no such residual id", where=where, remedy=REMEDY)
    try:
        return array.read(start, stop, out)
    except MissingRowsError as error:
        raise StoreError("states are missing: a shard is gone", where=where, got=error, remedy=REMEDY) from error
    except (OSError, ValueError) as error:
        raise StoreError("states cannot be read", where=where, got=error, remedy=REMEDY) from error


def _residual_ids(sample: StoredSample) -> tuple[int, ...]:
    return tuple(i for part in sample.parts for i in part.residual_ids)


def _current_manifest(path: Path) -> Manifest | None:
    """The manifest as it now is; parsed once for each time that it is replaced."""
    try:
        now = path.stat()
    except OSError:
        return None
    return _parsed_manifest(path, (now.st_ino, now.st_mtime_ns, now.st_size))


@lru_cache(maxsize=64)
def _parsed_manifest(path: Path, _: tuple[int, int, int]) -> Manifest:
    return read_manifest(path)


@lru_cache(maxsize=64)
def _masks(paths: StorePaths, partition: str, version: str) -> list[np.ndarray]:
    return read_masks(paths, partition, version)
