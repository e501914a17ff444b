"""A dump as the server writes it is mapped bit for bit; one that is damaged, cut, or not committed is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from hs_assets.capture.assembly import Assembly, DumpFacts
from hs_assets.errors import WireError
from hs_assets.samples.eagle3 import DTYPES, CapturedSample, load_sample
from hs_assets.samples.prompts import Prompt
from hs_assets.wire.dump import HEADER_BYTES, token_sha256
from hs_assets.wire.records import WIRE_VERSION, AnswerRecord, ClaimRecord, CommitRecord
from hs_assets.wire.rid import Rid, new_rid
from hs_assets.wire.spool import DumpFiles, Spool
from hs_assets_tests.dump_material import make_assembly, make_chunk

RESIDUAL_IDS, HIDDEN, TOKENS = (1, 2, 4), 8, 5
NAMES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    spool = Spool(tmp_path / "spool")
    spool.make()
    return spool


def make_prompt(tokens: int = TOKENS, seed: int = 0) -> Prompt:
    ids = np.random.default_rng(seed).integers(0, 1000, tokens).astype("<i4")
    return Prompt(17, ids, np.ones(tokens, bool), token_sha256(ids.tobytes()))


def make_states(dtype: str, tokens: int = TOKENS, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(tokens, len(RESIDUAL_IDS), HIDDEN)).astype(NAMES[dtype])


def claim(spool: Spool, prompt: Prompt) -> tuple[Rid, DumpFiles]:
    """What the client does before it sends the request."""
    rid = new_rid("demo-00003", prompt.row, len(prompt.input_ids))
    files = spool.dump(str(rid))
    ClaimRecord(str(rid), 1_000_000, os.getpid(), 0.0).write(files.claim)
    return rid, files


def write_dump(
    spool: Spool, prompt: Prompt, states: np.ndarray, *, chunks: tuple[int, ...] = (), dtype: str = "BF16"
) -> DumpFiles:
    """The dump of a prompt, written by the plugin's own code in chunks of these many tokens, and the client's answer."""
    rid, files = claim(spool, prompt)
    assembly = make_assembly(DumpFacts("server-1", "fingerprint-1", RESIDUAL_IDS, HIDDEN, dtype), spool)
    add_chunks(assembly, files, rid, prompt, states, chunks or (len(prompt.input_ids),))
    AnswerRecord(str(rid), len(prompt.input_ids), 0, ((-0.5, 7), (-1.5, 8))).write(files.answer)
    return files


def add_chunks(
    assembly: Assembly, files: DumpFiles, rid: Rid, prompt: Prompt, states: np.ndarray, chunks: tuple[int, ...]
) -> None:
    prefix = 0
    for rows in chunks:
        part = slice(prefix, prefix + rows)
        assembly.add(files, rid, prefix, make_chunk(prompt.input_ids[part], states[part]))
        prefix += rows


def flip(path: Path, offset: int, bits: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= bits
    path.write_bytes(data)


def equal_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("chunks", [(5,), (2, 3), (1, 1, 1, 1, 1)], ids=str)
def test_a_dump_is_mapped_bit_for_bit(dtype: str, chunks: tuple[int, ...], spool: Spool) -> None:
    prompt, states = make_prompt(), make_states(dtype)
    states[0, 0, :3] = [np.nan, np.inf, -0.0]
    sample = load_sample(prompt, write_dump(spool, prompt, states, chunks=chunks, dtype=dtype))
    assert equal_bits(sample.states, states)
    assert equal_bits(sample.token_ids, prompt.input_ids)
    assert sample.prompt is prompt
    assert sample.commit.chunks == len(chunks)
    assert sample.commit.residual_ids == RESIDUAL_IDS
    assert sample.commit.token_sha256 == prompt.token_sha256 == hashlib.sha256(prompt.input_ids.tobytes()).hexdigest()
    assert sample.answer.top_logprobs == ((-0.5, 7), (-1.5, 8))


def test_dtypes_are_those_of_the_wire() -> None:
    assert DTYPES == NAMES


def test_states_of_a_residual_id(spool: Spool) -> None:
    prompt, states = make_prompt(), make_states("BF16")
    sample = load_sample(prompt, write_dump(spool, prompt, states))
    for slot, residual_id in enumerate(RESIDUAL_IDS):
        assert equal_bits(np.ascontiguousarray(sample.residual(residual_id)), np.ascontiguousarray(states[:, slot]))
    with pytest.raises(ValueError, match="not in tuple"):
        sample.residual(3)


def test_a_sample_cannot_be_written_to(spool: Spool) -> None:
    """Nothing that is checked can be changed afterwards."""
    prompt = make_prompt()
    sample = load_sample(prompt, write_dump(spool, prompt, make_states("F32"), dtype="F32"))
    with pytest.raises(ValueError, match="read-only"):
        sample.states[0, 0, 0] = 1
    with pytest.raises(ValueError, match="read-only"):
        sample.token_ids[0] = 1


def test_a_dump_is_a_safetensors_file(spool: Spool) -> None:
    """Another library reads the same arrays."""
    prompt, states = make_prompt(), make_states("BF16")
    files = write_dump(spool, prompt, states)
    tensors = load_file(files.data)
    sample = load_sample(prompt, files)
    assert equal_bits(tensors["hidden_states"], np.array(sample.states))
    assert equal_bits(tensors["token_ids"], np.array(sample.token_ids))


def test_a_sample_outlives_the_loader_and_many_can_be_open(spool: Spool) -> None:
    prompts = [make_prompt(seed=seed) for seed in range(20)]
    dumps = [write_dump(spool, prompt, make_states("BF16", seed=seed)) for seed, prompt in enumerate(prompts)]
    samples = [load_sample(prompt, files) for prompt, files in zip(prompts, dumps, strict=True)]
    for files in dumps:
        files.data.unlink()
    assert all(equal_bits(sample.states, make_states("BF16", seed=seed)) for seed, sample in enumerate(samples))


# What is refused


def refused(prompt: Prompt, files: DumpFiles) -> WireError:
    with pytest.raises(WireError) as error:
        load_sample(prompt, files)
    return error.value


def test_no_commit_record_no_dump(spool: Spool) -> None:
    prompt = make_prompt()
    files = write_dump(spool, prompt, make_states("BF16"))
    files.commit.unlink()
    assert refused(prompt, files).where == files.commit


def test_a_dump_that_is_still_being_written(spool: Spool) -> None:
    prompt, states = make_prompt(), make_states("BF16")
    rid, files = claim(spool, prompt)
    assembly = make_assembly(DumpFacts("server-1", "fingerprint-1", RESIDUAL_IDS, HIDDEN, "BF16"), spool)
    AnswerRecord(str(rid), TOKENS, 0, ()).write(files.answer)
    add_chunks(assembly, files, rid, prompt, states, (2, 2))
    assert files.data.stat().st_size > HEADER_BYTES
    assert refused(prompt, files).where == files.commit
    add_chunks(assembly, files, rid, prompt, states, (2, 3))
    assert equal_bits(load_sample(prompt, files).states, states)


@pytest.mark.parametrize("missing", ["answer", "data"])
def test_a_file_is_missing(missing: str, spool: Spool) -> None:
    prompt = make_prompt()
    files = write_dump(spool, prompt, make_states("BF16"))
    path: Path = getattr(files, missing)
    path.unlink()
    assert refused(prompt, files).where == path


@pytest.mark.parametrize("part", ["hidden_states", "token_ids"])
@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("bits", [0x01, 0x80, 0xFF])
def test_a_flipped_byte(part: str, place: str, bits: int, spool: Spool) -> None:
    prompt, states = make_prompt(), make_states("BF16")
    files = write_dump(spool, prompt, states)
    ids_begin = HEADER_BYTES + states.nbytes
    first, last = (HEADER_BYTES, ids_begin - 1) if part == "hidden_states" else (ids_begin, ids_begin + TOKENS * 4 - 1)
    flip(files.data, first if place == "first" else last, bits)
    error = refused(prompt, files)
    assert "checksums" in error.problem
    assert error.where == files.data
    flip(files.data, first if place == "first" else last, bits)
    assert isinstance(load_sample(prompt, files), CapturedSample)


def test_any_flipped_bit_of_data_is_seen(spool: Spool) -> None:
    prompt = make_prompt()
    files = write_dump(spool, prompt, make_states("BF16"))
    for offset in range(HEADER_BYTES, files.data.stat().st_size):
        flip(files.data, offset)
        refused(prompt, files)
        flip(files.data, offset)


def test_any_flipped_bit_of_the_header_is_seen(spool: Spool) -> None:
    """Also one that makes another valid header: another name, or other residual ids."""
    prompt = make_prompt()
    files = write_dump(spool, prompt, make_states("BF16"))
    header = files.data.read_bytes()[:HEADER_BYTES]
    unseen = []
    for offset in range(len(header.rstrip()) + 4):
        flip(files.data, offset)
        try:
            load_sample(prompt, files)
        except WireError:
            pass
        else:
            unseen.append(header[max(0, offset - 12) : offset + 12])
        flip(files.data, offset)
    assert unseen == []


@pytest.mark.parametrize("size", [0, 4, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 100, -1])
def test_a_dump_that_is_cut(size: int, spool: Spool) -> None:
    prompt = make_prompt()
    files = write_dump(spool, prompt, make_states("BF16"))
    data = files.data.read_bytes()
    files.data.write_bytes(data[:size])
    assert refused(prompt, files).where == files.data
    files.data.write_bytes(data + b"\0")
    assert "another size" in refused(prompt, files).problem


def test_the_dump_of_another_prompt_under_this_name(spool: Spool) -> None:
    one, other = make_prompt(seed=1), make_prompt(seed=2)
    files, others = (write_dump(spool, prompt, make_states("BF16", seed=seed)) for seed, prompt in enumerate((one, other)))
    files.data.write_bytes(others.data.read_bytes())
    refused(one, files)


def test_a_whole_dump_under_another_name(spool: Spool) -> None:
    """Data and commit record belong together, but to another request than this one."""
    one, other = make_prompt(seed=1), make_prompt(seed=2)
    files, others = (write_dump(spool, prompt, make_states("BF16", seed=seed)) for seed, prompt in enumerate((one, other)))
    files.data.write_bytes(others.data.read_bytes())
    files.commit.write_bytes(others.commit.read_bytes())
    refused(one, files)


@pytest.mark.parametrize(
    "change",
    [
        {"residual_ids": (2, 1, 4)},
        {"residual_ids": (1, 2, 3)},
        {"tokens": TOKENS + 1},
        {"hidden_size": HIDDEN * 2},
        {"dtype": "F16"},
        {"bytes": 1},
        {"token_sha256": "0" * 64},
    ],
    ids=["order", "ids", "tokens", "hidden size", "dtype", "bytes", "token hash"],
)
def test_a_commit_record_that_says_something_else_than_the_dump(change: dict[str, object], spool: Spool) -> None:
    """The rules look at the record: it has to speak of these bytes."""
    prompt = make_prompt()
    files = write_dump(spool, prompt, make_states("BF16"))
    dataclasses.replace(CommitRecord.read(files.commit), **change).write(files.commit)
    refused(prompt, files)


@pytest.mark.parametrize("body", ["", "{}", '{"record": "claim"}', "[]", "null"])
@pytest.mark.parametrize("record", ["commit", "answer"])
def test_a_record_that_is_damaged(record: str, body: str, spool: Spool) -> None:
    prompt = make_prompt()
    files = write_dump(spool, prompt, make_states("BF16"))
    path: Path = getattr(files, record)
    path.write_text(body)
    assert refused(prompt, files).where == path


def test_a_record_of_another_version(spool: Spool) -> None:
    prompt = make_prompt()
    files = write_dump(spool, prompt, make_states("BF16"))
    files.commit.write_text(json.dumps({**json.loads(files.commit.read_text()), "version": 99}))
    error = refused(prompt, files)
    assert (error.expected, error.got) == (WIRE_VERSION, "99")
    assert "same version of hs-assets" in (error.remedy or "")
