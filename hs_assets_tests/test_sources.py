"""The index of a source: rows by their bytes, partitions that keep their names, duplicates, and refusal of what changed."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hs_assets.errors import PromptError
from hs_assets.samples.conversations import Conversation, Dropped
from hs_assets.samples.formats import parse_row
from hs_assets.samples.source_index import SourceIndex
from hs_assets.samples.sources import (
    Partitioning,
    Source,
    SourceRow,
    partition_key,
    partition_keys,
    read_partition,
    refresh,
)
from hs_assets.samples.tables import replace_table
from hs_assets.wire.rid import is_partition_key
from hs_assets_tests.small_tokenizer import json_row

THREE = Partitioning(rows=3, tokens=1_000_000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "index"


@pytest.fixture
def source(tmp_path: Path) -> Callable[..., Source]:
    """A source with these bytes; each call writes the file anew, with another time."""
    times = itertools.count(1_700_000_000)

    def write(body: bytes, name: str = "demo") -> Source:
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(body)
        now = next(times)
        os.utime(path, (now, now))
        return Source(name, path)

    return write


def rows_of(folder: Path, source: Source, index: SourceIndex) -> list[SourceRow]:
    """All rows of a source, partition after partition."""
    return [
        row for number in range(len(index.starts)) for row in read_partition(folder, source, partition_key(source.name, number))
    ]


def read_all(folder: Path, sources: Sequence[Source], partitioning: Partitioning = THREE) -> dict[str, list[SourceRow]]:
    indexes = refresh(folder, sources, partitioning)
    return {source.name: rows_of(folder, source, indexes[source.name]) for source in sources}


def raws(folder: Path, source: Source) -> list[bytes]:
    return [row.raw for row in read_all(folder, [source])[source.name]]


def lines(*numbers: int) -> bytes:
    return b"".join(b'{"n": %d}\n' % number for number in numbers)


# Rows


@pytest.mark.parametrize(
    ("body", "rows"),
    [
        (b"", []),
        (b"a\nb\n", [b"a", b"b"]),
        (b"a\nb", [b"a", b"b"]),
        (b"a\r\nb\r\n", [b"a", b"b"]),
        (b"a\r\nb\n", [b"a", b"b"]),
        (b"a\rb\n", [b"a\rb"]),
        (b"a\n\n\nb\n", [b"a", b"", b"", b"b"]),
        (b"\n", [b""]),
        (b"\xef\xbb\xbfa\nb\n", [b"a", b"b"]),
        (b"\xef\xbb\xbf", [b""]),
        (b"\xef\xbb\xbfa\r\n\xef\xbb\xbfb", [b"a", b"\xef\xbb\xbfb"]),
        ("a\u2028b\u2029c\u0085d\nb\n".encode(), ["a\u2028b\u2029c\u0085d".encode(), b"b"]),
        (b"a\x0bb\x0cc\x1cd\n", [b"a\x0bb\x0cc\x1cd"]),
        (b"a\0b\n\0\n", [b"a\0b", b"\0"]),
        (b"\xff\xfe\n", [b"\xff\xfe"]),
    ],
    ids=range(15),
)
def test_a_row_ends_at_the_byte_10_alone(body: bytes, rows: list[bytes], folder: Path, source: Callable[..., Source]) -> None:
    one = source(body)
    read = read_all(folder, [one])["demo"]
    assert [row.raw for row in read] == rows
    assert [row.number for row in read] == list(range(len(rows)))
    assert [row.sha256 for row in read] == [hashlib.sha256(row).hexdigest() for row in rows]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=6) | st.sampled_from([b"", b"\r", b"\xef\xbb\xbf", b"a\0", "\u2028".encode()]), max_size=12))
def test_any_bytes_come_back(tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]) -> None:
    body = b"\n".join(pieces)
    base = tmp_path_factory.mktemp("any")
    one = Source("any", base / "any.jsonl")
    one.path.write_bytes(body)
    split = body.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    expected = [row.removesuffix(b"\r") for row in (split[:-1] if split[-1] == b"" and body.count(b"\n") else split)]
    assert raws(base / "index", one) == (expected if body else [])


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("last", [True, False], ids=["a final newline", "no final newline"])
def test_conversations_read_the_same_however_the_file_was_written(
    end: bytes, mark: bytes, last: bool, folder: Path, source: Callable[..., Source]
) -> None:
    rows = [
        json_row(("user", f"one {i}"), ("assistant", "two\u2028three")).replace(b"\\u2028", "\u2028".encode()) for i in range(4)
    ]
    one = source(mark + end.join(rows) + (end if last else b""))
    assert raws(folder, one) == rows
    assert all(isinstance(parse_row(row).content, Conversation) for row in raws(folder, one))


def test_a_row_with_nul_is_dropped_and_its_neighbours_are_kept(folder: Path, source: Callable[..., Source]) -> None:
    good = json_row(("user", "one"), ("assistant", "two"))
    read = raws(folder, source(b"\n".join([good, b'{"messages": [\0]}', good + b" "])))
    parsed = [parse_row(row).content for row in read]
    assert [isinstance(one, Dropped) for one in parsed] == [False, True, False]


# Partitions


def test_partitions_are_runs_of_rows(folder: Path, source: Callable[..., Source]) -> None:
    one = source(lines(*range(7)))
    indexes = refresh(folder, [one], THREE)
    assert indexes["demo"].starts == (0, 3, 6)
    assert indexes["demo"].rows == 7
    assert partition_keys(indexes) == ["demo-00000", "demo-00001", "demo-00002"]
    assert [row.number for row in read_partition(folder, one, "demo-00001")] == [3, 4, 5]
    assert [row.raw for row in read_partition(folder, one, "demo-00002")] == [b'{"n": 6}']


def test_keys_of_several_sources_in_their_order(folder: Path, source: Callable[..., Source]) -> None:
    sources = [source(lines(1), "b.c-1"), source(lines(2, 3, 4, 5), "a")]
    keys = partition_keys(refresh(folder, sources, THREE))
    assert keys == ["b.c-1-00000", "a-00000", "a-00001"]
    assert all(is_partition_key(key) for key in keys)
    assert [row.number for row in read_partition(folder, sources[0], "b.c-1-00000")] == [0]


def test_an_empty_source_has_no_partition(folder: Path, source: Callable[..., Source]) -> None:
    assert partition_keys(refresh(folder, [source(b"")], THREE)) == []


def test_a_budget_of_tokens_closes_partitions_early(folder: Path, source: Callable[..., Source]) -> None:
    """A token is four bytes: 40 + 40 fit into 100, a third does not; 4,000 stand alone, whatever the budget."""
    rows = [b"x" * 160, b"y" * 160, b"z" * 160, b"w" * 16_000, b"v" * 4, b"u" * 4]
    index = refresh(folder, [source(b"\n".join(rows))], Partitioning(rows=64, tokens=100))["demo"]
    assert index.starts == (0, 2, 3, 4)


def test_a_budget_is_filled_to_its_last_token(folder: Path, source: Callable[..., Source]) -> None:
    rows = [bytes([65 + i]) * 40 for i in range(5)]
    index = refresh(folder, [source(b"\n".join(rows))], Partitioning(rows=64, tokens=20))["demo"]
    assert index.starts == (0, 2, 4)


def test_the_first_row_may_be_larger_than_the_budget(folder: Path, source: Callable[..., Source]) -> None:
    one = source(b"x" * 1000 + b"\n" + b"y" * 1000)
    index = refresh(folder, [one], Partitioning(rows=64, tokens=1))["demo"]
    assert index.starts == (0, 1)
    assert [len(row.raw) for row in rows_of(folder, one, index)] == [1000, 1000]


@pytest.mark.parametrize("tail", [b"", lines(7), lines(*range(7, 30))], ids=["nothing", "one row", "many rows"])
@pytest.mark.parametrize("budget", [1_000_000, 5])
def test_appended_rows_rename_no_partition(tail: bytes, budget: int, folder: Path, source: Callable[..., Source]) -> None:
    partitioning = Partitioning(rows=3, tokens=budget)
    one = source(lines(*range(7)))
    before = refresh(folder, [one], partitioning)
    full = partition_keys(before)[:-1]
    rows_before = {key: read_partition(folder, one, key) for key in partition_keys(before)}

    source(lines(*range(7)) + tail)
    after = refresh(folder, [one], partitioning)
    assert partition_keys(after)[: len(full) + 1] == partition_keys(before)
    assert {key: read_partition(folder, one, key) for key in full} == {key: rows_before[key] for key in full}
    last = partition_keys(before)[-1]
    grown = read_partition(folder, one, last)
    assert grown[: len(rows_before[last])] == rows_before[last]
    assert after["demo"].rows == 7 + tail.count(b"\n")


def test_rows_appended_after_a_last_row_without_a_newline(folder: Path, source: Callable[..., Source]) -> None:
    one = source(b"a\nb\nc\nd")
    refresh(folder, [one], THREE)
    source(b"a\nb\nc\nd\ne\n")
    assert raws(folder, one) == [b"a", b"b", b"c", b"d", b"e"]


@pytest.mark.parametrize("partitioning", [Partitioning(4, 1_000_000), Partitioning(3, 999)])
def test_another_size_of_partitions_is_refused(partitioning: Partitioning, folder: Path, source: Callable[..., Source]) -> None:
    one = source(lines(*range(7)))
    before = refresh(folder, [one], THREE)
    with pytest.raises(PromptError, match="the size of partitions changed") as error:
        refresh(folder, [one], partitioning)
    assert error.value.where == "source demo"
    assert "rows_per_partition = 3" in str(error.value.expected)
    assert str(partitioning.rows) in str(error.value.got)
    assert "give the source a new name" in (error.value.remedy or "")
    assert refresh(folder, [one], THREE) == before
    renamed = Source("renamed", one.path)
    assert refresh(folder, [renamed], partitioning)["renamed"].partition_rows == partitioning.rows


# Duplicates


def duplicates(read: dict[str, list[SourceRow]]) -> dict[str, str]:
    return {f"{name}:{row.number}": row.duplicate_of for name, rows in read.items() for row in rows if row.duplicate_of}


def test_equal_bytes_are_a_duplicate_and_the_first_wins(folder: Path, source: Callable[..., Source]) -> None:
    one = source(b"a\nb\na\na \nb\r\n\na\n")
    assert duplicates(read_all(folder, [one])) == {"demo:2": "demo:0", "demo:4": "demo:1", "demo:6": "demo:0"}


def test_empty_rows_are_no_duplicates(folder: Path, source: Callable[..., Source]) -> None:
    sources = [source(b"\n\n \n \na\n\n", "one"), source(b"\n \na\n", "two")]
    assert duplicates(read_all(folder, sources)) == {"two:2": "one:4"}


def test_duplicates_over_sources(folder: Path, source: Callable[..., Source]) -> None:
    sources = [source(lines(1, 2, 3), "one"), source(lines(3, 4, 4, 1), "two"), source(lines(4, 5), "three")]
    assert duplicates(read_all(folder, sources)) == {
        "two:0": "one:2",
        "two:2": "two:1",
        "two:3": "one:0",
        "three:0": "two:1",
    }


def test_the_first_that_was_indexed_stays_the_first(folder: Path, source: Callable[..., Source]) -> None:
    """Neither rows appended to an earlier source nor a source put before it take a row away from a partition that exists."""
    one, two = source(lines(1, 2), "one"), source(lines(2, 3), "two")
    before = read_all(folder, [one, two])
    assert duplicates(before) == {"two:0": "one:1"}

    one = source(lines(1, 2, 3, 9), "one")
    after = read_all(folder, [one, two])
    assert duplicates(after) == {"two:0": "one:1", "one:2": "two:1"}
    assert after["two"] == before["two"]

    zero = source(lines(3, 9, 8), "zero")
    again = read_all(folder, [zero, one, two])
    assert duplicates(again) == {"zero:0": "two:1", "zero:1": "one:3", "two:0": "one:1", "one:2": "two:1"}
    assert (again["one"], again["two"]) == (after["one"], after["two"])


def test_rows_appended_to_a_source_that_holds_the_first_keep_it(folder: Path, source: Callable[..., Source]) -> None:
    one, two = source(lines(1), "one"), source(lines(1), "two")
    read_all(folder, [one, two])
    source(lines(1, 5, 1), "one")
    assert duplicates(read_all(folder, [one, two])) == {"one:2": "one:0", "two:0": "one:0"}


def test_a_row_is_not_lost_with_the_source_that_had_it_first(folder: Path, source: Callable[..., Source]) -> None:
    """A source leaves the configuration: what it had first is now first in another."""
    one, two = source(lines(1, 2), "one"), source(lines(2, 3), "two")
    assert duplicates(read_all(folder, [one, two])) == {"two:0": "one:1"}
    assert duplicates(read_all(folder, [two])) == {}


def test_a_row_is_not_lost_with_the_line_that_had_it_first(folder: Path, source: Callable[..., Source]) -> None:
    """A line is edited: no row is a duplicate of one that is not there any more."""
    one, two = source(lines(1, 2), "one"), source(lines(2, 3), "two")
    assert duplicates(read_all(folder, [one, two])) == {"two:0": "one:1"}
    source(lines(1, 7), "one")
    read = read_all(folder, [one, two])
    assert [row.raw for row in read["one"]] == [b'{"n": 1}', b'{"n": 7}']
    assert duplicates(read) == {}


def test_rows_that_moved_within_a_source_do_not_repeat_themselves(folder: Path, source: Callable[..., Source]) -> None:
    one = source(lines(1, 2, 3, 4))
    read_all(folder, [one])
    source(lines(4, 2, 1))
    assert duplicates(read_all(folder, [one])) == {}


# What changed


def test_a_source_that_did_not_change_is_not_read_again(
    folder: Path, source: Callable[..., Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = source(lines(*range(7)))
    before = refresh(folder, [one], THREE)
    opened: list[Path] = []
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: (opened.append(self), real(self, *a, **k))[1])
    assert refresh(folder, [one], THREE) == before
    assert one.path not in opened
    source(lines(*range(8)))
    assert refresh(folder, [one], THREE)["demo"].rows == 8
    assert one.path in opened


def edit(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'{"n": 4}', b'{"n": 9}'))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:30])


@pytest.mark.parametrize("change", [edit, cut, Path.unlink], ids=["edited", "cut", "deleted"])
def test_a_source_that_changes_under_its_index_is_refused(
    change: Callable[[Path], None], folder: Path, source: Callable[..., Source]
) -> None:
    one = source(lines(*range(7)))
    refresh(folder, [one], THREE)
    change(one.path)
    with pytest.raises(PromptError) as error:
        read_partition(folder, one, "demo-00001")
    assert str(one.path) in str(error.value.where)
    assert error.value.remedy


def test_the_error_names_the_row_that_changed(folder: Path, source: Callable[..., Source]) -> None:
    one = source(lines(*range(7)))
    refresh(folder, [one], THREE)
    edit(one.path)
    assert len(read_partition(folder, one, "demo-00000")) == 3
    with pytest.raises(PromptError, match="a source changed since it was indexed") as error:
        read_partition(folder, one, "demo-00001")
    assert error.value.where == f"{one.path}, row 4"
    assert "reload" in (error.value.remedy or "")


def test_an_edit_of_the_same_size_is_indexed_again(folder: Path, source: Callable[..., Source]) -> None:
    one = source(lines(*range(7)))
    refresh(folder, [one], THREE)
    source(lines(0, 1, 2, 3, 9, 5, 6))
    assert raws(folder, one)[4] == b'{"n": 9}'


def test_another_path_under_the_same_name_is_indexed_again(folder: Path, source: Callable[..., Source]) -> None:
    one, other = source(lines(1), "one"), source(lines(2), "other")
    refresh(folder, [one], THREE)
    assert raws(folder, Source("one", other.path)) == [b'{"n": 2}']


@pytest.mark.parametrize("key", ["demo-00003", "demo-99999", "demo-x", "other-00000"])
def test_no_such_partition(key: str, folder: Path, source: Callable[..., Source]) -> None:
    one = source(lines(*range(7)))
    refresh(folder, [one], THREE)
    with pytest.raises(PromptError, match="no such partition") as error:
        read_partition(folder, one, key)
    assert error.value.where == key
    assert "reload" in (error.value.remedy or "")


def test_no_index_at_all(folder: Path, source: Callable[..., Source]) -> None:
    with pytest.raises(PromptError, match="no such partition"):
        read_partition(folder, source(lines(1)), "demo-00000")


@pytest.mark.parametrize("name", ["none.jsonl", "."], ids=["missing", "a folder"])
def test_a_source_that_cannot_be_read(name: str, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / name
    with pytest.raises(PromptError, match="a source cannot be read") as error:
        refresh(folder, [Source("none", path)], THREE)
    assert error.value.where == path
    assert "prompts.sources" in (error.value.remedy or "")


def test_an_index_of_another_version(folder: Path, source: Callable[..., Source]) -> None:
    one = source(lines(1))
    refresh(folder, [one], THREE)
    path = folder / "demo.json"
    path.write_text(path.read_text().replace('"version": 2', '"version": 999'))
    with pytest.raises(PromptError, match="a source index of another version") as error:
        refresh(folder, [one], THREE)
    assert error.value.where == path
    assert error.value.remedy == "delete it"
    path.unlink()
    assert raws(folder, one) == [b'{"n": 1}']


@pytest.mark.parametrize("name", ["demo.json", "demo.parquet"])
@pytest.mark.parametrize("left", [0, 0.5], ids=["empty", "cut"])
def test_an_index_that_is_damaged(name: str, left: float, folder: Path, source: Callable[..., Source]) -> None:
    one = source(lines(1, 2))
    refresh(folder, [one], THREE)
    path = folder / name
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * left)])
    with pytest.raises(PromptError, match="a source index cannot be read") as error:
        read_partition(folder, one, "demo-00000")
    assert error.value.where == path
    assert error.value.remedy == f"delete {folder / 'demo.json'}: the source is read again"
    (folder / "demo.json").unlink()
    assert raws(folder, one) == [b'{"n": 1}', b'{"n": 2}']


def test_a_table_that_does_not_fit_leaves_the_last_one_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: pa.Table, path: Path) -> None:
        path.write_bytes(b"PAR1")
        raise OSError("no space left")

    path = tmp_path / "demo.parquet"
    replace_table(path, pa.table({"n": [1]}))
    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(OSError, match="no space left"):
        replace_table(path, pa.table({"n": [2]}))
    assert pq.read_table(path)["n"].to_pylist() == [1]
    assert [one.name for one in tmp_path.iterdir()] == ["demo.parquet"]
