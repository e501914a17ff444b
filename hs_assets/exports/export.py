"""Partitions of a store as files for a trainer: each is written whole, found identical, or replaced, and said to be so."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hs_assets.errors import ExportError, StoreError
from hs_assets.exports.final_norm import FinalNorm, final_norm_of
from hs_assets.exports.folder import ALL, MANIFEST, ExportFolder, file_sha256, files_in, read_manifest, write_manifest
from hs_assets.exports.trainer import ExportSample, Trainer
from hs_assets.exports.vocabulary import samples_hash
from hs_assets.store import Store
from hs_assets.store.manifest import Manifest, StoredSample
from hs_assets.store.manifest import read_manifest as read_store_manifest
from hs_assets.wire.layers import LayerSet

Progress = Callable[[str, int], None]
"""Is told of each sample that was written or found identical: its id, and its tokens."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What became of a partition.

    ``trained_positions``: those whose loss counts, after the trainer's shift; ``samples_hash``: what a vocabulary knows it by.
    """

    partition: str
    state: Literal["written", "identical", "replaced"]
    why: str
    samples: int
    tokens: int
    trained_positions: int
    bytes: int
    samples_hash: str
    source_sha256: str
    manifest_sha256: str


def choose_manifests(store: Store, layer_set_id: str, partitions: Sequence[str] = ()) -> list[Manifest]:
    """The manifests to export, in the order in which trainers find their folders; by default all of the layer set.

    Raises:
        StoreError: there is no such layer set.
        ExportError: one of `partitions` is not stored, no sample is, or their states are of different specs.
    """
    if layer_set_id not in store.layer_sets():
        raise StoreError("no such layer set in the store", where=store.paths.root, expected=store.layer_sets(), got=layer_set_id)
    there = [path.stem for path in store.paths.manifests(layer_set_id)]
    if missing := set(partitions) - set(there):
        raise ExportError(
            "these partitions are not stored in this layer set",
            where=layer_set_id,
            expected=f"some of {len(there)} partitions: {', '.join(there[:5])} …",
            got=sorted(missing),
            remedy="hs-assets status lists them",
        )
    keys = sorted(set(partitions or there), key=lambda key: f"{key}/")
    chosen = [read_store_manifest(store.paths.manifest(layer_set_id, key)) for key in keys]
    if not any(manifest.samples for manifest in chosen):
        raise ExportError("there are no samples to export", where=layer_set_id, got=[m.ledger.as_json() for m in chosen][:3])
    specs = {manifest.state_fingerprint: manifest.partition for manifest in chosen}
    if len(specs) > 1:
        raise ExportError(
            "the states of these partitions were made in different ways",
            where=layer_set_id,
            expected="one state fingerprint",
            got=specs,
            remedy="extract the older ones again, or export those of one fingerprint alone (--partition)",
        )
    return chosen


def check_room(store: Store, manifests: Sequence[Manifest], folder: ExportFolder) -> None:
    """Raise ExportError where the states of what is not exported yet do not fit on the disk."""
    needed = 0
    for manifest in manifests:
        if manifest.samples and not folder.partition(manifest.partition).exists():
            row = store.read(manifest.samples[0].sample_id, LayerSet.parse(manifest.layer_set).residual_ids, slice(0, 1))
            needed += sum(sample.tokens for sample in manifest.samples) * sum(states.nbytes for states in row.values())
    parent = next(path for path in folder.root.absolute().parents if path.exists())
    if needed > (free := shutil.disk_usage(parent).free):
        raise ExportError(
            "the disk cannot hold this export",
            where=folder.root,
            expected=f"{needed:,} bytes",
            got=f"{free:,} bytes free",
            remedy="export fewer partitions (--partition), or to another disk",
        )


def export_partition(store: Store, manifest: Manifest, trainer: Trainer, folder: ExportFolder, progress: Progress) -> Exported:
    """Export the stored samples of a partition, unless just these are exported there already, byte for byte.

    Raises:
        ExportError: the trainer cannot have such samples.
        StoreError: a sample cannot be read, or is not what the store's manifest says; the folder is as it was before.
    """
    layer_set = LayerSet.parse(manifest.layer_set)
    layer_ids = trainer.layer_ids(layer_set)
    norm = final_norm_of(store.paths, manifest) if trainer.post_norm else None
    source, place = _source_sha256(manifest, trainer, norm), folder.partition(manifest.partition)
    with folder.staging(manifest.partition) as staging:
        before = read_manifest(place / MANIFEST)
        why = _difference(place, before, source, progress)
        if why is None and before is not None:
            return _exported(manifest, "identical", "", before, place)
        files = []
        for sample, path in trainer.write(staging, _samples(store, manifest, layer_set, norm)):
            files.append((sample.sample_id, int(sample.loss_mask[1:].sum()), path.relative_to(staging), file_sha256(path)))
            progress(sample.sample_id, len(sample.input_ids))
        samples = [_record(entry, *written, staging) for entry, written in zip(manifest.samples, files, strict=True)]
        of_samples = {sample["file"] for sample in samples}
        body = {
            **identity(manifest, trainer),
            "partition": manifest.partition,
            "residual_ids": layer_set.residual_ids,
            "layer_ids": layer_ids,
            "final_state": "after the norm" if trainer.post_norm else "before the norm",
            "final_norm_sha256": norm.sha256 if norm else None,
            "loss_mask": trainer.loss_mask,
            "state_spec": manifest.state_spec,
            "prompts": dataclasses.asdict(manifest.prompts),
            "ledger": manifest.ledger.as_json(),
            "source_sha256": source,
            "samples": samples,
            "other_files": {name: file_sha256(staging / name) for name in sorted(files_in(staging) - of_samples)},
        }
        write_manifest(staging / MANIFEST, body)
        if why:
            with folder.locked(ALL):
                folder.discard(ALL)  # its rows would be those of before
        folder.publish(staging, manifest.partition)
    return _exported(manifest, "replaced" if why else "written", why or "", body, place)


def identity(manifest: Manifest, trainer: Trainer) -> dict[str, str]:
    """What all partitions of one export have in common."""
    return {
        "trainer": trainer.name,
        "loader": trainer.loader,
        "layer_set": manifest.layer_set,
        "state_fingerprint": manifest.state_fingerprint,
    }


def _samples(store: Store, manifest: Manifest, layer_set: LayerSet, norm: FinalNorm | None) -> Iterator[ExportSample]:
    names = [entry.sample_id.rpartition("/")[2] for entry in manifest.samples]
    width = max(map(len, names), default=0)
    for entry, name in zip(manifest.samples, names, strict=True):
        sample = store.sample(manifest, entry)
        final = sample.states[layer_set.final]
        yield ExportSample(
            sample_id=entry.sample_id,
            name=name.zfill(width),
            input_ids=sample.input_ids.astype(np.int64),
            loss_mask=sample.loss_mask.astype(np.int64),
            aux=tuple(sample.states[i] for i in layer_set.aux),
            final=norm(final) if norm else final,
        )


def _record(entry: StoredSample, sample_id: str, trained: int, path: Path, sha256: str, folder: Path) -> dict[str, Any]:
    """What the manifest says of a sample: its file, and where it came from."""
    if entry.sample_id != sample_id:
        raise ExportError("samples were written in another order", where=entry.sample_id, got=sample_id)
    return {
        "file": path.as_posix(),
        "sample_id": sample_id,
        "tokens": entry.tokens,
        "trained_positions": trained,
        "bytes": (folder / path).stat().st_size,
        "sha256": sha256,
        "token_sha256": entry.token_sha256,
        "source_row": entry.source_row,
        "source_sha256": entry.source_sha256,
        "generations": [part.generation for part in entry.parts],
        "dump_crc32": [part.dump_crc32 for part in entry.parts],
    }


def _source_sha256(manifest: Manifest, trainer: Trainer, norm: FinalNorm | None) -> str:
    """Hash of all that the bytes of the files follow from: generations never change, nor masks of a version of the prompts."""
    samples = [
        (s.sample_id, s.token_sha256, s.mask, [(part.generation, part.offset, part.residual_ids) for part in s.parts])
        for s in manifest.samples
    ]
    source = [identity(manifest, trainer), manifest.prompts.version, norm.sha256 if norm else None, samples]
    return hashlib.sha256(json.dumps(source).encode()).hexdigest()


def _difference(place: Path, before: dict[str, Any] | None, source: str, progress: Progress) -> str | None:
    """Why what is exported is not what would be; None if nothing is there, or every byte of it is right."""
    if not place.exists():
        return None
    if before is None:
        raise ExportError(
            "this folder is no exported partition", where=place, expected=MANIFEST, remedy="choose another folder to export to"
        )
    if before["source_sha256"] != source:
        return "its samples, masks or states are other ones now"
    exported = {entry["file"]: entry["sha256"] for entry in before["samples"]} | before["other_files"]
    if changed := files_in(place) ^ {*exported, MANIFEST}:
        return f"{min(changed)} is {'gone' if min(changed) in exported else 'no file of the export'}"
    for entry in before["samples"]:
        if file_sha256(place / entry["file"]) != entry["sha256"]:
            return f"{entry['file']} is not as it was exported"
        progress(entry["sample_id"], entry["tokens"])
    other = (name for name, sha256 in before["other_files"].items() if file_sha256(place / name) != sha256)
    return next((f"{name} is not as it was exported" for name in other), None)


def _exported(
    manifest: Manifest, state: Literal["written", "identical", "replaced"], why: str, body: dict[str, Any], place: Path
) -> Exported:
    samples = body["samples"]
    return Exported(
        partition=manifest.partition,
        state=state,
        why=why,
        samples=len(samples),
        tokens=sum(sample["tokens"] for sample in samples),
        trained_positions=sum(sample["trained_positions"] for sample in samples),
        bytes=sum(sample["bytes"] for sample in samples),
        samples_hash=samples_hash(manifest),
        source_sha256=body["source_sha256"],
        manifest_sha256=file_sha256(place / MANIFEST),
    )
