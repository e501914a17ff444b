"""The layout of a dump: a valid safetensors file whose data begins at byte 4096.

0     header size N, uint64 little-endian; then N bytes of JSON, padded with spaces, so that 8 + N = 4096
4096  hidden_states  [T, K+1, H], the server's dtype, one row a token, slots in the order of ``residual_ids``
…     token_ids      int32 [T]

The **checksum of a row** is the sum of its 32-bit little-endian words w_j, each times 2j + 1, modulo 2^32. The server makes
it on the device, before the row is copied anywhere; the commit record has the crc32 of all row checksums, uint32 [T].
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path

from hs_assets.errors import WireError

HEADER_BYTES = 4096
DUMP_FORMAT = "hs-assets-dump"
DUMP_VERSION = "1"
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
TOKEN_BYTES = 4
WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class DumpLayout:
    """Shape of a dump and the places of its parts, in bytes.

    ``tokens`` is T, ``residual_ids`` name the K+1 slots, ``hidden_size`` is H, ``dtype`` the safetensors name.
    """

    tokens: int
    residual_ids: tuple[int, ...]
    hidden_size: int
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's states in all slots."""
        return len(self.residual_ids) * self.hidden_size * ITEM_BYTES[self.dtype]

    @property
    def token_ids_offset(self) -> int:
        return HEADER_BYTES + self.tokens * self.row_bytes

    @property
    def file_bytes(self) -> int:
        return self.token_ids_offset + self.tokens * TOKEN_BYTES

    def row_offset(self, row: int) -> int:
        """Where the states of token `row` begin."""
        return HEADER_BYTES + row * self.row_bytes

    def header(self, rid: str) -> bytes:
        """The first 4096 bytes of the file."""
        states, ids = self.tokens * self.row_bytes, self.tokens * TOKEN_BYTES
        body = json.dumps(
            {
                "__metadata__": {
                    "format": DUMP_FORMAT,
                    "version": DUMP_VERSION,
                    "rid": rid,
                    "residual_ids": ",".join(str(i) for i in self.residual_ids),
                },
                "hidden_states": {
                    "dtype": self.dtype,
                    "shape": [self.tokens, len(self.residual_ids), self.hidden_size],
                    "data_offsets": [0, states],
                },
                "token_ids": {"dtype": "I32", "shape": [self.tokens], "data_offsets": [states, states + ids]},
            }
        ).encode()
        size = HEADER_BYTES - 8
        if len(body) > size:
            raise WireError("the header of a dump is too long", where=rid, expected=f"at most {size} bytes", got=len(body))
        return struct.pack("<Q", size) + body.ljust(size)


def read_safetensors_header(path: Path) -> tuple[dict[str, dict[str, object]], int]:
    """The JSON header of a safetensors file (metadata left in) and the offset at which its data begins.

    Raises:
        WireError: the file is no safetensors file, or is cut.
    """
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            body = file.read(size) if 0 < size <= 100_000_000 else b""
    except OSError as error:
        raise WireError("a safetensors file cannot be read", where=path, got=error) from error
    try:
        header = json.loads(body) if len(body) == size and size else None
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise WireError(
            "not a safetensors file", where=path, expected="8 bytes of size, then a JSON header", got=prefix + body[:40]
        )
    return header, 8 + size


def read_layout(path: Path) -> DumpLayout:
    """The layout that a dump's header declares, checked against the contract and against the size of the file.

    Raises:
        WireError: the file is not a dump of this version, or is cut.
    """
    header, data_start = read_safetensors_header(path)
    try:
        metadata, states = header["__metadata__"], header["hidden_states"]
        tokens, slots, hidden_size = (int(n) for n in states["shape"])  # type: ignore[attr-defined]  # JSON: checked by the except below
        residual_ids = tuple(int(i) for i in str(metadata["residual_ids"]).split(","))
        layout = DumpLayout(tokens, residual_ids, hidden_size, str(states["dtype"]))
        same = data_start == HEADER_BYTES and header == json.loads(layout.header(str(metadata["rid"]))[8:])
    except (KeyError, TypeError, ValueError, AttributeError):
        same = False
    if not same or slots != len(residual_ids):
        raise WireError("not a dump of this version", where=path, expected=f"{DUMP_FORMAT} {DUMP_VERSION}", got=str(header)[:200])
    if (size := path.stat().st_size) != layout.file_bytes:
        raise WireError("a dump has another size than its header says", where=path, expected=layout.file_bytes, got=size)
    return layout


def token_sha256(token_ids: bytes | memoryview) -> str:
    """The token hash: hex sha256 of the ids as little-endian int32."""
    return hashlib.sha256(token_ids).hexdigest()
