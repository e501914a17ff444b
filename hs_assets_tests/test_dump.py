"""The layout of a dump: where its parts lie, that safetensors reads it, and that anything else is refused."""

from __future__ import annotations

import hashlib
import json
import struct

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from hs_assets.errors import WireError
from hs_assets.wire.dump import (
    DUMP_VERSION,
    HEADER_BYTES,
    ITEM_BYTES,
    DumpLayout,
    read_layout,
    read_safetensors_header,
    token_sha256,
)

RID = "hs.s.9f2c01ab.demo-00003.0017.T5"
LAYOUT = DumpLayout(5, (3, 31, 61), 4, "F32")
LAYOUTS = st.builds(
    DumpLayout,
    st.integers(1, 40),
    st.lists(st.integers(0, 99), min_size=1, max_size=9).map(tuple),
    st.integers(1, 33),
    st.sampled_from(sorted(ITEM_BYTES)),
)


def write_dump(path, layout=LAYOUT, rid=RID):
    body = bytes(i % 251 for i in range(layout.file_bytes - HEADER_BYTES))
    path.write_bytes(layout.header(rid) + body)
    return body


def write_dump_with_header(path, change):
    """A dump whose header `change` was applied to, padded to the size that it had."""
    write_dump(path)
    data = path.read_bytes()
    header = json.loads(data[8:HEADER_BYTES])
    change(header)
    path.write_bytes(data[:8] + json.dumps(header).encode().ljust(HEADER_BYTES - 8) + data[HEADER_BYTES:])


def refused(path):
    with pytest.raises(WireError) as caught:
        read_layout(path)
    message = str(caught.value)
    assert f"\n  where: {path}" in message
    assert "\n  expected: " in message
    assert "\n  got: " in message
    return message


def test_bytes_of_the_parts():
    layout = DumpLayout(1000, (3, 31, 59, 61), 7168, "BF16")
    assert layout.row_bytes == 57_344
    assert layout.row_offset(0) == 4096
    assert layout.row_offset(3) == 4096 + 3 * 57_344
    assert layout.token_ids_offset == 4096 + 57_344_000
    assert layout.file_bytes == 4096 + 57_344_000 + 4000


def test_two_bytes_an_element():
    assert DumpLayout(1, (1, 2), 10, "BF16").row_bytes == 40
    assert DumpLayout(1, (1, 2), 10, "F16").row_bytes == 40
    assert DumpLayout(1, (1, 2), 10, "F32").row_bytes == 80


@settings(deadline=None)
@given(LAYOUTS)
def test_safetensors_reads_what_the_header_says(tmp_path_factory, layout):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    body = write_dump(path, layout)
    tensors = dict(safetensors.deserialize(path.read_bytes()))
    states, ids = tensors["hidden_states"], tensors["token_ids"]
    assert set(tensors) == {"hidden_states", "token_ids"}
    assert (states["dtype"], states["shape"]) == (layout.dtype, [layout.tokens, len(layout.residual_ids), layout.hidden_size])
    assert (ids["dtype"], ids["shape"]) == ("I32", [layout.tokens])
    assert bytes(states["data"]) == body[: layout.token_ids_offset - HEADER_BYTES]
    assert bytes(ids["data"]) == body[layout.token_ids_offset - HEADER_BYTES :]
    assert read_layout(path) == layout


def test_metadata(tmp_path):
    path = tmp_path / "dump.safetensors"
    write_dump(path)
    with safetensors.safe_open(path, "numpy") as file:
        assert file.metadata() == {
            "format": "hs-assets-dump",
            "version": DUMP_VERSION,
            "rid": RID,
            "residual_ids": "3,31,61",
        }


def test_header_is_always_as_long():
    assert len(LAYOUT.header(RID)) == len(DumpLayout(10**9, tuple(range(500)), 7168, "BF16").header(RID)) == 4096


def test_header_too_long():
    with pytest.raises(WireError, match="the header of a dump is too long") as caught:
        DumpLayout(1, tuple(range(2000)), 7168, "BF16").header(RID)
    message = str(caught.value)
    assert f"\n  where: {RID}\n  expected: at most 4088 bytes\n  got: " in message


def test_every_truncation_is_seen(tmp_path):
    path = tmp_path / "dump.safetensors"
    write_dump(path)
    data = path.read_bytes()
    for length in [*range(24), *range(100, HEADER_BYTES, 333), *range(HEADER_BYTES, len(data))]:
        path.write_bytes(data[:length])
        refused(path)
    path.write_bytes(data + b"\0")
    assert f"\n  expected: {len(data)}\n  got: {len(data) + 1}" in refused(path)


def test_a_foreign_safetensors_file(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file({"hidden_states": np.zeros((5, 3, 4), np.float32), "token_ids": np.zeros(5, np.int32)}, path)
    assert "not a dump of this version" in refused(path)
    assert read_safetensors_header(path)[0].keys() == {"hidden_states", "token_ids"}


@pytest.mark.parametrize(
    "content",
    [b"", b"\x01", struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 4) + b"\xff\xff\xff\xff", struct.pack("<Q", 2**62) + b"{}"],
    ids=["empty", "one byte", "a list", "no text", "endless"],
)
def test_no_safetensors_file(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    assert "not a safetensors file" in refused(path)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda h: h["__metadata__"].update(version="2"), id="newer version"),
        pytest.param(lambda h: h["__metadata__"].update(format="pt"), id="other format"),
        pytest.param(lambda h: h["__metadata__"].update(residual_ids="3,31"), id="fewer ids than slots"),
        pytest.param(lambda h: h["__metadata__"].update(residual_ids="3,31,59,61"), id="more ids than slots"),
        pytest.param(lambda h: h["__metadata__"].update(residual_ids="3,x,61"), id="no ids"),
        pytest.param(lambda h: h["__metadata__"].pop("residual_ids"), id="ids missing"),
        pytest.param(lambda h: h["__metadata__"].pop("rid"), id="rid missing"),
        pytest.param(lambda h: h["__metadata__"].update(more="x"), id="more metadata"),
        pytest.param(lambda h: h.pop("__metadata__"), id="no metadata"),
        pytest.param(lambda h: h.pop("token_ids"), id="no token ids"),
        pytest.param(lambda h: h.pop("hidden_states"), id="no states"),
        pytest.param(lambda h: h.update(hidden_states=[]), id="states are a list"),
        pytest.param(lambda h: h["hidden_states"].update(shape=[5, 12]), id="two axes"),
        pytest.param(lambda h: h["hidden_states"].update(shape=[4, 3, 5]), id="another shape of as many bytes"),
        pytest.param(lambda h: h["hidden_states"].update(shape=None), id="no shape"),
        pytest.param(lambda h: h["hidden_states"].update(dtype="F64"), id="dtype unknown to the contract"),
        pytest.param(lambda h: h["hidden_states"].update(dtype="BF16"), id="another dtype"),
        pytest.param(lambda h: h["hidden_states"].update(data_offsets=[4, 244]), id="states elsewhere"),
        pytest.param(lambda h: h["token_ids"].update(shape=[6]), id="more ids than rows"),
        pytest.param(lambda h: h["token_ids"].update(dtype="I64"), id="64-bit ids"),
    ],
)
def test_header_that_is_not_of_this_version(tmp_path, change):
    path = tmp_path / "dump.safetensors"
    write_dump_with_header(path, dict)  # changes nothing
    assert read_layout(path) == LAYOUT
    write_dump_with_header(path, change)
    message = refused(path)
    assert "not a dump of this version" in message
    assert f"\n  expected: hs-assets-dump {DUMP_VERSION}\n" in message


def test_data_that_begins_elsewhere(tmp_path):
    path = tmp_path / "dump.safetensors"
    body = write_dump(path)
    text = path.read_bytes()[8:HEADER_BYTES].rstrip()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    assert safetensors.deserialize(path.read_bytes())
    assert "not a dump of this version" in refused(path)


def test_token_hash_is_over_little_endian_int32():
    ids = [1, 163_839, 0]
    expected = hashlib.sha256(b"\x01\0\0\0\xff\x7f\x02\0\0\0\0\0").hexdigest()
    assert token_sha256(np.array(ids, "<i4").tobytes()) == expected
    assert token_sha256(memoryview(np.array(ids, "<i4"))) == expected
