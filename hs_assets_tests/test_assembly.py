"""One dump after another, chunk by chunk: what is committed is whole, and whatever goes wrong leaves no commit record."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from hs_assets.capture.assembly import failure_reason
from hs_assets.wire.dump import HEADER_BYTES, read_layout
from hs_assets.wire.records import CommitRecord, FailureRecord
from hs_assets.wire.rid import Kind
from hs_assets_tests.dump_material import (
    FACTS,
    HIDDEN_SIZE,
    RESIDUAL_IDS,
    SLOTS,
    add_chunks,
    checksums_crc32,
    claimed,
    made_spool,
    make_assembly,
    make_chunk,
    make_rid,
    make_rows,
    names_in,
    tiny_tmpfs,
)

TOKENS = 10


@pytest.fixture
def spool(tmp_path):
    return made_spool(tmp_path / "spool")


@pytest.fixture
def rid():
    return make_rid(TOKENS)


@pytest.fixture
def files(spool, rid):
    return claimed(spool, rid)


@pytest.fixture
def assembly(spool):
    return make_assembly(FACTS, spool)


def assert_whole(files, token_ids, states, chunks):
    """The dump is what safetensors reads from it, and what its commit record says."""
    tensors = load_file(files.data)
    assert tensors["token_ids"].dtype == np.int32
    assert tensors["token_ids"].tolist() == token_ids.tolist()
    assert tensors["hidden_states"].dtype == np.float32
    assert np.array_equal(tensors["hidden_states"].view(np.uint32), states.view(np.uint32))
    commit = CommitRecord.read(files.commit)
    assert commit == CommitRecord(
        rid=files.rid,
        server=FACTS.server,
        state_fingerprint=FACTS.state_fingerprint,
        residual_ids=RESIDUAL_IDS,
        tokens=len(token_ids),
        hidden_size=HIDDEN_SIZE,
        dtype="F32",
        bytes=files.data.stat().st_size,
        row_checksums_crc32=checksums_crc32(states),
        token_sha256=hashlib.sha256(token_ids.tobytes()).hexdigest(),
        chunks=chunks,
        committed_at=commit.committed_at,
    )
    assert abs(commit.committed_at - time.time()) < 60
    assert not files.failure.exists()


def assert_failed(files, reason, detail):
    """There is a failure record, and nothing else of the request."""
    failure = FailureRecord.read(files.failure)
    assert (failure.rid, failure.reason) == (files.rid, reason)
    assert detail in failure.detail
    assert names_in(files.folder) == sorted([files.claim.name, files.failure.name])


def open_files(folder: Path) -> list[str]:
    """Files under `folder` that this process has open."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:
            continue
        if target.startswith(f"{folder}/"):
            found.append(target)
    return found


def test_a_prompt_in_one_chunk(assembly, files, rid):
    token_ids, states = make_rows(TOKENS)
    add_chunks(assembly, files, rid, token_ids, states, [TOKENS])
    assert_whole(files, token_ids, states, chunks=1)
    assert open_files(files.folder) == []


def test_there_is_no_commit_before_the_last_row(assembly, files, rid):
    token_ids, states = make_rows(TOKENS)
    for end in range(1, TOKENS):
        add_chunks(assembly, files, rid, token_ids, states, [end], begin=end - 1)
        assert names_in(files.folder) == sorted([files.claim.name, files.data.name])
    add_chunks(assembly, files, rid, token_ids, states, [TOKENS], begin=TOKENS - 1)
    assert_whole(files, token_ids, states, chunks=TOKENS)


def test_the_whole_size_is_reserved_at_the_first_chunk(assembly, files, rid):
    token_ids, states = make_rows(TOKENS)
    add_chunks(assembly, files, rid, token_ids, states, [1])
    size = HEADER_BYTES + TOKENS * (SLOTS * HIDDEN_SIZE * 4 + 4)
    assert files.data.stat().st_size == size
    assert files.data.stat().st_blocks * 512 >= size
    assert read_layout(files.data).tokens == TOKENS


@settings(deadline=None)
@given(st.data())
def test_chunks_of_many_requests_in_any_order_of_requests(tmp_path_factory, data):
    spool = made_spool(tmp_path_factory.mktemp("spool"))
    assembly = make_assembly(FACTS, spool)
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    rows = [make_rows(length, seed) for seed, length in enumerate(lengths)]
    ends = [sorted({*data.draw(st.sets(st.integers(1, length))), length}) for length in lengths]
    order = data.draw(st.permutations([number for number, cuts in enumerate(ends) for _ in cuts]))
    begins, chunks = [0] * len(lengths), [iter(cuts) for cuts in ends]
    for number in order:
        rid, end = make_rid(lengths[number], number), next(chunks[number])
        add_chunks(assembly, claimed(spool, rid), rid, *rows[number], [end], begin=begins[number])
        begins[number] = end
    for number, length in enumerate(lengths):
        assert_whole(spool.dump(str(make_rid(length, number))), *rows[number], chunks=len(ends[number]))


def test_every_bit_pattern_of_bf16_as_two_bytes(spool):
    bits = np.random.default_rng(0).permutation(np.arange(65_536, dtype="<u2")).reshape(-1, SLOTS + 1, 256)
    ids = np.arange(len(bits), dtype="<i4")
    facts = dataclasses.replace(FACTS, residual_ids=(*RESIDUAL_IDS, 62), hidden_size=256, dtype="BF16")
    rid = make_rid(len(bits))
    files = claimed(spool, rid)
    add_chunks(make_assembly(facts, spool), files, rid, ids, bits, [5, 40, len(bits)])
    tensors = dict(safetensors.deserialize(files.data.read_bytes()))
    assert (tensors["hidden_states"]["dtype"], tensors["hidden_states"]["shape"]) == ("BF16", [64, 4, 256])
    assert bytes(tensors["hidden_states"]["data"]) == bits.tobytes()
    assert bytes(tensors["token_ids"]["data"]) == ids.tobytes()
    assert CommitRecord.read(files.commit).bytes == HEADER_BYTES + 65_536 * 2 + 64 * 4 == files.data.stat().st_size


def test_files_are_for_the_owner_alone(assembly, files, rid):
    before = os.umask(0)
    try:
        add_chunks(assembly, files, rid, *make_rows(TOKENS), [4, TOKENS])
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (files.data, files.commit)] == [0o600] * 2


@pytest.mark.parametrize(
    ("ends", "prefix", "rows", "had"),
    [
        pytest.param([], 4, 3, "no rows", id="the first chunk is missing"),
        pytest.param([3], 5, 2, "3 rows", id="gap"),
        pytest.param([3, 6], 3, 3, "6 rows", id="the same chunk again"),
        pytest.param([3], 2, 3, "3 rows", id="overlap"),
        pytest.param([3, 6], 6, 5, "6 rows", id="beyond the declared length"),
        pytest.param([], 0, 11, "0 rows", id="longer than declared at once"),
    ],
)
def test_rows_out_of_order(assembly, files, rid, ends, prefix, rows, had):
    token_ids, states = make_rows(TOKENS + 10)
    add_chunks(assembly, files, rid, token_ids, states, ends)
    add_chunks(assembly, files, rid, token_ids, states, [prefix + rows], begin=prefix)
    assert_failed(files, "rows_out_of_order", f"a chunk of tokens {prefix}..{prefix + rows} of {TOKENS} came after {had}")
    assert open_files(files.folder) == []


def test_what_comes_after_a_failure_changes_nothing(assembly, files, rid):
    token_ids, states = make_rows(TOKENS)
    add_chunks(assembly, files, rid, token_ids, states, [3])
    assembly.fail(files, rid, "capture_error", "the first one")
    add_chunks(assembly, files, rid, token_ids, states, [6, TOKENS], begin=3)
    assert_failed(files, "capture_error", "the first one")


def test_a_failed_request_that_is_prefilled_again_is_not_both(assembly, files, rid):
    """One record tells what became of a request: its dump has come, or it will never come."""
    token_ids, states = make_rows(TOKENS)
    add_chunks(assembly, files, rid, token_ids, states, [3])
    add_chunks(assembly, files, rid, token_ids, states, [7], begin=5)
    add_chunks(assembly, files, rid, token_ids, states, [5, TOKENS])
    assert files.commit.exists() != files.failure.exists()


def test_one_failure_leaves_the_others_alone(assembly, spool):
    rids = [make_rid(TOKENS, row) for row in range(3)]
    rows = [make_rows(TOKENS, row) for row in range(3)]
    files = [claimed(spool, rid) for rid in rids]
    for number in range(3):
        add_chunks(assembly, files[number], rids[number], *rows[number], [4])
    add_chunks(assembly, files[1], rids[1], *rows[1], [9], begin=7)
    for number in range(3):
        add_chunks(assembly, files[number], rids[number], *rows[number], [TOKENS], begin=4)
    assert_whole(files[0], *rows[0], chunks=2)
    assert FailureRecord.read(files[1].failure).reason == "rows_out_of_order"
    assert not files[1].commit.exists()
    assert_whole(files[2], *rows[2], chunks=2)


@pytest.mark.parametrize("missing", [1, SLOTS * HIDDEN_SIZE * 4], ids=["a byte", "a row"])
def test_a_chunk_with_fewer_states_than_tokens_is_not_committed(assembly, files, rid, missing):
    """A commit record says that all rows are there; a chunk whose buffers do not agree on their number is an error."""
    token_ids, states = make_rows(TOKENS)
    add_chunks(assembly, files, rid, token_ids, states, [6])
    whole = make_chunk(token_ids[6:], states[6:])
    assembly.add(files, rid, 6, dataclasses.replace(whole, states=whole.states[:-missing]))
    assert_failed(files, "capture_error", "for 4 rows")


def test_a_chunk_with_fewer_checksums_than_tokens_is_not_committed(assembly, files, rid):
    whole = make_chunk(*make_rows(TOKENS))
    assembly.add(files, rid, 0, dataclasses.replace(whole, checksums=whole.checksums[:-4]))
    assert_failed(files, "capture_error", "for 10 rows")


def test_what_was_done_is_counted(assembly, spool):
    rids = [make_rid(TOKENS, row) for row in range(3)]
    for rid in rids[:2]:
        add_chunks(assembly, claimed(spool, rid), rid, *make_rows(TOKENS), [4, TOKENS])
    assembly.fail(claimed(spool, rids[2]), rids[2], "capture_error", "x")
    assert (assembly.dumps, assembly.tokens) == (2, 2 * TOKENS)
    assert assembly.bytes == sum(path.stat().st_size for path in spool.dumps.glob("*.safetensors"))
    assert assembly.failures == {"capture_error": 1}


@pytest.mark.parametrize("written", [[4], [4, 9], [1, 2, 3]])
def test_prefix_zero_again_begins_the_dump_anew(assembly, files, rid, written):
    """A request that the scheduler retracted in the midst of its prompt is prefilled again from its first token."""
    add_chunks(assembly, files, rid, *make_rows(TOKENS, seed=1), written)
    token_ids, states = make_rows(TOKENS, seed=2)
    add_chunks(assembly, files, rid, token_ids, states, [5, TOKENS])
    assert_whole(files, token_ids, states, chunks=2)
    assert open_files(files.folder) == []


def test_a_second_prefill_after_the_commit_is_ignored(assembly, files, rid):
    token_ids, states = make_rows(TOKENS)
    add_chunks(assembly, files, rid, token_ids, states, [4, TOKENS])
    written = files.data.read_bytes(), files.commit.read_bytes()
    add_chunks(assembly, files, rid, *make_rows(TOKENS, seed=1), [TOKENS])
    assert (files.data.read_bytes(), files.commit.read_bytes()) == written
    assert_whole(files, token_ids, states, chunks=2)


def test_a_second_prefill_in_chunks_after_the_commit_is_ignored(assembly, files, rid):
    token_ids, states = make_rows(TOKENS)
    add_chunks(assembly, files, rid, token_ids, states, [4, TOKENS])
    add_chunks(assembly, files, rid, token_ids, states, [4, TOKENS])
    assert_whole(files, token_ids, states, chunks=2)


def test_a_dump_that_the_client_freed_meanwhile_is_dropped(assembly, files, rid):
    token_ids, states = make_rows(TOKENS)
    add_chunks(assembly, files, rid, token_ids, states, [4])
    files.free()
    add_chunks(assembly, files, rid, token_ids, states, [TOKENS], begin=4)
    assert names_in(files.folder) == []
    assert open_files(files.folder) == []


def test_a_dump_whose_data_alone_is_gone_is_not_committed(assembly, files, rid):
    """The moment within a client's freeing of it when its claim is still there."""
    token_ids, states = make_rows(TOKENS)
    add_chunks(assembly, files, rid, token_ids, states, [4])
    files.data.unlink()
    add_chunks(assembly, files, rid, token_ids, states, [TOKENS], begin=4)
    assert names_in(files.folder) == [files.claim.name]
    assert open_files(files.folder) == []


def test_no_chunk_of_a_freed_dump_leaves_anything(assembly, files, rid):
    token_ids, states = make_rows(TOKENS)
    add_chunks(assembly, files, rid, token_ids, states, [2])
    files.free()
    add_chunks(assembly, files, rid, token_ids, states, [4, 7, TOKENS], begin=2)
    assert names_in(files.folder) == []


def test_a_freed_dump_that_is_prefilled_again_leaves_nothing(assembly, files, rid):
    token_ids, states = make_rows(TOKENS)
    add_chunks(assembly, files, rid, token_ids, states, [4])
    files.free()
    add_chunks(assembly, files, rid, token_ids, states, [4, TOKENS])
    assert names_in(files.folder) == []
    assert open_files(files.folder) == []


def test_sweep_closes_what_the_client_freed_and_nothing_else(assembly, spool):
    rids = [make_rid(TOKENS, row) for row in range(2)]
    rows = [make_rows(TOKENS, row) for row in range(2)]
    freed, kept = (claimed(spool, rid) for rid in rids)
    for rid, files, (token_ids, states) in zip(rids, (freed, kept), rows, strict=True):
        add_chunks(assembly, files, rid, token_ids, states, [4])
    freed.free()
    assert len(open_files(spool.dumps)) == 2
    assembly.sweep()
    assert open_files(spool.dumps) == [str(kept.data)]
    add_chunks(assembly, kept, rids[1], *rows[1], [TOKENS], begin=4)
    assert_whole(kept, *rows[1], chunks=2)


def test_a_sample_that_nobody_claims_is_not_written(assembly, spool, rid):
    files = spool.dump(str(rid))
    add_chunks(assembly, files, rid, *make_rows(TOKENS), [4, TOKENS])
    assert names_in(spool.dumps) == []
    assert open_files(spool.dumps) == []


def test_the_canary_needs_no_claim(assembly, spool):
    rid = dataclasses.replace(make_rid(TOKENS), kind=Kind.CANARY)
    files = spool.canary_dump(1, str(rid))
    files.folder.mkdir()
    token_ids, states = make_rows(TOKENS)
    add_chunks(assembly, files, rid, token_ids, states, [4, TOKENS])
    assert_whole(files, token_ids, states, chunks=2)


def test_fail_where_the_spool_itself_is_gone(assembly, files, rid):
    add_chunks(assembly, files, rid, *make_rows(TOKENS), [4])
    files.free()
    files.folder.rmdir()
    assembly.fail(files, rid, "capture_error", "nobody can be told")
    assert not files.folder.exists()
    assert open_files(files.folder) == []


def test_a_failure_that_comes_too_late_leaves_the_dump(assembly, files, rid):
    """The request was retracted after its dump was committed, and could not be captured again."""
    token_ids, states = make_rows(TOKENS)
    add_chunks(assembly, files, rid, token_ids, states, [TOKENS])
    assembly.fail(files, rid, "capture_backlog", "too much waits")
    assert_whole(files, token_ids, states, chunks=1)
    assert assembly.failures == {}


def test_a_failure_is_told_and_counted_once(assembly, files, rid):
    add_chunks(assembly, files, rid, *make_rows(TOKENS), [4])
    for number in range(3):
        assembly.fail(files, rid, "capture_backlog", f"number {number}")
    assert_failed(files, "capture_backlog", "number 0")
    assert assembly.failures == {"capture_backlog": 1}


def test_nobody_is_told_who_went_away(assembly, files, rid):
    add_chunks(assembly, files, rid, *make_rows(TOKENS), [4])
    files.free()
    assembly.fail(files, rid, "capture_backlog", "too much waits")
    assert names_in(files.folder) == []
    assert open_files(files.folder) == []


def test_a_client_that_goes_while_its_dump_is_committed_leaves_nothing(assembly, files, rid, monkeypatch):
    write = CommitRecord.write

    def go_first(record: CommitRecord, path: Path) -> None:
        files.free()
        write(record, path)

    monkeypatch.setattr(CommitRecord, "write", go_first)
    add_chunks(assembly, files, rid, *make_rows(TOKENS), [TOKENS])
    assert names_in(files.folder) == []


def test_a_client_that_goes_while_its_dump_begins_leaves_nothing(assembly, files, rid, monkeypatch):
    begin = type(assembly)._begin

    def go_first(self: object, *arguments: object) -> None:
        files.free()
        begin(self, *arguments)

    monkeypatch.setattr(type(assembly), "_begin", go_first)
    token_ids, states = make_rows(TOKENS)
    add_chunks(assembly, files, rid, token_ids, states, [4, TOKENS])
    assert names_in(files.folder) == []
    assert open_files(files.folder) == []


def test_parts_of_one_batch_are_one_chunk(assembly, files, rid):
    token_ids, states = make_rows(TOKENS)
    for begin, end, begins in ((0, 4, True), (4, 7, False), (7, TOKENS, True)):
        chunk = dataclasses.replace(make_chunk(token_ids[begin:end], states[begin:end]), begins=begins)
        assembly.add(files, rid, begin, chunk)
    assert_whole(files, token_ids, states, chunks=2)


def test_fail_before_any_chunk(assembly, files, rid):
    assembly.fail(files, rid, "capture_backlog", "too much waits")
    assert_failed(files, "capture_backlog", "too much waits")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "spool_full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "spool_full"),
        (OSError(errno.EIO, "Input/output error"), "capture_error"),
        (FileNotFoundError(errno.ENOENT, "No such file"), "capture_error"),
        (ValueError("x"), "capture_error"),
    ],
)
def test_names_of_failures(error, reason):
    assert failure_reason(error) == reason


def test_a_full_disk(tmp_path, assembly, monkeypatch):
    """Somebody else fills the tmpfs: the dump that does not fit fails as a whole, and others go on."""
    with tiny_tmpfs(tmp_path / "shm") as mounted:
        if not mounted:
            write = os.pwrite

            def refuse(descriptor: int, data: bytes, offset: int) -> int:
                if offset > 1 << 20:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return write(descriptor, data, offset)

            monkeypatch.setattr(os, "pwrite", refuse)
        spool = made_spool(tmp_path / "shm" / "spool")
        big, small = make_rid(40_000, 0), make_rid(8_000, 1)
        files = claimed(spool, big)
        with pytest.raises(OSError, match="No space left on device") as caught:
            add_chunks(assembly, files, big, *make_rows(40_000), [20_000, 40_000])
        assembly.fail(files, big, failure_reason(caught.value), repr(caught.value))
        assert_failed(files, "spool_full", "No space left on device")
        assert open_files(spool.dumps) == []
        token_ids, states = make_rows(8_000)
        other = claimed(spool, small)
        add_chunks(assembly, other, small, token_ids, states, [3_000, 8_000])
        assert_whole(other, token_ids, states, chunks=2)


KILLED = """
import random, sys
from pathlib import Path
import numpy as np
from hs_assets.capture.assembly import DumpFacts
from hs_assets_tests.dump_material import make_assembly, make_chunk
from hs_assets.wire.rid import Kind, Rid
from hs_assets.wire.spool import Spool

spool, tokens, dumps, seed = Spool(Path(sys.argv[1])), *map(int, sys.argv[2:])
ids, states = random.Random(seed).randbytes(tokens * 4), random.Random(seed).randbytes(tokens * 4096)
assembly = make_assembly(DumpFacts("server-1", "fingerprint-1", (2, 4), 512, "F32"), spool)
ids, states = np.frombuffer(ids, "<i4"), np.frombuffer(states, "<f4").reshape(tokens, -1)
print("begins", flush=True)
for row in range(dumps):
    rid = Rid(Kind.SAMPLE, "0123abcd", "demo-00000", row, tokens)
    spool.dump(str(rid)).claim.touch()
    for prefix in range(0, tokens, tokens // 16):
        end = prefix + tokens // 16
        assembly.add(spool.dump(str(rid)), rid, prefix, make_chunk(ids[prefix:end], states[prefix:end]))
sys.stdin.read()
"""


def test_a_writer_killed_at_any_moment_commits_no_half_dump(tmp_path):
    tokens, dumps, seed = 256, 40, 7
    moments, whole, partial, number = random.Random(seed), 0, 0, 0
    ids, states = random.Random(seed).randbytes(tokens * 4), random.Random(seed).randbytes(tokens * 4096)
    expected = {"token_ids": ids, "hidden_states": states}
    while number < 10 or (min(whole, partial) < 2 and number < 40):
        number += 1
        spool = made_spool(tmp_path / f"spool-{number}")
        command = [sys.executable, "-c", KILLED, spool.root, *map(str, (tokens, dumps, seed))]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout.readline() == b"begins\n"
            time.sleep(moments.uniform(0, 0.02))
            child.send_signal(signal.SIGKILL)
        for rid in spool.rids():
            files = spool.dump(rid)
            if not files.commit.exists():
                partial += files.data.exists()
                continue
            whole += 1
            commit, layout = CommitRecord.read(files.commit), read_layout(files.data)
            assert (commit.tokens, commit.chunks, layout.tokens) == (tokens, 16, tokens)
            assert commit.row_checksums_crc32 == checksums_crc32(np.frombuffer(states, "<f4").reshape(tokens, -1))
            assert {name: bytes(t["data"]) for name, t in safetensors.deserialize(files.data.read_bytes())} == expected
            files.free()
    assert partial >= 2, "no process was killed in the midst of a dump"
    assert whole >= 2, "no process was killed after a dump"
