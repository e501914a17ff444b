"""speculators: a dataset folder with token ids and masks, and a safetensors file of states for each sample.

| file | is |
|---|---|
| ``data-00000-of-00001.arrow`` … | a Hugging Face dataset: ``input_ids`` and ``loss_mask`` (token coordinates), ``seq_len`` |
| ``hidden_states/hs_<i>.safetensors`` | i is the row of the dataset: ``hidden_states`` [L, K+1, H], ``token_ids`` int64 [L] |

The last slot is the final state **before** the norm: the trainer applies it. Each partition is a dataset of its own;
``all/`` is one over all partitions, its states linked.

The format of speculators 0.3 to 0.6 (``--legacy``) is ``<partition>/data_<row>.pt``, a file of ``torch.save``: ``input_ids``
and ``loss_mask`` int64 [L], ``hidden_states`` a list of [L, H], the final state last and before the norm, which the trainers
apply from 0.4 on.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hs_assets.exports import torch_file
from hs_assets.exports.trainer import ExportSample, Files, Trainer
from hs_assets.exports.vocabulary import VocabularyMapping
from hs_assets.wire.layers import LayerSet, to_speculators_id

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int64": "I64"}
_FEATURES = {
    "input_ids": {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "List"},
    "loss_mask": {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "List"},
    "seq_len": {"dtype": "int64", "_type": "Value"},
}
ARROW = "data-00000-of-00001.arrow"
"""The one Arrow file of a dataset."""

STATES = "hidden_states"


def states_file(row: int) -> str:
    """Name of the file of a row's states in the folder `STATES`."""
    return f"hs_{row}.safetensors"


def _write(folder: Path, samples: Iterable[ExportSample]) -> Files:
    (folder / STATES).mkdir()
    rows = []
    for row, sample in enumerate(samples):
        path = folder / STATES / states_file(row)
        slots = np.stack([*sample.aux, sample.final], axis=1)
        _write_safetensors(path, {"hidden_states": slots, "token_ids": sample.input_ids})
        rows.append({"input_ids": sample.input_ids, "loss_mask": sample.loss_mask, "seq_len": len(sample.input_ids)})
        yield sample, path
    write_dataset(folder, [_table(rows)])


def _write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    header, offset = {}, 0
    for name, array in tensors.items():
        end = offset + array.nbytes
        header[name] = {"dtype": _DTYPES[array.dtype.name], "shape": array.shape, "data_offsets": [offset, end]}
        offset = end
    body = json.dumps(header).encode()
    body = body.ljust(-(-len(body) // 8) * 8)  # the data begins at a multiple of eight
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(body)) + body)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def write_dataset(folder: Path, tables: Iterable[Any]) -> None:
    """Write Arrow tables, one after the other, as ``datasets.Dataset.save_to_disk`` does with the format ``torch``."""
    import pyarrow as pa

    with pa.OSFile(str(folder / ARROW), "wb") as sink, pa.ipc.new_stream(sink, _schema()) as writer:
        for table in tables:
            writer.write_table(table)
    state: dict[str, Any] = {
        "_data_files": [{"filename": ARROW}],
        "_fingerprint": "0" * 16,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": "torch",
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    (folder / "dataset_info.json").write_text(json.dumps({"citation": "", "description": "", "features": _FEATURES}, indent=2))


def read_dataset(folder: Path) -> Any:
    """The Arrow table of a dataset folder, mapped."""
    import pyarrow as pa

    with pa.memory_map(str(folder / ARROW)) as source, pa.ipc.open_stream(source) as stream:
        return stream.read_all()


def _table(rows: list[dict[str, Any]]) -> Any:
    import pyarrow as pa

    return pa.Table.from_pylist(rows, schema=_schema())


def _schema() -> Any:
    import pyarrow as pa

    numbers = pa.list_(pa.int64())
    schema = pa.schema([("input_ids", numbers), ("loss_mask", numbers), ("seq_len", pa.int64())])
    return schema.with_metadata({"huggingface": json.dumps({"info": {"features": _FEATURES}})})


def _write_legacy(folder: Path, samples: Iterable[ExportSample]) -> Files:
    for sample in samples:
        path = folder / f"data_{sample.name}.pt"
        states = [*sample.aux, sample.final]
        torch_file.save({"input_ids": sample.input_ids, "loss_mask": sample.loss_mask, "hidden_states": states}, path)
        yield sample, path


def _layer_ids(layer_set: LayerSet) -> list[int]:
    return [to_speculators_id(i) for i in layer_set.aux]


def _config(layer_ids: list[int], draft_vocab_size: int | None) -> dict[str, Any]:
    size = {} if draft_vocab_size is None else {"draft_vocab_size": draft_vocab_size}
    return {"target_layer_ids": layer_ids, "eagle_aux_hidden_state_layer_ids": layer_ids, **size}


def _vocabulary(mapping: VocabularyMapping) -> dict[str, Callable[[Path], None]]:
    arrays = {"d2t": mapping.d2t, "t2d": mapping.t2d}
    return {f"{name}-{len(mapping.d2t)}.npy": partial(np.save, arr=array) for name, array in arrays.items()}


SPECULATORS = Trainer(
    name="speculators",
    loader="speculators 0.9.0",
    post_norm=False,
    loss_mask="of token i (token coordinates): the trainer shifts it",
    layer_ids=_layer_ids,
    write=_write,
    config=_config,
    vocabulary=_vocabulary,
)
SPECULATORS_LEGACY = Trainer(
    name="speculators-legacy",
    loader="speculators 0.6.0.2",
    post_norm=False,
    loss_mask="of token i (token coordinates): the trainer shifts it",
    layer_ids=_layer_ids,
    write=_write_legacy,
    config=_config,
    vocabulary=_vocabulary,
)
