"""A sample as a trainer gets it, and what an export must know of a trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hs_assets.errors import ExportError
from hs_assets.exports.vocabulary import VocabularyMapping
from hs_assets.wire.layers import LayerSet, to_layer_output


@dataclass(frozen=True, slots=True)
class ExportSample:
    """One sample of L tokens.

    ``input_ids`` int64 [L]; ``loss_mask`` int64 [L], 1 where ``input_ids`` is supervised (token coordinates, no shift);
    ``aux`` the auxiliary states, each [L, H], in the order of the layer set; ``final`` [L, H], before the norm or after it as
    the trainer wants it. States have the dtype of the store. ``name`` is the sample's row in its partition, with zeros in
    front, so that names sort as samples do.
    """

    sample_id: str
    name: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    aux: tuple[np.ndarray, ...]
    final: np.ndarray

    @property
    def aux_side_by_side(self) -> np.ndarray:
        """All auxiliary states of a token in one row, [L, K·H]."""
        return np.concatenate(self.aux, axis=1)


Files = Iterator[tuple[ExportSample, Path]]


@dataclass(frozen=True, slots=True)
class Trainer:
    """What a trainer's files are.

    Attributes:
        name: as the command line calls it.
        loader: the package and version whose loader reads the files in the tests.
        post_norm: whether its trainer takes the final state after the norm (it applies the output head alone) or before it.
        loss_mask: what position i of its mask says, for the manifest.
        layer_ids: the auxiliary layers in its own numbering; raises ExportError where it cannot have them.
        write: writes a partition's samples into a folder; gives each with the path of its file in there.
        config: the part of its configuration that belongs to the files, given layer ids and size of the draft vocabulary.
        vocabulary: the files of a vocabulary mapping: path in the export → how to write it.
    """

    name: str
    loader: str
    post_norm: bool
    loss_mask: str
    layer_ids: Callable[[LayerSet], list[int]]
    write: Callable[[Path, Iterable[ExportSample]], Files]
    config: Callable[[list[int], int | None], dict[str, Any]]
    vocabulary: Callable[[VocabularyMapping], dict[str, Callable[[Path], None]]]


def layer_outputs(layer_set: LayerSet) -> list[int]:
    """The auxiliary layers as 0-based outputs of layers, which SpecForge and ModelOpt count."""
    outputs = [to_layer_output(i) for i in layer_set.aux]
    known = [i for i in outputs if i is not None]
    if len(known) != len(outputs):
        raise ExportError(
            "this trainer counts outputs of layers, and the embedding output is none",
            where=layer_set.id,
            expected="auxiliary residual ids from 1 on",
            got=list(layer_set.aux),
            remedy="export another layer set, or for speculators",
        )
    return known
