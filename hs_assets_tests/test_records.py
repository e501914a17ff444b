"""The records' JSON: what is written is read back alike, anything else is refused with where, expected and got."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import stat
import threading
import time
from collections import Counter

import pytest

from hs_assets.errors import WireError
from hs_assets.wire import records
from hs_assets.wire.records import (
    WIRE_VERSION,
    AnswerRecord,
    CaptureConfig,
    ClaimRecord,
    CommitRecord,
    CountersRecord,
    FailureRecord,
    ReadyRecord,
    Record,
    RefusedRecord,
    write_atomic,
)

EXAMPLES = [
    CaptureConfig("/dev/shm/hs", "server-1", (3, 31, 59, 61), "f" * 64, 4, 1 << 40, 4 << 30),
    ReadyRecord(
        server="server-1",
        capture_version=1,
        source_hash="0" * 64,
        sglang_version="0.5.23",
        model_class="KimiK25ForConditionalGeneration",
        residual_ids=(3, 31, 59, 61),
        num_layers=61,
        hidden_size=7168,
        vocab_size=163_840,
        dtype="BF16",
        rank=7,
        world_size=8,
        writes=False,
        hooks=("load_model", "forward"),
        chunk_tokens=8192,
        device_bytes_per_token=100_356,
        context_length=262_144,
        pid=4711,
        argv=("launch_server.py", "--tp-size", "8"),
    ),
    RefusedRecord("server-1", 0, ("--pp-size: a rank sees only its share of the layers", "Grüße\n\u2028 'quoted'")),
    CommitRecord(
        rid="hs.s.9f2c01ab.demo-00003.0017.T512",
        server="server-1",
        state_fingerprint="f" * 64,
        residual_ids=(61,),
        tokens=512,
        hidden_size=7168,
        dtype="BF16",
        bytes=2**40,
        row_checksums_crc32=2**32 - 1,
        token_sha256="a" * 64,
        chunks=3,
        committed_at=1_760_000_000.123456,
    ),
    FailureRecord("hs.s.9f2c01ab.demo-00003.0017.T512", "spool_full", "OSError(28, 'No space left on device')"),
    ClaimRecord("hs.s.9f2c01ab.demo-00003.0017.T512", 117_440_512, 0, 1_760_000_000.0),
    AnswerRecord("hs.s.9f2c01ab.demo-00003.0017.T512", 512, 0, ((-0.25, 9), (-1.5, 163_839), (float("-inf"), 0))),
    CountersRecord("server-1", 0, 1.5, 3, {"spool_full": 1}, 99, 10**12, 0.5, 1e9, 7, 8, 9, 10, 2.5, 0.25, 5, 5),
]
FIELDS = [(example, field.name, field.type) for example in EXAMPLES for field in dataclasses.fields(example)]
WRONG = {
    "str": [None, 1, True, ["x"], {}],
    "int": [None, "1", 1.5, 1.0, True, [1]],
    "float": [None, "1.5", True, [1.5]],
    "bool": [None, 0, 1, "true"],
    "dict[str, int]": [None, 1, "a", ["a"], {"a": 1.5}, {"a": "1"}],
    "int | None": ["1", 1.5, False, [1]],
    "tuple[int, ...]": [None, 1, "12", {}, [1, "2"], [1.5], [True], [None], [[1]]],
    "tuple[str, ...]": [None, "ab", {}, [1], ["a", None]],
    "tuple[tuple[float, int], ...]": [
        None,
        1,
        {},
        [1.5, 2],
        [[0.5]],
        [[0.5, 1, 2]],
        [[0.5, "1"]],
        [["0.5", 1]],
        [[0.5, 1.5]],
        [None],
    ],
}


def ident(value: object) -> str:
    return value.kind if isinstance(value, Record) else str(value)


def fields_of(record: Record) -> dict:
    return json.loads(record.to_json())


def refused(record: Record, text: str) -> str:
    """The message with which `text` is refused as a record of that kind."""
    with pytest.raises(WireError) as caught:
        type(record).parse(text, "/spool/some.json")
    message = str(caught.value)
    assert "\n  where: /spool/some.json" in message
    assert "\n  expected: " in message
    assert "\n  got: " in message
    return message


def test_every_kind_has_an_example():
    kinds = {cls.__name__ for cls in vars(records).values() if isinstance(cls, type) and issubclass(cls, Record)}
    assert {type(example).__name__ for example in EXAMPLES} == kinds - {"Record"}
    assert len({example.kind for example in EXAMPLES}) == len(EXAMPLES)
    assert {hint for _, _, hint in FIELDS} == set(WRONG)


@pytest.mark.parametrize("record", EXAMPLES, ids=ident)
def test_round_trip(record, tmp_path):
    path = tmp_path / "record.json"
    record.write(path)
    assert type(record).read(path) == record
    body = json.loads(path.read_text())
    assert (body["record"], body["version"]) == (record.kind, WIRE_VERSION)
    assert set(body) == {"record", "version", *(field.name for field in dataclasses.fields(record))}


def test_what_may_be_nothing_and_what_may_be_a_whole_number():
    ready = dataclasses.replace(EXAMPLES[1], chunk_tokens=None)
    assert ReadyRecord.parse(ready.to_json(), "here") == ready
    claim = ClaimRecord.parse(json.dumps({**fields_of(EXAMPLES[5]), "created": 7}), "here")
    assert (claim.created, type(claim.created)) == (7.0, float)


@pytest.mark.parametrize(("record", "name", "hint"), FIELDS, ids=ident)
def test_wrong_type_of_a_field(record, name, hint):
    for value in WRONG[hint]:
        message = refused(record, json.dumps({**fields_of(record), name: value}))
        assert "a field of a record has another type" in message
        assert f"/spool/some.json: {name}\n" in message


@pytest.mark.parametrize(("record", "name", "hint"), FIELDS, ids=ident)
def test_missing_field(record, name, hint):
    fields = fields_of(record)
    del fields[name]
    message = refused(record, json.dumps(fields))
    assert "a record lacks a field" in message
    assert f"\n  expected: {name}\n" in message


@pytest.mark.parametrize("version", [0, WIRE_VERSION + 1, str(WIRE_VERSION), [WIRE_VERSION]])
@pytest.mark.parametrize("record", EXAMPLES, ids=ident)
def test_other_version(record, version):
    message = refused(record, json.dumps({**fields_of(record), "version": version}))
    assert "a record of another version" in message
    assert f"\n  expected: {WIRE_VERSION}\n" in message
    assert f"\n  got: {version}\n" in message or f"\n  got: {version!r}\n" in message
    assert "\n  remedy: install the same version of hs-assets" in message


def test_no_version():
    fields = fields_of(EXAMPLES[3])
    del fields["version"]
    assert "a record of another version" in refused(EXAMPLES[3], json.dumps(fields))


@pytest.mark.parametrize("record", EXAMPLES, ids=ident)
def test_record_of_another_kind(record):
    for other in EXAMPLES:
        if other is not record:
            message = refused(record, other.to_json())
            assert "not the record expected here" in message
            assert f"\n  expected: {record.kind}\n" in message


@pytest.mark.parametrize("text", ["[]", "null", "1", '"commit"', "{}", '{"version": 1}'])
def test_json_that_is_no_record(text):
    assert "not the record expected here" in refused(EXAMPLES[3], text)


@pytest.mark.parametrize("record", EXAMPLES, ids=ident)
def test_truncated_json(record):
    text = record.to_json()
    for length in range(len(text)):
        assert "a record is not JSON" in refused(record, text[:length])


def test_file_that_is_not_there(tmp_path):
    with pytest.raises(WireError, match="a record cannot be read") as caught:
        CommitRecord.read(tmp_path / "none.commit.json")
    message = str(caught.value)
    assert f"\n  where: {tmp_path / 'none.commit.json'}" in message
    assert "\n  expected: " in message
    assert "\n  got: [Errno 2]" in message


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00", b'{"record": "commit\x80"}', bytes(64)], ids=["utf-16", "stray byte", "zeros"]
)
def test_file_that_is_no_text(tmp_path, content):
    path = tmp_path / "x.commit.json"
    path.write_bytes(content)
    with pytest.raises(WireError, match="a record is not JSON") as caught:
        CommitRecord.read(path)
    assert f"\n  where: {path}" in str(caught.value)


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_files_are_for_the_owner_alone(tmp_path, umask):
    path = tmp_path / "record.json"
    before = os.umask(umask)
    try:
        EXAMPLES[4].write(path)
        EXAMPLES[4].write(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_sees_all_of_a_file_or_nothing(tmp_path):
    path, texts, enough = tmp_path / "record.json", ["a" * 200_000, "b" * 150_000, ""], threading.Event()

    def write():
        for text in itertools.cycle(texts):
            write_atomic(path, text)
            if enough.is_set():
                return

    write_atomic(path, "")
    thread = threading.Thread(target=write)
    thread.start()
    deadline, seen = time.monotonic() + 20, Counter()
    while (len(seen) < len(texts) or seen.total() < 200) and time.monotonic() < deadline:
        seen[path.read_text()] += 1
    enough.set()
    thread.join()
    assert {len(text) for text in seen} == {200_000, 150_000, 0}
    assert set(seen) == set(texts)


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "record.json"
    EXAMPLES[4].write(path)
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "half of it \ud800")
    assert FailureRecord.read(path) == EXAMPLES[4]


def test_a_write_that_fails_leaves_nothing_behind(tmp_path):
    with pytest.raises(UnicodeEncodeError):
        write_atomic(tmp_path / "record.json", "half of it \ud800")
    assert list(tmp_path.iterdir()) == []
