"""Rows: how files are read, and which requests rows are."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infinilm.batch.rows import CHAT, COMPLETION, BadRowError, Row, Source, find_id, parse
from infinilm.errors import InvalidValueError


def write(path: Path, *values: Any) -> Source:
    path.write_text("".join(f"{json.dumps(value)}\n" for value in values), encoding="utf-8")
    return Source(path)


def row_of(value: Any) -> Row:
    return Row(0, 1, value if isinstance(value, bytes | dict) else json.dumps(value).encode())


def test_blank_lines_are_no_rows_and_lines_keep_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\n  \ntwo\nthree")
    source = Source(path)
    scan = source.scan()
    assert [(row.index, row.line) for row in source.read()] == [(0, 1), (1, 4), (2, 5)]
    assert [parse(row, is_text=True).body for row in source.read()] == [{"prompt": t} for t in ("one", "two", "three")]
    assert scan.num_rows == 3
    assert [
        row for start in range(3) for row in source.read(start, 1, start=scan.starts[start], line=scan.lines[start])
    ] == [*source.read()]


def test_duplicate_ids_name_the_first_line(tmp_path: Path) -> None:
    ids = ["a", "b", "a", None, "line-4", "a"]
    source = write(tmp_path / "in.jsonl", *({"custom_id": each, "prompt": "x"} for each in ids))
    assert source.scan().duplicates == {2: 1, 4: 4, 5: 1}


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.jsonl", {"prompt": "x"}), write(tmp_path / "b.jsonl", {"prompt": "x"})
    other = write(tmp_path / "c.jsonl", {"prompt": "y"})
    assert first.scan().digest == second.scan().digest != other.scan().digest


def test_parquet_rows_in_any_part(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    messages = [{"role": "user", "content": "hi"}]
    table = pa.table({"custom_id": [f"id-{n % 9}" for n in range(10)], "messages": [messages] * 10})
    pq.write_table(table, path, row_group_size=3)
    source = Source(path)
    scan = source.scan()
    assert (scan.num_rows, scan.duplicates) == (10, {9: 1})
    assert [row.index for row in source.read(2, 5)] == [2, 3, 4, 5, 6]
    assert parse(next(source.read(4))).body == {"messages": messages}
    assert find_id(next(source.read(4))) == "id-4"


def test_a_parquet_body_may_be_text() -> None:
    call = parse(row_of({"custom_id": "a", "url": COMPLETION, "body": '{"prompt": "x"}', "method": None}))
    assert call.body == {"prompt": "x"}


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("in.csv", b"", "unknown ending"),
        ("missing.jsonl", None, "not a file"),
        ("in.parquet", b"text", "not a Parquet file"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, name: str, content: bytes | None, part: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidValueError, match=part):
        Source(tmp_path / name).scan()


def test_kinds_of_rows() -> None:
    assert parse(row_of({"prompt": "x", "max_tokens": 3})).body == {"prompt": "x", "max_tokens": 3}
    assert parse(row_of({"messages": []})).url == CHAT
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"messages": []}}
    assert parse(row_of(line)).custom_id == "a"
    assert parse(row_of({"prompt": "x", "n": 2}), as_chat=True).body == {
        "messages": [{"role": "user", "content": "x"}],
        "n": 2,
    }
    own = {"url": COMPLETION, "body": {"prompt": "x"}}
    assert parse(row_of(own), as_chat=True).url == COMPLETION, "a row that says its url keeps it"


@pytest.mark.parametrize(
    ("value", "part"),
    [
        (b"{", "not JSON"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b"[" * 100_000, "not readable as JSON"),
        (b'{"prompt": ' + b"1" * 5000 + b"}", "not readable as JSON"),
        ([1], "a list"),
        ({}, "give one of prompt and messages"),
        ({"prompt": "x", "messages": []}, "give one of prompt and messages"),
        ({"prompt": "x", "stream": True}, "stream"),
        ({"prompt": "x", "custom_id": 7}, "custom_id is 7"),
        ({"url": "/v1/embeddings", "body": {}}, "/v1/embeddings"),
        ({"url": CHAT}, "body is missing"),
        ({"url": CHAT, "body": {}, "method": "GET"}, "use POST"),
        ({"url": CHAT, "body": {}, "prompt": "x"}, "prompt is unknown beside"),
        ({"url": CHAT, "body": "{"}, "body is not JSON"),
    ],
)
def test_rows_that_are_no_requests(value: Any, part: str) -> None:
    with pytest.raises(BadRowError, match=part):
        parse(row_of(value))
    assert find_id(row_of(value)) == "line-1"
