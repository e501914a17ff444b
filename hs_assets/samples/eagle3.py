"""A dump → the states of one sample, mapped from the spool, as they are checked and stored."""

from __future__ import annotations

import mmap
import zlib
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from hs_assets.errors import WireError
from hs_assets.samples.prompts import Prompt
from hs_assets.wire.dump import HEADER_BYTES, WORD_BYTES, DumpLayout, read_layout, token_sha256
from hs_assets.wire.records import AnswerRecord, CommitRecord
from hs_assets.wire.spool import DumpFiles

DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}


@dataclass(frozen=True, slots=True)
class CapturedSample:
    """One prompt and what the server gave for it.

    ``token_ids`` int32 [T] as the server saw them; ``states`` [T, K+1, H], slots in the order of
    ``commit.residual_ids``, the last one the final state, before the norm. Both are mapped: valid until the dump is freed.
    """

    prompt: Prompt
    commit: CommitRecord
    answer: AnswerRecord
    token_ids: np.ndarray
    states: np.ndarray

    def residual(self, residual_id: int) -> np.ndarray:
        """The states of one residual id, [T, H]."""
        return self.states[:, self.commit.residual_ids.index(residual_id)]


def load_sample(prompt: Prompt, files: DumpFiles) -> CapturedSample:
    """Map a committed dump and check that it is what its records say, byte for byte.

    Raises:
        WireError: the dump is not committed, not of this version, cut, or another one than its records describe.
    """
    commit, answer = CommitRecord.read(files.commit), AnswerRecord.read(files.answer)
    layout = read_layout(files.data)
    with files.data.open("rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    states, ids = data[HEADER_BYTES : layout.token_ids_offset], data[layout.token_ids_offset : layout.file_bytes]
    claimed = DumpLayout(commit.tokens, commit.residual_ids, commit.hidden_size, commit.dtype)
    same_header = data[:HEADER_BYTES] == claimed.header(files.rid) and {commit.rid, answer.rid} == {files.rid}
    if not same_header or commit.bytes != layout.file_bytes:
        raise WireError("a dump is not what its records say", where=files.data, expected=commit, got=(layout, answer.rid))
    sums = (zlib.crc32(row_checksums(states, layout.row_bytes).data), token_sha256(ids))
    recorded = (commit.row_checksums_crc32, commit.token_sha256)
    if sums != recorded:
        problem = "the checksums of a dump differ from those in its commit record"
        raise WireError(problem, where=files.data, expected=recorded, got=sums)
    shape = (layout.tokens, len(layout.residual_ids), layout.hidden_size)
    return CapturedSample(
        prompt, commit, answer, np.frombuffer(ids, "<i4"), np.frombuffer(states, DTYPES[layout.dtype]).reshape(shape)
    )


def row_checksums(rows: memoryview | bytes, row_bytes: int) -> np.ndarray:
    """The checksum (`hs_assets.wire.dump`) of each row, uint32 [T]."""
    words = np.frombuffer(rows, "<u4").reshape(-1, row_bytes // WORD_BYTES)
    weights = np.arange(words.shape[1], dtype="<u4") * 2 + 1
    sums: np.ndarray = np.einsum("ij,j->i", words, weights)
    return sums
