"""bfloat16 for zarr 3.1, under the name that zarr-extensions gives it, and the fast way to move its bytes.

zarr has no bfloat16 and never loads the entry points that could bring one, so importing this module registers it: the
writer does, and whoever opens the arrays with zarr must. The bits are those of ``ml_dtypes.bfloat16``; TensorStore reads
and writes the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import zarr
from zarr.core.array import AsyncArray
from zarr.core.dtype.npy.float import BaseFloat
from zarr.core.metadata.v3 import ArrayV3Metadata
from zarr.dtype import data_type_registry

from hs_assets.store.arrays import BFLOAT16

NAN_BITS = 0x7FC0
"""The fill value: no stored state is NaN, so a missing shard can be told from data."""


@dataclass(frozen=True, kw_only=True)
class BFloat16(BaseFloat[Any, Any]):
    """zarr data type ``bfloat16``."""

    dtype_cls = type(BFLOAT16)
    _zarr_v3_name: ClassVar[str] = "bfloat16"
    _zarr_v2_names: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        if dtype != BFLOAT16:
            raise zarr.core.dtype.common.DataTypeValidationError(f"expected {BFLOAT16}, got {dtype}")
        return cls()

    def to_native_dtype(self) -> Any:
        return BFLOAT16

    @property
    def item_size(self) -> int:
        return 2


data_type_registry.register(BFloat16._zarr_v3_name, BFloat16)


def as_bits(array: zarr.Array[Any]) -> zarr.Array[Any]:
    """A bfloat16 array opened once more as uint16: the same bytes, through zarr's native path, NaN payloads and -0.0 kept.

    Arrays of other types are given back as they are. What lies on disk is not touched.
    """
    metadata = array.metadata.to_dict()
    if metadata["data_type"] != BFloat16._zarr_v3_name:
        return array
    changed = ArrayV3Metadata.from_dict({**metadata, "data_type": "uint16", "fill_value": NAN_BITS})
    inner = array.async_array
    return zarr.Array(AsyncArray(metadata=changed, store_path=inner.store_path, config=inner.config))
