"""What lies beside the exported partitions: the export's own manifest, the trainer's configuration, the vocabulary mapping."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hs_assets.errors import ExportError
from hs_assets.exports import speculators
from hs_assets.exports.export import Exported, identity
from hs_assets.exports.folder import ALL, MANIFEST, ExportFolder, file_sha256, read_manifest, write_manifest
from hs_assets.exports.trainer import Trainer
from hs_assets.exports.vocabulary import VocabularyMapping
from hs_assets.store.layout import replace_file
from hs_assets.store.manifest import Manifest
from hs_assets.wire.layers import LayerSet

CONFIG = "trainer_config.json"
_LOCK = "export"


def begin(folder: ExportFolder, manifest: Manifest, trainer: Trainer) -> None:
    """Claim a folder for the export that `manifest` is a partition of.

    Raises:
        ExportError: something else is in it, or another export, or it is a disk of its own.
    """
    trainer.layer_ids(LayerSet.parse(manifest.layer_set))
    folder.require_room_beside()
    with folder.locked(_LOCK):
        for name in (MANIFEST, CONFIG):  # what a killed export had not finished
            for left in folder.root.glob(f".{name}.*.tmp"):
                left.unlink()
        before, now = read_manifest(folder.manifest), identity(manifest, trainer)
        if before is None and folder.root.exists() and any(folder.root.iterdir()):
            raise ExportError("this folder is not empty, and no export", where=folder.root, remedy="choose another folder")
        if before is not None and (other := {key: before[key] for key in now}) != now:
            raise ExportError(
                "another export is in this folder", where=folder.root, expected=now, got=other, remedy="choose another folder"
            )
        if before is None:
            folder.root.mkdir(parents=True, exist_ok=True)
            write_manifest(folder.manifest, {**now, "partitions": {}})


def finish(
    folder: ExportFolder,
    trainer: Trainer,
    manifest: Manifest,
    exported: Sequence[Exported],
    mapping: VocabularyMapping | None,
) -> dict[str, Any]:
    """Write what lies beside the partitions, now that `exported` are there; returns what the export's manifest says.

    Arguments:
        manifest: the store's, of any of these partitions.
        mapping: the vocabulary mapping, if one was made.
    """
    layer_ids = trainer.layer_ids(LayerSet.parse(manifest.layer_set))
    with folder.locked(_LOCK):
        before = read_manifest(folder.manifest) or {"partitions": {}}
        partitions = {**before["partitions"], **{one.partition: _entry(one) for one in exported}}
        there = {key: entry for key, entry in partitions.items() if folder.partition(key).exists()}
        body = {
            **identity(manifest, trainer),
            "samples": sum(entry["samples"] for entry in there.values()),
            "tokens": sum(entry["tokens"] for entry in there.values()),
            "trained_positions": sum(entry["trained_positions"] for entry in there.values()),
            "bytes": sum(entry["bytes"] for entry in there.values()),
            "vocabulary": None if mapping is None else _vocabulary_entry(mapping, there),
            "partitions": dict(sorted(there.items(), key=lambda item: f"{item[0]}/")),
        }
        config = trainer.config(layer_ids, None if mapping is None else len(mapping.ids))
        replace_file(folder.root / CONFIG, json.dumps(config, indent=2))
        if mapping is not None:
            _write_vocabulary(folder, trainer, mapping)
        write_manifest(folder.manifest, body)
    return body


def combine(folder: ExportFolder) -> int:
    """Make ``all/``, one dataset of speculators over all exported partitions, its states linked; returns its rows.

    Nothing is done where it is of just these partitions already.

    Raises:
        ExportError: the folder is no export for speculators.
    """
    body = read_manifest(folder.manifest)
    if body is None or body["trainer"] != speculators.SPECULATORS.name:
        raise ExportError("this is no export for speculators", where=folder.root, got=body and body["trainer"])
    place, rows = folder.root / ALL, 0
    before = read_manifest(place / MANIFEST)
    if before is not None and before["of"] == body and before["dataset_sha256"] == file_sha256(place / speculators.ARROW):
        return int(before["rows"])
    with folder.staging(ALL) as staging:
        (staging / speculators.STATES).mkdir()

        def tables() -> Iterator[Any]:
            nonlocal rows
            for key in body["partitions"]:
                table = speculators.read_dataset(folder.partition(key))
                for row in range(len(table)):
                    link = staging / speculators.STATES / speculators.states_file(rows + row)
                    link.symlink_to(Path("..", "..", key, speculators.STATES, speculators.states_file(row)))
                rows += len(table)
                yield table

        speculators.write_dataset(staging, tables())
        for path in folder.root.glob("*.npy"):  # where the trainer looks for the vocabulary mapping
            (staging / path.name).symlink_to(Path("..", path.name))
        dataset_sha256 = file_sha256(staging / speculators.ARROW)
        write_manifest(staging / MANIFEST, {"of": body, "rows": rows, "dataset_sha256": dataset_sha256})
        folder.publish(staging, ALL)
    return rows


def _entry(exported: Exported) -> dict[str, object]:
    return {key: value for key, value in asdict(exported).items() if key not in ("partition", "state", "why")}


def _vocabulary_entry(mapping: VocabularyMapping, partitions: dict[str, Any]) -> dict[str, object]:
    return {
        "sha256": mapping.sha256,
        "draft_size": len(mapping.ids),
        "target_size": mapping.target_size,
        "covered": mapping.covered_tokens / mapping.supervised_tokens,
        "stale": mapping.stale({key: entry["samples_hash"] for key, entry in partitions.items()}),
    }


def _write_vocabulary(folder: ExportFolder, trainer: Trainer, mapping: VocabularyMapping) -> None:
    with folder.staging("vocabulary") as staging:
        for name, write in trainer.vocabulary(mapping).items():
            path = staging / Path(name).name
            write(path)
            (folder.root / name).parent.mkdir(exist_ok=True)
            path.replace(folder.root / name)
