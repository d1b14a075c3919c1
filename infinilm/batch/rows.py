"""The rows of a batch: reads them from a file, and parses them as requests.

A file is text (`.txt`, one prompt per line), JSON lines (`.jsonl`, `.ndjson`) or Parquet. Blank lines are skipped.
"""

import json
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from xxhash import xxh3_64_intdigest, xxh3_128

from infinilm.errors import InvalidValueError

if TYPE_CHECKING:
    import pyarrow.parquet

CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
URLS = (CHAT, COMPLETION, RESPONSES)
LINE_KEYS = ("custom_id", "method", "url", "body")
FORMATS = {".txt": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_BOM = b"\xef\xbb\xbf"
_NUM_PARQUET_ROWS = 256
"""The rows that are read at a time."""


class BadRowError(Exception):
    """Why a row is not a request."""

    def __init__(self, message: str, code: str = "invalid_line") -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True, frozen=True)
class Row:
    index: int
    line: int
    """The line number in the file, or the row number in a Parquet file. The first is 1."""
    data: bytes | dict[str, Any]
    """The line, or a Parquet row."""


@dataclass(slots=True)
class Scan:
    """The result of one pass over the input."""

    digest: str
    num_rows: int
    duplicates: dict[int, int]
    """By the index of a row whose `custom_id` is a repetition: the line that had it first."""
    starts: "array[int]" = field(repr=False)
    """By row: its byte offset in the file. Empty for Parquet."""
    lines: "array[int]" = field(repr=False)
    """By row: its line number. Empty for Parquet."""


@dataclass(slots=True, frozen=True)
class Call:
    """A row as a request to the service."""

    custom_id: str
    url: str
    body: dict[str, Any]


class Source:
    """The input file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.suffix.lower() not in FORMATS:
            raise InvalidValueError(f"INPUT {path} has the unknown ending {path.suffix!r}; use {', '.join(FORMATS)}")
        self.format = FORMATS[path.suffix.lower()]
        if not path.is_file():
            raise InvalidValueError(f"INPUT {path} is not a file")

    def scan(self) -> Scan:
        """Read the file once: its digest, its rows, and repeated `custom_id`s. Takes 24 bytes per row."""
        hashes, starts, lines = array("Q"), array("q"), array("q")
        digest = xxh3_128()
        if self.format == "parquet":
            with self.path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
            for row in self._read_parquet(0, None, ["custom_id"]):
                hashes.append(_hash(find_id(row)))
        else:
            for line, start, data in self._lines(0):
                digest.update(data)
                if data.strip():
                    starts.append(start)
                    lines.append(line)
                    row = Row(len(hashes), line, data)
                    hashes.append(_hash(line_id(line) if self.format == "text" else find_id(row)))
        duplicates = {row: lines[first] if lines else first + 1 for row, first in _find_duplicates(hashes).items()}
        return Scan(digest.hexdigest(), len(hashes), duplicates, starts, lines)

    def read(self, first: int = 0, num: int | None = None, *, start: int = 0, line: int = 1) -> Iterator[Row]:
        """The rows from index `first` on. `start` and `line` are that row's place in a text file."""
        if self.format == "parquet":
            yield from self._read_parquet(first, num)
            return
        index = first
        for number, _, data in self._lines(start, line):
            if num is not None and index >= first + num:
                return
            if data.strip():
                yield Row(index, number, data)
                index += 1

    def _lines(self, start: int, line: int = 1) -> Iterator[tuple[int, int, bytes]]:
        with self.path.open("rb") as file:
            file.seek(start)
            for data in file:
                yield line, start, data.removeprefix(_BOM) if start == 0 else data
                start += len(data)
                line += 1

    def _read_parquet(self, first: int, num: int | None, columns: list[str] | None = None) -> Iterator[Row]:
        parquet = self._open_parquet()
        if columns:
            columns = [name for name in columns if name in parquet.schema_arrow.names]
        end = parquet.metadata.num_rows if num is None else first + num
        groups, index = [], 0
        for group in range(parquet.num_row_groups):
            size = parquet.metadata.row_group(group).num_rows
            if index + size > first and index < end:
                groups.append((group, index))
            index += size
        for group, index in groups:
            position = index
            for batch in parquet.iter_batches(_NUM_PARQUET_ROWS, row_groups=[group], columns=columns):
                rows = batch.to_pylist() if batch.num_columns else [{}] * batch.num_rows
                for value in rows:
                    if first <= position < end:
                        yield Row(position, position + 1, value)
                    position += 1

    def _open_parquet(self) -> "pyarrow.parquet.ParquetFile":
        try:
            from pyarrow import ArrowInvalid
            from pyarrow.parquet import ParquetFile
        except ImportError:
            raise InvalidValueError(
                f"INPUT {self.path} is Parquet, which needs pyarrow; install it with: pip install pyarrow"
            ) from None
        try:
            return ParquetFile(self.path)
        except ArrowInvalid as error:
            raise InvalidValueError(f"INPUT {self.path} is not a Parquet file: {error}") from None


def _hash(custom_id: str) -> int:
    return xxh3_64_intdigest(custom_id.encode(errors="surrogatepass"))


def _find_duplicates(hashes: "array[int]") -> dict[int, int]:
    values = np.array(hashes, dtype=np.uint64)
    order = np.argsort(values, kind="stable")
    is_same = values[order][1:] == values[order][:-1]
    duplicates: dict[int, int] = {}
    for position in np.flatnonzero(is_same):
        before = int(order[position])
        duplicates[int(order[position + 1])] = duplicates.get(before, before)
    return duplicates


def line_id(line: int) -> str:
    """The `custom_id` of a row that has none of its own."""
    return f"line-{line}"


def find_id(row: Row) -> str:
    """A row's `custom_id`, even if the rest of the row is invalid."""
    value: Any = row.data
    if isinstance(value, bytes):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    own = value.get("custom_id") if isinstance(value, dict) else None
    return own if isinstance(own, str) else line_id(row.line)


# --- rows as requests -------------------------------------------------------------------------------------------


def parse(row: Row, *, is_text: bool = False, as_chat: bool = False) -> Call:
    """Parse a row as a request. `as_chat`: a prompt is a user's message. Raises `BadRowError`."""
    value = _read_value(row, is_text)
    value = {name: item for name, item in value.items() if item is not None}
    custom_id = value.pop("custom_id", line_id(row.line))
    if not isinstance(custom_id, str):
        raise BadRowError(f"custom_id is {custom_id!r}; use a text")
    call = _parse_line(custom_id, value) if "body" in value or "url" in value else _parse_prompt(custom_id, value)
    if call.body.get("stream"):
        raise BadRowError("stream is true; a batch has whole answers only")
    prompt = call.body.get("prompt")
    if as_chat and call.url == COMPLETION and "body" not in value and isinstance(prompt, str):
        rest = {name: item for name, item in call.body.items() if name != "prompt"}
        return Call(custom_id, CHAT, {"messages": [{"role": "user", "content": prompt}], **rest})
    return call


def _read_value(row: Row, is_text: bool) -> dict[str, Any]:
    if not isinstance(row.data, bytes):
        return row.data
    try:
        text = row.data.decode().rstrip("\r\n")
        value = {"prompt": text} if is_text else json.loads(text)
    except UnicodeDecodeError as error:
        raise BadRowError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise BadRowError(f"not JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError) as error:  # Python's limits of digits and of depth
        raise BadRowError(f"not readable as JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadRowError(f"a {type(value).__name__}; use an object with prompt, messages, or url and body")
    return value


def _parse_line(custom_id: str, value: Mapping[str, Any]) -> Call:
    """A line of OpenAI's batch input."""
    if unknown := value.keys() - LINE_KEYS:
        raise BadRowError(f"{min(unknown)} is unknown beside url and body; known are: {', '.join(LINE_KEYS)}")
    url, body, method = value.get("url"), value.get("body"), value.get("method", "POST")
    if method != "POST":
        raise BadRowError(f"method is {method!r}; use POST")
    if url not in URLS:
        raise BadRowError(f"url is {url!r}; use one of {', '.join(URLS)}", "invalid_url")
    if isinstance(body, str):  # Parquet has no type for an arbitrary object
        try:
            body = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise BadRowError(f"body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRowError("body is missing or no object")
    return Call(custom_id, url, body)


def _parse_prompt(custom_id: str, value: dict[str, Any]) -> Call:
    """A prompt or messages; the other members are fields of the request."""
    if ("prompt" in value) == ("messages" in value):
        raise BadRowError("give one of prompt and messages, or url and body")
    return Call(custom_id, CHAT if "messages" in value else COMPLETION, value)
