"""bfloat16 in zarr: all 65,536 bit patterns, to and from TensorStore, through every codec, and through the alias as bits."""

from __future__ import annotations

import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec
from zarr.core.dtype.common import DataTypeValidationError

from hs_assets.store.arrays import BFLOAT16
from hs_assets.store.dtype import NAN_BITS, BFloat16, as_bits

PATTERNS = np.arange(65_536, dtype=np.uint16).reshape(256, 256)
LAYOUTS = {
    "plain": {"chunks": (128, 256), "compressors": None},
    "crc32c": {"chunks": (128, 256), "compressors": [Crc32cCodec()]},
    "zstd": {"chunks": (128, 256), "compressors": [ZstdCodec(level=1)]},
    "blosc": {"chunks": (128, 256), "compressors": [BloscCodec(typesize=2, cname="zstd", clevel=1, shuffle="shuffle")]},
    "sharded": {"chunks": (32, 256), "shards": (128, 256), "compressors": [Crc32cCodec()]},
    "sharded blosc": {"chunks": (32, 256), "shards": (128, 256), "compressors": [BloscCodec(typesize=2), Crc32cCodec()]},
}


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return LAYOUTS[request.param]


def create(path, layout, shape=PATTERNS.shape):
    return zarr.create_array(
        path, shape=shape, dtype=BFLOAT16, fill_value=float("nan"), config={"write_empty_chunks": True}, **layout
    )


def open_tensorstore(path):
    return ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}).result()


def test_the_type_is_that_of_zarr_extensions(tmp_path):
    create(tmp_path / "a", LAYOUTS["plain"])
    metadata = json.loads((tmp_path / "a" / "zarr.json").read_text())
    assert (metadata["data_type"], metadata["fill_value"]) == ("bfloat16", "NaN")
    assert open_tensorstore(tmp_path / "a").dtype == ts.bfloat16


@pytest.mark.parametrize("through", ["bits", "values"])
def test_tensorstore_reads_what_zarr_wrote(tmp_path, layout, through):
    array = create(tmp_path / "a", layout)
    if through == "bits":
        as_bits(array)[:] = PATTERNS
    else:
        array[:] = PATTERNS.view(BFLOAT16)
    read = np.asarray(open_tensorstore(tmp_path / "a").read().result())
    assert read.dtype == np.dtype(ml_dtypes.bfloat16)
    assert np.array_equal(read.view(np.uint16), PATTERNS)


def test_zarr_reads_what_tensorstore_wrote(tmp_path, layout):
    create(tmp_path / "a", layout)
    open_tensorstore(tmp_path / "a").write(PATTERNS.view(ml_dtypes.bfloat16)).result()
    array = zarr.open_array(tmp_path / "a", mode="r")
    assert array.dtype == np.dtype(ml_dtypes.bfloat16)
    assert np.array_equal(np.asarray(array[:]).view(np.uint16), PATTERNS)
    assert np.array_equal(as_bits(array)[:], PATTERNS)


def test_zarr_reads_an_array_that_tensorstore_made(tmp_path):
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{tmp_path / 'a'}/"},
        "metadata": {"shape": [256, 256], "data_type": "bfloat16", "fill_value": "NaN"},
    }
    ts.open(spec, create=True).result().write(PATTERNS.view(ml_dtypes.bfloat16)).result()
    array = zarr.open_array(tmp_path / "a", mode="r")
    assert isinstance(array.metadata.data_type, BFloat16)
    assert np.isnan(array.fill_value)
    assert np.array_equal(as_bits(array)[:], PATTERNS)


def test_zarr_reads_what_zarr_wrote(tmp_path, layout):
    array = create(tmp_path / "a", layout)
    array[:] = PATTERNS.view(BFLOAT16)
    assert np.array_equal(np.asarray(zarr.open_array(tmp_path / "a")[:]).view(np.uint16), PATTERNS)


@pytest.mark.parametrize("pattern", [0x8000, 0x0000, NAN_BITS, 0x7FC1, 0xFFC0])
def test_chunks_full_of_one_pattern(tmp_path, layout, pattern):
    """Zeros of either sign and NaNs are the ones that a test for empty chunks can take for the fill value."""
    as_bits(create(tmp_path / "a", layout))[:] = np.full(PATTERNS.shape, pattern, np.uint16)
    assert np.unique(as_bits(zarr.open_array(tmp_path / "a"))[:]).tolist() == [pattern]
    assert np.unique(np.asarray(open_tensorstore(tmp_path / "a").read().result()).view(np.uint16)).tolist() == [pattern]


def test_what_was_never_written_reads_as_nan(tmp_path, layout):
    array = create(tmp_path / "a", layout)
    assert np.isnan(np.asarray(array[:]).astype(np.float32)).all()
    assert np.unique(as_bits(array)[:]).tolist() == [NAN_BITS]
    assert np.isnan(np.array(NAN_BITS, np.uint16).view(BFLOAT16))


def test_the_alias_leaves_the_disk_alone(tmp_path, layout):
    array = create(tmp_path / "a", layout)
    before = (tmp_path / "a" / "zarr.json").read_bytes()
    alias = as_bits(array)
    alias[:] = PATTERNS
    assert alias.dtype == np.uint16
    assert (tmp_path / "a" / "zarr.json").read_bytes() == before
    assert zarr.open_array(tmp_path / "a").dtype == BFLOAT16


def test_the_alias_of_a_group_member_grows_with_it(tmp_path):
    group = zarr.create_group(tmp_path / "g")
    array = group.create_array("a", shape=(0, 256), chunks=(128, 256), dtype=BFLOAT16, fill_value=float("nan"))
    array.resize((256, 256))
    as_bits(array)[:] = PATTERNS
    assert np.array_equal(as_bits(group["a"])[:], PATTERNS)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32, np.uint16])
def test_other_types_are_given_back_as_they_are(tmp_path, dtype):
    array = zarr.create_array(tmp_path / "a", shape=(3,), dtype=dtype)
    assert as_bits(array) is array


def test_values_are_those_of_ml_dtypes():
    values = np.array([0.0, -0.0, 1.0, -2.5, 3.3895e38, 1e-40, float("inf")], np.float32)
    assert np.array_equal(values.astype(BFLOAT16).view(np.uint16), values.astype(ml_dtypes.bfloat16).view(np.uint16))
    assert BFloat16().to_native_dtype() == BFLOAT16
    assert BFloat16().item_size == BFLOAT16.itemsize == 2


@pytest.mark.parametrize("dtype", [np.float16, np.uint16, np.float32, np.dtype("V2")])
def test_no_other_dtype_is_taken_for_bfloat16(dtype):
    with pytest.raises(DataTypeValidationError, match="expected bfloat16"):
        BFloat16.from_native_dtype(np.dtype(dtype))
    assert BFloat16.from_native_dtype(np.dtype(ml_dtypes.bfloat16)) == BFloat16()


def test_a_fresh_process_needs_the_import_and_nothing_more(tmp_path):
    as_bits(create(tmp_path / "a", LAYOUTS["sharded"]))[:] = PATTERNS
    read = f"import zarr; print(zarr.open_array({str(tmp_path / 'a')!r}, mode='r')[3, 5].view('uint16'))"
    without = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True)
    with_import = subprocess.run([sys.executable, "-c", f"import hs_assets.store.dtype; {read}"], capture_output=True, text=True)
    assert without.returncode != 0
    assert "bfloat16" in without.stderr
    assert with_import.stdout == f"{PATTERNS[3, 5]}\n"
