"""SpecForge, offline: ``<partition>/data_<row>.ckpt``, a file of ``torch.save`` for each sample.

| key | is |
|---|---|
| ``input_ids`` | int64 [L] |
| ``loss_mask`` | int64 [L], **shifted left by one**: position i has the mask of token i + 1, the last position 0 |
| ``hidden_state`` | [1, L, H], the final state **after** the norm: the trainer applies the output head alone |
| ``aux_hidden_state`` | [1, L, 3·H] |

Its trainer moves the ids and the final states left by one and leaves the mask, so that position i takes the auxiliary states
of token i, the embedding of token i + 1, and the target's prediction after that: the mask must be that of token i + 1. A later
SpecForge that moves the mask itself would move it twice; the manifest says for which version the files are.

Where it is given no vocabulary mapping it counts the ids under this mask, which are those before the supervised ones: make
the mapping here, and name it in ``model.vocab_mapping_path``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hs_assets.errors import ExportError
from hs_assets.exports import torch_file
from hs_assets.exports.trainer import ExportSample, Files, Trainer, layer_outputs
from hs_assets.exports.vocabulary import VocabularyMapping
from hs_assets.wire.layers import LayerSet

_AUX_LAYERS = 3


def _write(folder: Path, samples: Iterable[ExportSample]) -> Files:
    for sample in samples:
        path = folder / f"data_{sample.name}.ckpt"
        content = {
            "input_ids": sample.input_ids,
            "loss_mask": np.append(sample.loss_mask[1:], 0),
            "hidden_state": sample.final[None],
            "aux_hidden_state": sample.aux_side_by_side[None],
        }
        torch_file.save(content, path)
        yield sample, path


def _layer_ids(layer_set: LayerSet) -> list[int]:
    if len(layer_set.aux) != _AUX_LAYERS:
        raise ExportError(
            "SpecForge takes exactly three auxiliary layers",
            where=layer_set.id,
            expected=_AUX_LAYERS,
            got=len(layer_set.aux),
            remedy="export another layer set; a subset of a stored one needs no server: set layers, then materialise",
        )
    return layer_outputs(layer_set)


def _config(layer_ids: list[int], draft_vocab_size: int | None) -> dict[str, Any]:
    layers = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": layer_ids}
    size = {} if draft_vocab_size is None else {"draft_vocab_size": draft_vocab_size}
    return {"eagle_config": layers, **size}


def _vocabulary(mapping: VocabularyMapping) -> dict[str, Callable[[Path], None]]:
    return {"vocab_mapping/vocab_mapping.pt": partial(torch_file.save, {"d2t": mapping.d2t, "t2d": mapping.t2d})}


SPECFORGE = Trainer(
    name="specforge",
    loader="specforge 0.2.0",
    post_norm=True,
    loss_mask="of token i + 1 (shifted left by one, last position 0): the trainer shifts ids and final states, not the mask",
    layer_ids=_layer_ids,
    write=_write,
    config=_config,
    vocabulary=_vocabulary,
)
