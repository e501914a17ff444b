"""The file that ``torch.save`` writes, made without torch: the same content gives the same bytes.

A zip of uncompressed records: ``data.pkl`` (a pickle that names the tensors' storages), one record a storage, the byte order
and the version of the format. Storages begin at multiples of 64 bytes, so that ``torch.load(…, mmap=True)`` maps them.
``weights_only=True`` loads it.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

Value = np.ndarray | str | bool | int | Sequence["Value"] | Mapping[str, "Value"]
"""What can be saved: tensors as arrays, and plain values."""

_STORAGES = {
    "bfloat16": "BFloat16Storage",
    "float16": "HalfStorage",
    "float32": "FloatStorage",
    "int64": "LongStorage",
    "bool": "BoolStorage",
}
_ALIGNMENT = 64
_LOCAL_HEADER, _ZIP64_FIELD, _EXTRA_HEADER = 30, 20, 4


def save(value: Value, path: Path) -> None:
    """Write `value` to `path`.

    Raises:
        TypeError: it holds something that is neither an array of a known dtype nor a plain value.
    """
    pickled = _Pickle()
    body = pickled.whole(value)
    name = path.name.split(".")[0]
    with path.open("wb") as file, zipfile.ZipFile(file, "w") as archive:
        _record(archive, f"{name}/data.pkl", body)
        _record(archive, f"{name}/byteorder", b"little")
        for number, array in enumerate(pickled.storages):
            _record(archive, f"{name}/data/{number}", array.reshape(-1).view(np.uint8).data)
        _record(archive, f"{name}/version", b"3\n")


def _record(archive: zipfile.ZipFile, name: str, data: bytes | memoryview) -> None:
    entry = zipfile.ZipInfo(name)  # of 1980, always
    entry.file_size = len(data)
    # zipfile decides by the size whether the header takes 64-bit fields, and this must know it before
    large = len(data) * 1.05 > zipfile.ZIP64_LIMIT
    begin = archive.fp.tell() + _LOCAL_HEADER + len(name) + _EXTRA_HEADER + _ZIP64_FIELD * large  # type: ignore[union-attr]
    padding = -begin % _ALIGNMENT
    entry.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    with archive.open(entry, "w") as record:
        record.write(data)


class _Pickle:
    """Pickle protocol 2 of a value, as torch's loader takes it; ``storages`` are the arrays that it names by number."""

    def __init__(self) -> None:
        self.storages: list[np.ndarray] = []

    def whole(self, value: Value) -> bytes:
        return pickle.PROTO + b"\x02" + self._value(value) + pickle.STOP

    def _value(self, value: Value) -> bytes:
        match value:
            case np.ndarray():
                return self._tensor(value)
            case bool():
                return pickle.NEWTRUE if value else pickle.NEWFALSE
            case int():
                return _integer(value)
            case str():
                return _text(value)
            case Mapping():
                items = b"".join(_text(key) + self._value(item) for key, item in value.items())
                return pickle.EMPTY_DICT + pickle.MARK + items + pickle.SETITEMS
            case Sequence():
                return pickle.EMPTY_LIST + pickle.MARK + b"".join(map(self._value, value)) + pickle.APPENDS
        raise TypeError(f"cannot be saved: {type(value)}")

    def _tensor(self, array: np.ndarray) -> bytes:
        storage = _STORAGES.get(array.dtype.name)
        if storage is None:
            raise TypeError(f"no tensor has the dtype {array.dtype}")
        key, whole = str(len(self.storages)), np.ascontiguousarray(array)
        self.storages.append(whole)
        reference = _tuple(_text("storage"), _global("torch", storage), _text(key), _text("cpu"), _integer(whole.size))
        strides = [step // whole.itemsize for step in whole.strides]
        arguments = _tuple(
            reference + pickle.BINPERSID,
            _integer(0),
            _tuple(*map(_integer, whole.shape)),
            _tuple(*map(_integer, strides)),
            pickle.NEWFALSE,  # requires_grad
            _global("collections", "OrderedDict") + pickle.EMPTY_TUPLE + pickle.REDUCE,
        )
        return _global("torch._utils", "_rebuild_tensor_v2") + arguments + pickle.REDUCE


def _tuple(*items: bytes) -> bytes:
    return pickle.MARK + b"".join(items) + pickle.TUPLE


def _global(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    return pickle.BINUNICODE + struct.pack("<I", len(text.encode())) + text.encode()


def _integer(number: int) -> bytes:
    body = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return pickle.LONG1 + bytes([len(body)]) + body
