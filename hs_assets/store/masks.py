"""Loss masks and final norms: what belongs to samples and models, but not to the states."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from hs_assets.errors import StoreError
from hs_assets.store.arrays import open_array
from hs_assets.store.layout import StorePaths, publish_folder, remove_tree


def write_masks(paths: StorePaths, partition: str, version: str, masks: Sequence[np.ndarray]) -> None:
    """Keep the loss masks (bool [L]) of a partition's prompts, in their order; nothing to do where they are kept already."""
    offsets = np.concatenate([[0], np.cumsum([len(mask) for mask in masks])])
    joined = np.concatenate([*masks, np.empty(0, bool)])
    _write_once(paths.masks(partition, version), {"loss_mask": joined, "offsets": offsets.astype(np.int64)}, {})


def read_masks(paths: StorePaths, partition: str, version: str) -> list[np.ndarray]:
    """The loss masks (bool [L]) as they were written."""
    folder = paths.masks(partition, version)
    metadata = json.loads((folder / "zarr.json").read_text())
    if (metadata["node_type"], metadata["attributes"]) != ("group", {}):
        raise ValueError(f"{folder} is not a group of masks")
    offsets, joined = open_array(folder / "offsets").read(), open_array(folder / "loss_mask").read()
    return [joined[a:b] for a, b in pairwise(offsets)]


def write_final_norm(paths: StorePaths, weight_fingerprint: str, model_class: str, weight: np.ndarray, eps: float) -> None:
    """Keep a model's final norm (weight float32 [H]), with which the post-norm state can be made from the stored one."""
    attributes = {"eps": eps, "model_class": model_class}
    _write_once(paths.model(weight_fingerprint), {"final_norm_weight": weight.astype(np.float32)}, attributes)


def read_final_norm(paths: StorePaths, weight_fingerprint: str) -> tuple[np.ndarray, float] | None:
    """A model's final norm, weight float32 [H] and eps, as it was written; None where it is not known.

    Raises:
        StoreError: it is damaged.
    """
    folder = paths.model(weight_fingerprint)
    if not folder.exists():
        return None
    try:
        weight = open_array(folder / "final_norm_weight").read()
        eps = float(json.loads((folder / "zarr.json").read_text())["attributes"]["eps"])
        problem = None if weight.any() else "every weight is 0"  # as a chunk that is gone reads
    except (OSError, LookupError, ValueError, TypeError) as error:
        problem = repr(error)
    if problem is not None:
        remedy = "remove the folder, then materialise a partition again"
        raise StoreError("a final norm cannot be read", where=folder, got=problem, remedy=remedy)
    return weight, eps


def _write_once(destination: Path, arrays: dict[str, np.ndarray], attributes: dict[str, object]) -> None:
    import zarr
    from zarr.codecs import Crc32cCodec

    if destination.exists():
        return
    destination.parent.mkdir(parents=True, exist_ok=True)
    staging = destination.with_name(f".staging-{destination.name}-{secrets.token_hex(4)}")
    group = zarr.create_group(staging, attributes=attributes)
    for name, values in arrays.items():
        chunks = (max(1, len(values)),)
        array = group.create_array(name, shape=values.shape, chunks=chunks, dtype=values.dtype, compressors=[Crc32cCodec()])
        array[:] = values
    try:
        publish_folder(staging, destination)
    except OSError:
        if not destination.exists():  # else another run was faster, with the same content
            raise
        remove_tree(staging)
