"""Rows of JSON, Parquet and Arrow files and of folders: what other readers see is what an index finds, and reads back."""

from __future__ import annotations

import hashlib
import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hs_assets.errors import PromptError
from hs_assets.samples.conversations import Conversation, Dropped
from hs_assets.samples.formats import parse_row
from hs_assets.samples.sources import Partitioning, Source, SourceRow, partition_keys, read_partition, refresh

FEW = Partitioning(rows=7, tokens=1_000_000)
TEXTS = ["plain", 'quo"ted \\ ', "[{]},\n", "a\u2028b", "😀 \\u00e9", "\\\\\\", "", "}]"]
ROWS: list[dict[str, Any]] = [{"n": number, "text": TEXTS[number % len(TEXTS)], "more": [{"x": {}}]} for number in range(50)]


def read_all(tmp_path: Path, path: Path, partitioning: Partitioning = FEW, max_row_bytes: int = 1 << 20) -> list[SourceRow]:
    """All rows of a source, partition after partition."""
    source, folder = Source("demo", path), tmp_path / f"index-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    keys = partition_keys(refresh(folder, [source], partitioning))
    rows = [row for key in keys for row in read_partition(folder, source, key, max_row_bytes)]
    assert [row.number for row in rows] == list(range(len(rows)))
    return rows


def values(rows: list[SourceRow]) -> list[Any]:
    """What stands in the rows, as another reader sees it."""
    return [json.loads(row.raw) for row in rows if isinstance(row.raw, bytes)]


# JSON


@pytest.mark.parametrize(
    "body",
    [
        json.dumps(ROWS),
        json.dumps(ROWS, indent=2),
        json.dumps(ROWS, ensure_ascii=False, separators=(",", ":")),
        "\ufeff \r\n" + json.dumps(ROWS, indent="\t").replace("\n", "\r\n") + "\n\n",
        "\n".join(json.dumps(row) for row in ROWS),
        "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in ROWS),
        "\n".join(json.dumps(row, indent=1) for row in ROWS),
    ],
    ids=["array", "indented", "compact", "bom and crlf", "lines", "lines with crlf", "values"],
)
@pytest.mark.parametrize("piece", [1 << 20, 3, 1], ids=["whole", "in threes", "byte by byte"])
def test_json(body: str, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the file is written, and wherever the pieces that it is read in end."""
    if piece == 1 << 20 or not body.startswith("{"):  # the look at the first line needs all of it
        monkeypatch.setattr("hs_assets.samples.text_rows._PIECE", max(piece, 7 if body.startswith("\ufeff") else 1))
    path = tmp_path / "rows.json"
    path.write_bytes(body.encode())
    rows = read_all(tmp_path, path)
    assert values(rows) == ROWS
    assert all(row.sha256 == hashlib.sha256(row.raw).hexdigest() for row in rows if isinstance(row.raw, bytes))


@pytest.mark.parametrize("piece", [4, 5, 6, 7])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_that_are_longer_than_a_piece(piece: int, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hs_assets.samples.text_rows._PIECE", piece)
    lines = ["a" * length + "\r" * (length % 2) for length in range(20)]
    (tmp_path / "rows.jsonl").write_bytes(("\ufeff" + end.join(lines)).encode())
    read = [row.raw for row in read_all(tmp_path, tmp_path / "rows.jsonl")]
    expected = lines if end == "\r\n" else [line.removesuffix("\r") for line in lines]
    assert read == [line.encode() for line in [*expected[:-1], lines[-1].removesuffix("\r")]]


@pytest.mark.parametrize(
    ("body", "reasons"),
    [
        ("[]", []),
        ("", []),
        (" [ ] ", []),
        ('[{"n": 1}', ["unknown_format"]),
        ('[{"n": 1}, {"n": 2', ["unknown_format", "invalid_json"]),
        ('[{"n": 1}] and more', ["unknown_format", "invalid_json"]),
        ('[{"n": 1}] [{"n": 2}]', ["unknown_format", "unknown_format"]),
        ('[{"n": 1 "m": 2}, {"n": 3}]', ["invalid_json", "unknown_format"]),
        ('["a", 7, null]', ["unknown_format"] * 3),
        ("[" * 100_000, ["invalid_json"]),
        ('{"n":\n1}', ["unknown_format"]),
        ('{"n":\n', ["invalid_json"]),
    ],
)
def test_json_that_is_cut_or_wrong(body: str, reasons: list[str], tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(body)
    parsed = [parse_row(row.raw).content for row in read_all(tmp_path, path)]
    assert [one.reason if isinstance(one, Dropped) else None for one in parsed] == reasons


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=80, deadline=None)
@given(st.lists(JSON, max_size=6), st.sampled_from([None, 1]), st.booleans())
def test_any_array_comes_back(tmp_path_factory: pytest.TempPathFactory, items: list[Any], indent: int, ascii_only: bool) -> None:
    tmp_path = tmp_path_factory.mktemp("any")
    (tmp_path / "any.json").write_text(json.dumps(items, indent=indent, ensure_ascii=ascii_only), "utf-8")
    assert values(read_all(tmp_path, tmp_path / "any.json", Partitioning(3, 1000))) == items


def test_utf16_is_named(tmp_path: Path) -> None:
    for name, encoding in (("a.jsonl", "utf-16"), ("b.json", "utf-16"), ("c.jsonl", "utf-16-le")):
        (tmp_path / name).write_bytes('{"text": "a"}\n{"text": "b"}\n'.encode(encoding))
        parsed = [parse_row(row.raw).content for row in read_all(tmp_path, tmp_path / name)]
        assert {one.reason for one in parsed if isinstance(one, Dropped)} <= {"invalid_unicode", "invalid_json"}
        assert not any(not isinstance(one, Dropped) for one in parsed)
        assert isinstance(parsed[0], Dropped)
        assert "UTF-16" in parsed[0].detail


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_huge_row_is_dropped_and_never_held(name: str, tmp_path: Path) -> None:
    """A row of 64 MB among small ones: found, hashed and dropped in a small part of that memory."""
    small = b'{"text": "a"}'
    huge = b'{"text": "' + b"a" * 64_000_000 + b'"}'
    ends = (b"[", b",\n", b"]") if name.endswith(".json") else (b"", b"\r\n", b"\r\n")
    with (tmp_path / name).open("wb") as file:
        file.write(ends[0] + small + ends[1] + huge + ends[1] + small + ends[2])
    expected = hashlib.sha256(huge).hexdigest()
    del huge
    tracemalloc.start()
    rows = read_all(tmp_path, tmp_path / name, max_row_bytes=1_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8_000_000
    assert [row.raw for row in rows[::2]] == [small, small]
    assert isinstance(rows[1].raw, Dropped)
    assert (rows[1].raw.reason, rows[1].sha256) == ("row_too_large", expected)
    assert "64,000,012 bytes, at most 1,000,000" in rows[1].raw.detail
    assert parse_row(rows[1].raw).content == rows[1].raw


def test_the_largest_row_that_is_read(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "abc"}\n{"text": "abcd"}\n')
    assert [isinstance(row.raw, Dropped) for row in read_all(tmp_path, tmp_path / "rows.jsonl", max_row_bytes=15)] == [
        False,
        True,
    ]


# Parquet and Arrow


def write_parquet(path: Path, table: pa.Table) -> None:
    pq.write_table(table, path, row_group_size=11)


def write_stream(path: Path, table: pa.Table) -> None:
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=11)


def write_file(path: Path, table: pa.Table) -> None:
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=11)


@pytest.fixture(params=[("t.parquet", write_parquet), ("s.arrow", write_stream), ("f.arrow", write_file)], ids=lambda p: p[0])
def write(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[list[dict[str, Any]]], Path]:
    """Writes rows as a table, and gives its path."""
    name, writer = request.param

    def to_table(rows: list[dict[str, Any]]) -> Path:
        writer(tmp_path / name, pa.Table.from_pylist(rows))
        return tmp_path / name

    return to_table


def test_tables(write: Callable[[list[dict[str, Any]]], Path], tmp_path: Path) -> None:
    plain = [{"n": number, "text": TEXTS[number % len(TEXTS)]} for number in range(50)]
    rows = read_all(tmp_path, write(plain))
    assert values(rows) == plain
    assert all(row.sha256 == hashlib.sha256(row.raw).hexdigest() for row in rows if isinstance(row.raw, bytes))


def test_arguments_of_tools_gain_no_nulls(write: Callable[[list[dict[str, Any]]], Path], tmp_path: Path) -> None:
    """Arrow gives each object the fields of all: none of those that a row did not have comes back."""

    def row(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        call = {"function": {"name": name, "arguments": arguments}, "type": "function"}
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        return {"messages": turns, "tools": json.dumps([{"name": name}])}

    asked = [{"city": "Oslo", "days": 3}, {"expression": "17 * 23"}, {"paths": ["a", "b"], "deep": {"x": 1}}]
    path = write([row(f"f{number}", arguments) for number, arguments in enumerate(asked)])
    table = pq.read_table(path) if path.suffix == ".parquet" else None
    if table is not None:  # that the trap is there
        first = table.to_pylist()[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]
        assert first == {"city": "Oslo", "days": 3, "expression": None, "paths": None, "deep": None}
    parsed = [parse_row(one.raw).content for one in read_all(tmp_path, path)]
    assert all(isinstance(one, Conversation) for one in parsed)
    calls = [one.messages[1].tool_calls[0] for one in parsed if isinstance(one, Conversation)]
    assert [(call.name, call.arguments) for call in calls] == [(f"f{n}", arguments) for n, arguments in enumerate(asked)]


def test_rows_of_tables_that_are_equal(write: Callable[[list[dict[str, Any]]], Path], tmp_path: Path) -> None:
    rows = read_all(tmp_path, write([{"text": text} for text in ("a", "b", "a")]))
    assert [row.duplicate_of for row in rows] == [None, None, "demo:0"]


def test_other_types_of_tables(write: Callable[[list[dict[str, Any]]], Path], tmp_path: Path) -> None:
    """Times, bytes and NaN in columns that are not needed take no row away."""
    odd = {"text": "a", "when": pa.scalar(0, pa.timestamp("s")).as_py(), "image": b"\xff\xd8", "score": float("nan")}
    (row,) = read_all(tmp_path, write([odd]))
    assert values([row]) == [
        {"text": "a", "when": "1970-01-01 00:00:00", "image": {"sha256": hashlib.sha256(odd["image"]).hexdigest()}}
    ]


def test_a_table_with_a_text_that_is_no_text(tmp_path: Path) -> None:
    texts = pa.StringArray.from_buffers(3, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xffc"))
    write_parquet(tmp_path / "t.parquet", pa.table({"text": texts}))
    parsed = [parse_row(row.raw).content for row in read_all(tmp_path, tmp_path / "t.parquet")]
    assert [one.reason if isinstance(one, Dropped) else None for one in parsed] == [None, "invalid_unicode", None]


def test_rows_of_a_table_that_cannot_be_read_repeat_no_other(tmp_path: Path) -> None:
    """Two texts that are no text for the same reason are two texts."""
    texts = pa.StringArray.from_buffers(2, pa.py_buffer(b"\0\0\0\0\2\0\0\0\4\0\0\0"), pa.py_buffer(b"\xffa\xffb"))
    write_parquet(tmp_path / "t.parquet", pa.table({"text": texts}))
    assert [row.duplicate_of for row in read_all(tmp_path, tmp_path / "t.parquet")] == [None, None]


def test_bytes_are_no_text(tmp_path: Path) -> None:
    write_parquet(tmp_path / "t.parquet", pa.table({"text": pa.array([b"a good answer"], pa.binary())}))
    (row,) = read_all(tmp_path, tmp_path / "t.parquet")
    content = parse_row(row.raw).content
    assert isinstance(content, Dropped)
    assert content.reason == "unknown_format"


@pytest.mark.parametrize(
    "column",
    [
        pa.array([0, 1_234_567_891], pa.duration("ns")),
        pa.array([0, 2**60], pa.timestamp("us")),
        pa.array([0, 2**30], pa.date32()),
        pa.array([None, 5], pa.timestamp("us", "Mars/Base")),
    ],
    ids=["nanoseconds", "year", "date", "time zone"],
)
def test_a_value_that_python_cannot_hold_drops_its_row_alone(column: pa.Array, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", "b"], "odd": column}), tmp_path / "t.parquet")
    rows = read_all(tmp_path, tmp_path / "t.parquet")
    assert [row.raw.reason if isinstance(row.raw, Dropped) else None for row in rows] == [None, "unreadable_value"]


def test_columns_of_the_same_name(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["text", "text"]), tmp_path / "t.parquet")
    with pytest.raises(PromptError, match="columns of the same name"):
        read_all(tmp_path, tmp_path / "t.parquet")


def test_a_row_of_a_table_that_is_too_large(write: Callable[[list[dict[str, Any]]], Path], tmp_path: Path) -> None:
    rows = read_all(tmp_path, write([{"text": "a"}, {"text": "b" * 2000}]), max_row_bytes=1000)
    assert isinstance(rows[1].raw, Dropped)
    assert rows[1].raw.reason == "row_too_large"
    assert values(rows) == [{"text": "a"}]


def test_only_the_row_groups_of_a_partition_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.parquet"
    write_parquet(path, pa.table({"text": [f"row {number}" for number in range(50)]}))
    source = Source("demo", path)
    refresh(tmp_path / "index", [source], FEW)
    asked: list[list[int]] = []
    real = pq.ParquetFile.iter_batches

    def spy(file: pq.ParquetFile, *args: Any, **options: Any) -> Any:
        if "row_groups" in options:
            asked.append(options["row_groups"])
        return real(file, *args, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", spy)
    for key, first, groups in (("demo-00001", 7, [0, 1]), ("demo-00003", 21, [1, 2]), ("demo-00007", 49, [4])):
        assert values(read_partition(tmp_path / "index", source, key))[0] == {"text": f"row {first}"}
        assert asked.pop() == groups


@pytest.mark.parametrize("name", ["t.parquet", "t.arrow"])
@pytest.mark.parametrize("body", [b"", b"PAR1", b'{"text": "a"}\n'])
def test_a_damaged_table(name: str, body: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(body)
    with pytest.raises(PromptError, match="a source cannot be read") as error:
        read_all(tmp_path, tmp_path / name)
    assert str(tmp_path / name) in str(error.value.where)


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.jsonl.zst", "rows.zip"])
def test_a_packed_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x1f\x8b")
    with pytest.raises(PromptError, match="packed") as error:
        read_all(tmp_path, tmp_path / name)
    assert "unpack" in (error.value.remedy or "")


@pytest.mark.parametrize("name", ["rows.csv", "rows.CSV", "rows.tsv", "rows.xlsx"])
def test_a_sheet(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("question,answer\n1,2\n")
    with pytest.raises(PromptError, match="sheet of cells") as error:
        read_all(tmp_path, tmp_path / name)
    assert "to_json('rows.jsonl', orient='records', lines=True)" in (error.value.remedy or "")


# Folders


def test_a_folder_of_files(tmp_path: Path) -> None:
    folder = tmp_path / "chats" / "data"
    folder.mkdir(parents=True)
    for number in (1, 0):
        write_parquet(folder / f"train-{number:05d}-of-00002.parquet", pa.table({"n": [10 * number + n for n in range(10)]}))
    (tmp_path / "chats" / "README.md").write_text("a data set")
    (tmp_path / "chats" / "dataset_infos.json").write_text("{}")
    assert [row["n"] for row in values(read_all(tmp_path, tmp_path / "chats"))] == list(range(20))


def test_a_folder_of_lines(tmp_path: Path) -> None:
    (tmp_path / "chats").mkdir()
    for name in "ba":
        (tmp_path / "chats" / f"{name}.jsonl").write_text(f'{{"n": "{name}"}}\n{{"n": 1}}\n')
    rows = read_all(tmp_path, tmp_path / "chats")
    assert [row["n"] for row in values(rows)] == ["a", 1, "b", 1]
    assert [row.duplicate_of for row in rows] == [None, None, None, "demo:1"]


def saved(folder: Path, **state: Any) -> Path:
    """What `datasets.Dataset.save_to_disk` leaves."""
    folder.mkdir(parents=True)
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for number, name in enumerate(names):
        write_stream(folder / name, pa.table({"n": [10 * number + n for n in range(10)]}))
    state = {"_data_files": [{"filename": name} for name in names], "_format_type": None, "_split": None, **state}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_saved_data_set(tmp_path: Path) -> None:
    assert [row["n"] for row in values(read_all(tmp_path, saved(tmp_path / "chats")))] == list(range(20))


def dictionary(folder: Path) -> None:
    saved(folder / "train")
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')


def indices(folder: Path) -> None:
    saved(folder, _indices_data_files=[{"filename": "indices.arrow"}])


def splits(folder: Path) -> None:
    folder.mkdir()
    for split in ("train", "test"):
        write_parquet(folder / f"{split}-00000-of-00001.parquet", pa.table({"n": [1]}))


def kinds(folder: Path) -> None:
    folder.mkdir()
    (folder / "a.jsonl").write_text("{}")
    (folder / "b.json").write_text("{}")


UNSURE = [(dictionary, "splits"), (indices, "indices"), (splits, "splits"), (kinds, "kinds"), (Path.mkdir, "no data")]


@pytest.mark.parametrize(("make", "said"), UNSURE)
def test_folders_that_are_not_sure(make: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    make(tmp_path / "chats")
    with pytest.raises(PromptError, match=said) as error:
        refresh(tmp_path / "index", [Source("demo", tmp_path / "chats")], FEW)
    assert error.value.remedy


def test_a_file_more_in_a_folder_is_seen_and_renames_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "chats"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(10)))
    before = read_all(tmp_path, folder)
    shutil.copyfile(folder / "a.jsonl", folder / "b.jsonl")
    after = read_all(tmp_path, folder)
    assert after[:10] == before
    assert [row.duplicate_of for row in after[10:]] == [f"demo:{n}" for n in range(10)]
