"""Finds tool calls in an answer while it is generated.

The result does not depend on how the answer is cut into pieces. The rules:

- A call begins where an opening marker is followed by an object (or a list of objects) with a known function's name and
  an object of arguments. Until all of that is read the text is held back; if it does not follow, the text is content.
- A call that has begun stays a call. Its arguments are passed on exactly as written, as long as they are JSON. Where
  they break off (the answer was cut short, or the JSON is wrong) the call ends, and the text after it is read as after
  any other call.
- White space before a call, and at the end of an answer with calls, is layout: neither call nor content.
- All other text is content, unchanged, including markers that introduce no call.
"""

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Generator, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from infinilm.errors import InvalidValueError
from infinilm.server.json_scanner import JsonScanner
from infinilm.server.tool_formats import ToolFormat

_ARGUMENTS_KEYS = ("arguments", "parameters")
_SPACE = re.compile(r"[ \t\n\r]*")
_ID_CHARS = string.ascii_letters + string.digits
_ID_LENGTH = 9  # Mistral's templates insist on this length


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The beginning of a call; `index` counts the calls of an answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the arguments of the last call."""

    index: int
    text: str


Event: TypeAlias = ContentDelta | ToolCallStart | ArgumentsDelta


@dataclass(frozen=True)
class ToolCall:
    """One call; `arguments` is the model's text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ParsedAnswer:
    content: str
    calls: list[ToolCall]


def add_up(events: Iterable[Event]) -> ParsedAnswer:
    content: list[str] = []
    starts: list[ToolCallStart] = []
    arguments: list[list[str]] = []
    for event in events:
        match event:
            case ContentDelta():
                content.append(event.text)
            case ToolCallStart():
                starts.append(event)
                arguments.append([])
            case ArgumentsDelta():
                arguments[event.index].append(event.text)
    calls = [ToolCall(start.id, start.name, "".join(texts)) for start, texts in zip(starts, arguments, strict=True)]
    return ParsedAnswer("".join(content), calls)


class ToolCallParser:
    """Turns one answer's text, fed in pieces, into events. No text makes it raise."""

    def __init__(
        self, tool_format: ToolFormat, names: Collection[str] | None = None, *, is_parallel: bool = True
    ) -> None:
        """Look for calls of the functions `names` (None: of any).

        Unless both `is_parallel` and the format's are true, the answer ends with its first call; later text is dropped.
        """
        self._format = tool_format
        self._names = None if names is None else frozenset(names)
        self._is_single = not (is_parallel and tool_format.is_parallel)
        # Text that cannot be the beginning of an opening marker or of the white space in front of one.
        self._plain_text = re.compile(rf"(?:[ \t\n\r]*+[^{re.escape(tool_format.opening[0])}])*+")
        self._source = _Source()
        self._content: list[str] = []
        self._events: list[Event] = []
        self._reading = self._read_answer() if tool_format.is_parsed else self._read_unparsed()
        self.num_calls = 0
        self.is_done = False
        """Whether the answer is complete: further text would be dropped."""

    def feed(self, text: str) -> list[Event]:
        """Parse the next piece. Returns the events that no later text can change."""
        if self._source.is_finished:
            raise InvalidValueError("this parser has finished its answer; make a new one for the next")
        if self.is_done:
            return []
        self._source.append(text)
        return self._advance()

    def finish(self) -> list[Event]:
        """End the answer. Returns the events that were held back."""
        self._source.is_finished = True
        return self._advance()

    def _advance(self) -> list[Event]:
        next(self._reading, None)
        self._flush_content()
        events, self._events = self._events, []
        return events

    # The readers consume text of the source, and pause (`yield`) when there is none yet.

    def _read_unparsed(self) -> Generator[None, None, None]:
        while (yield from self._has_more()):
            self._source.pos = len(self._source.text)
            self._content.append(self._source.cut())

    def _read_answer(self) -> Generator[None, None, None]:
        source = self._source
        may_be_bare = self._format.may_be_bare
        while not self.is_done and (yield from self._has_more()):
            end = _end_of_match(self._plain_text, source.text, source.pos)
            if end > source.pos and not may_be_bare:
                source.pos = end
                self._content.append(source.cut())
            elif not ((yield from self._read_opening(may_be_bare)) and (yield from self._read_calls())):
                source.rewind()
                yield from self._read_character()
            may_be_bare = False

    def _read_character(self) -> Generator[None, None, None]:
        """Read a character that is content, and the white space in front of it."""
        yield from self._skip_space()
        if (yield from self._has_more()):
            self._source.pos += 1
        elif self.num_calls:
            return
        self._content.append(self._source.cut())

    def _read_opening(self, may_be_bare: bool) -> Generator[None, None, bool]:
        yield from self._skip_space()
        if may_be_bare and (yield from self._is_next("{")):
            return True
        return (yield from self._accept_all(self._format.opening))

    def _read_calls(self) -> Generator[None, None, bool]:
        """Read the calls behind an opening marker, and the closing one; False if there is no call."""
        source = self._source
        num_before = self.num_calls
        yield from self._skip_space()
        in_list = yield from self._accept("[")
        while (yield from self._read_call()):
            if self._is_single:
                self.is_done = True
                return True
            yield from self._skip_space()
            if in_list and (yield from self._accept("]")):
                source.mark()
                break
            if not (yield from self._accept(",") if in_list else self._is_next("{")):
                break
        source.rewind()
        if self.num_calls == num_before:
            return False
        yield from self._skip_space()
        if self._format.closing and (yield from self._accept_all(self._format.closing)):
            source.mark()
        source.rewind()
        return True

    def _read_call(self) -> Generator[None, None, bool]:
        """Read an object that is a call, and move the mark behind it; False if it is none."""
        yield from self._skip_space()
        head = (yield from self._read_head()) if (yield from self._accept("{")) else None
        if head is None:
            return False
        name, arguments = head
        self._start_call(name)
        if arguments:
            self._add_arguments(arguments)
            yield from self._read_tail()
        elif (yield from self._read_value(self._add_arguments)):
            yield from self._read_tail()
        return True

    def _read_head(self) -> Generator[None, None, tuple[str, str] | None]:
        """Read an object until it is certain to be a call. Returns its name, and its arguments if they came first."""
        name: str | None = None
        arguments: list[str] = []
        while (key := (yield from self._read_key())) is not None:
            if key == "name" and name is None:
                name = yield from self._read_string()
                if name is None or not self._is_known(name):
                    break
            elif key in _ARGUMENTS_KEYS and not arguments:
                if not (yield from self._is_next("{")):
                    break
                if name is not None:
                    return name, ""
                if not (yield from self._read_value(arguments.append)):
                    break
            elif not (yield from self._read_value()):
                break
            if name is not None and arguments:
                return name, "".join(arguments)
            if not (yield from self._accept_separator()):
                break
        return None

    def _read_tail(self) -> Generator[None, None, None]:
        """Skip the rest of a call after its arguments; skip nothing if it is not valid."""
        source = self._source
        while (yield from self._accept_separator()):
            if (yield from self._read_key()) is None or not (yield from self._read_value()):
                source.rewind()
                return
        if (yield from self._accept("}")):
            source.mark()
        source.rewind()

    def _read_key(self) -> Generator[None, None, str | None]:
        """Read a key and its colon; None if there is none."""
        yield from self._skip_space()
        key = yield from self._read_string()
        yield from self._skip_space()
        has_colon = yield from self._accept(":")
        yield from self._skip_space()
        return key if has_colon else None

    def _read_string(self) -> Generator[None, None, str | None]:
        if not (yield from self._is_next('"')):
            return None
        pieces: list[str] = []
        is_whole = yield from self._read_value(pieces.append)
        return str(json.loads("".join(pieces))) if is_whole else None

    def _read_value(self, pass_on: Callable[[str], None] | None = None) -> Generator[None, None, bool]:
        """Read a JSON value and pass on its text piece by piece. Returns False if it breaks off."""
        source = self._source
        scanner = JsonScanner()
        while not scanner.is_done and (yield from self._has_more()):
            start = source.pos
            source.pos = scanner.scan(source.text, start)
            if pass_on is not None and source.pos > start:
                pass_on(source.text[start : source.pos])
            if source.pos < len(source.text):
                break
        return scanner.is_done

    def _accept_separator(self) -> Generator[None, None, bool]:
        yield from self._skip_space()
        return (yield from self._accept(","))

    def _accept_all(self, chars: str) -> Generator[None, None, bool]:
        for char in chars:
            if not (yield from self._accept(char)):
                return False
        return True

    def _accept(self, char: str) -> Generator[None, None, bool]:
        is_next = yield from self._is_next(char)
        self._source.pos += is_next
        return is_next

    def _is_next(self, char: str) -> Generator[None, None, bool]:
        return (yield from self._has_more()) and self._source.text[self._source.pos] == char

    def _skip_space(self) -> Generator[None, None, None]:
        source = self._source
        while (yield from self._has_more()):
            source.pos = _end_of_match(_SPACE, source.text, source.pos)
            if source.pos < len(source.text):
                return

    def _has_more(self) -> Generator[None, None, bool]:
        """Wait for text; False at the end."""
        source = self._source
        while source.pos == len(source.text):
            if source.is_finished:
                return False
            yield
        return True

    def _is_known(self, name: str) -> bool:
        # Escapes can spell half a surrogate pair, which no reply can hold.
        return name in self._names if self._names is not None else name.isprintable() and name != ""

    def _start_call(self, name: str) -> None:
        self._flush_content()
        call_id = "".join(secrets.choice(_ID_CHARS) for _ in range(_ID_LENGTH))
        self._events.append(ToolCallStart(self.num_calls, call_id, name))
        self.num_calls += 1

    def _add_arguments(self, text: str) -> None:
        self._events.append(ArgumentsDelta(self.num_calls - 1, text))
        self._source.mark()

    def _flush_content(self) -> None:
        if self._content:
            self._events.append(ContentDelta("".join(self._content)))
            self._content.clear()


def parse_answer(
    text: str, tool_format: ToolFormat, names: Collection[str] | None = None, *, is_parallel: bool = True
) -> ParsedAnswer:
    """Parse a whole answer; see `ToolCallParser`."""
    parser = ToolCallParser(tool_format, names, is_parallel=is_parallel)
    return add_up([*parser.feed(text), *parser.finish()])


class _Source:
    """Text in pieces, with a position to read from and a mark to return to.

        earlier pieces | text: ... mark ... pos ...

    Text before the mark is dropped; the mark may be at the beginning of the earlier pieces.
    """

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.is_finished = False
        self._mark = 0
        self._earlier: list[str] = []

    def append(self, text: str) -> None:
        """Add a piece; all before it must have been read."""
        if self._mark < len(self.text):
            self._earlier.append(self.text[self._mark :])
        self.text, self.pos, self._mark = text, 0, 0

    def mark(self) -> None:
        self._earlier.clear()
        self._mark = self.pos

    def rewind(self) -> None:
        if self._earlier:
            self.text = "".join([*self._earlier, self.text])
            self._earlier.clear()
        self.pos = self._mark

    def cut(self) -> str:
        """Return the text from the mark to the position, and move the mark to the position."""
        taken = "".join([*self._earlier, self.text[self._mark : self.pos]])
        self.mark()
        return taken


def _end_of_match(pattern: re.Pattern[str], text: str, start: int) -> int:
    match = pattern.match(text, start)
    return match.end() if match else start
