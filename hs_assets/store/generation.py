"""A generation on disk: its arrays, and those that were freed one by one because no manifest names them any more.

The group's attributes say it before an array goes: its id leaves ``residual_ids`` and comes into ``freed``. So an array that
is gone and not among ``freed`` was lost.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hs_assets.errors import StoreError
from hs_assets.store.arrays import StoredArray, open_array
from hs_assets.store.layout import array_name, replace_file

REMEDY = "remove the damaged folder, then materialise the partition again"


@dataclass(frozen=True, slots=True)
class Generation:
    """A generation's arrays: ``input_ids`` [S], and residual id → states [S, H], without those that were freed."""

    input_ids: StoredArray
    states: dict[int, StoredArray]


@lru_cache(maxsize=64)
def open_generation(path: Path) -> Generation:
    """The generation in a folder; nothing but metadata is read.

    Raises:
        StoreError: it is gone or damaged.
    """
    try:
        input_ids = open_array(path / "input_ids")
        states = {residual_id: open_array(folder) for residual_id, folder in state_arrays(path).held.items()}
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise StoreError("a generation cannot be opened", where=path, got=repr(error), remedy=REMEDY) from error
    shapes = {(array.rows, array.row_shape) for array in states.values()}
    if len(shapes) != 1 or next(iter(shapes))[0] != input_ids.rows:
        raise StoreError("the arrays of a generation differ in shape", where=path, got=sorted(shapes), remedy=REMEDY)
    return Generation(input_ids, states)


@dataclass(frozen=True, slots=True)
class StateArrays:
    """The state arrays of a generation, residual id → folder: those that it has, and those that were freed of it."""

    held: dict[int, Path]
    freed: dict[int, Path]


def state_arrays(generation: Path) -> StateArrays:
    """What the metadata of a generation say of its state arrays, as they are now.

    Raises:
        OSError, KeyError, ValueError, TypeError: they cannot be read.
    """
    attributes = json.loads((generation / "zarr.json").read_text())["attributes"]
    final, ids = int(attributes["final"]), (attributes["residual_ids"], attributes.get("freed", ()))
    held, freed = ({int(i): generation / array_name(int(i), final) for i in some} for some in ids)
    return StateArrays(held, freed)


def record_freed(array: Path) -> None:
    """Say in the metadata of its generation that a state array is free to go; to be called before it goes."""
    path = array.parent / "zarr.json"
    body = json.loads(path.read_text())
    attributes = body["attributes"]
    gone = {i for i in attributes["residual_ids"] if array_name(i, attributes["final"]) == array.name}
    if gone:
        attributes["residual_ids"] = [i for i in attributes["residual_ids"] if i not in gone]
        attributes["freed"] = sorted(gone.union(attributes.get("freed", ())))
        replace_file(path, json.dumps(body, indent=2))
