"""NVIDIA ModelOpt, offline: ``<partition>/<conversation id>.pt``, a file of ``torch.save`` for each sample.

| key | is |
|---|---|
| ``input_ids`` | int64 [L] |
| ``hidden_states`` | [L, H], the final state **after** the norm, as heads take it that know of no flag |
| ``aux_hidden_states`` | [L, K·H] |
| ``loss_mask`` | int64 [L], token coordinates: the trainer shifts it with the target's states |
| ``conversation_id`` | partition and row of the sample |
| ``hidden_states_prenorm`` | False |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from hs_assets.exports import torch_file
from hs_assets.exports.trainer import ExportSample, Files, Trainer, layer_outputs
from hs_assets.exports.vocabulary import VocabularyMapping


def _write(folder: Path, samples: Iterable[ExportSample]) -> Files:
    for sample in samples:
        conversation_id = f"{sample.sample_id.rpartition('/')[0]}-{sample.name}"
        path = folder / f"{conversation_id}.pt"
        content: dict[str, torch_file.Value] = {
            "input_ids": sample.input_ids,
            "hidden_states": sample.final,
            "aux_hidden_states": sample.aux_side_by_side,
            "loss_mask": sample.loss_mask,
            "conversation_id": conversation_id,
            "hidden_states_prenorm": False,
        }
        torch_file.save(content, path)
        yield sample, path


def _config(layer_ids: list[int], draft_vocab_size: int | None) -> dict[str, Any]:
    size = {} if draft_vocab_size is None else {"draft_vocab_size": draft_vocab_size}
    return {"eagle_architecture_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": layer_ids, **size}}


def _vocabulary(mapping: VocabularyMapping) -> dict[str, Callable[[Path], None]]:
    return {"draft_vocab_cache.pth": partial(torch_file.save, mapping.d2t)}  # not .pt: those are all taken for samples


MODELOPT = Trainer(
    name="modelopt",
    loader="nvidia-modelopt 0.47.0",
    post_norm=True,
    loss_mask="of token i (token coordinates): the trainer shifts it",
    layer_ids=layer_outputs,
    write=_write,
    config=_config,
    vocabulary=_vocabulary,
)
