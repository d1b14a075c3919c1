"""Finds reasoning and tool calls in an answer while it is generated.

The result does not depend on how the answer is cut into pieces. The rules:

- Reasoning comes first: from its opening marker, or from the beginning if the prompt has opened it, to its closing
  marker or the end of the answer. White space around it is layout.
- A call begins where an opening marker is followed by an object (or a list of objects) with a known function's name and
  an object of arguments. The text is held back until all of that is read; if it is not a call, the text is content.
  A call with tags begins when its first argument is complete, a call in Python or Gemma's form when it is complete.
- A call that has begun stays a call. Its arguments are passed on exactly as written, as long as they are JSON. Where
  they break off (the answer was cut short, or the text is wrong), the call ends, and the text after it is read as
  after any other call.
- White space before a call, and at the end of an answer with calls, is layout: neither call nor content.
- All other text is content, unchanged, including markers that introduce no call.
"""

import json
import re
import secrets
import string
from collections.abc import Collection, Generator, Mapping
from typing import Any

from infinilm.errors import InvalidValueError
from infinilm.server.answer_events import (
    ArgumentsDelta,
    ContentDelta,
    Event,
    ParsedAnswer,
    ReasoningDelta,
    ToolCallStart,
    add_up,
)
from infinilm.server.call_syntax import (
    GemmaCall,
    JsonCall,
    NamedCall,
    PythonCall,
    TaggedCall,
    dump,
    parameter_schema,
    value_in_json,
)
from infinilm.server.text_reader import TextReader, end_of_match
from infinilm.server.tool_formats import PLAIN, ToolFormat
from infinilm.text.reasoning import ReasoningFormat

_NAME_KEYS = ("name", "tool_name")
_ARGUMENTS_KEYS = ("arguments", "parameters")
_NAME = re.compile(r"[^\s<>\"'\[\](){}:,|｜]*")
_MAX_HEAD_CHARS = 256
_ID_CHARS = string.ascii_letters + string.digits
_ID_LENGTH = 9  # Mistral's templates insist on this length


class AnswerParser(TextReader):
    """Turns one answer's text, fed in pieces, into events. No text makes it raise."""

    def __init__(
        self,
        tool_format: ToolFormat | None,
        names: Collection[str] | None = None,
        *,
        is_parallel: bool = True,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        reasoning: ReasoningFormat | None = None,
        is_reasoning: bool = False,
    ) -> None:
        """Look for reasoning, and for calls of the functions `names` (None: of any).

        `schemas` are the functions' parameters, for formats that do not tell strings from other values. `is_reasoning`:
        the prompt has opened the reasoning. Unless both `is_parallel` and the format's are true, the answer ends with
        its first call; later text is dropped.
        """
        super().__init__()
        self._format = tool_format or PLAIN
        self._names = None if names is None else frozenset(names)
        self._schemas = schemas or {}
        self._reasoning_format = reasoning
        self._is_reasoning = is_reasoning
        self._is_single = not (is_parallel and self._format.is_parallel)
        # Text that cannot be the beginning of an opening marker or of the white space in front of one.
        self._plain_text = re.compile(rf"(?:[ \t\n\r]*+[^{re.escape(self._format.opening[0])}])*+")
        self._content: list[str] = []
        self._events: list[Event] = []
        self._reading = self._read_all()
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

    # The readers consume the source's text, and pause (`yield`) when there is none yet.

    def _read_all(self) -> Generator[None, None, None]:
        if self._reasoning_format is not None:
            yield from self._read_reasoning(self._reasoning_format)
        yield from (self._read_answer() if self._format.is_parsed else self._read_unparsed())

    def _read_reasoning(self, reasoning: ReasoningFormat) -> Generator[None, None, None]:
        source = self._source
        yield from self._skip_space()
        if not self._is_reasoning and not (yield from self._accept_all(reasoning.opening)):
            source.rewind()
            return
        yield from self._skip_space()
        yield from self._pass_on_until((reasoning.closing,), self._add_reasoning, is_stripped=True)
        yield from self._skip_space()
        source.mark()

    def _read_unparsed(self) -> Generator[None, None, None]:
        while (yield from self._has_more()):
            self._source.pos = len(self._source.text)
            self._content.append(self._source.cut())

    def _read_answer(self) -> Generator[None, None, None]:
        source = self._source
        may_be_bare = self._format.may_be_bare
        while not self.is_done and (yield from self._has_more()):
            end = end_of_match(self._plain_text, source.text, source.pos)
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
        if may_be_bare and (yield from self._is_next(self._format.write_answer([self._format.syntax.head])[0])):
            return True
        return (yield from self._accept_all(self._format.opening))

    def _read_calls(self) -> Generator[None, None, bool]:
        """Read the calls after an opening marker, and the closing marker; False if there is no call."""
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
            if not (yield from self._accept(",") if in_list else self._is_next(self._format.syntax.head[:1])):
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
        """Read a call, and move the mark to its end; False if there is none."""
        yield from self._skip_space()
        if not (yield from self._accept_all(self._format.syntax.head)):
            return False
        match self._format.syntax:
            case JsonCall():
                return (yield from self._read_json_call())
            case NamedCall() as named:
                return (yield from self._read_named_call(named))
            case TaggedCall() as tagged:
                return (yield from self._read_tagged_call(tagged))
            case PythonCall() | GemmaCall() as whole:
                return (yield from self._read_whole_call(whole))

    def _read_json_call(self) -> Generator[None, None, bool]:
        """Read an object whose opening brace is already read."""
        head = yield from self._read_head()
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

    def _read_named_call(self, syntax: NamedCall) -> Generator[None, None, bool]:
        name = yield from self._read_name(syntax.after_name)
        yield from self._skip_space()
        if name is None or not (yield from self._is_next("{")):
            return False
        self._start_call(name)
        tail = syntax.tail.strip()
        if (yield from self._read_value(self._add_arguments)) and tail:
            yield from self._skip_space()
            if (yield from self._accept_all(tail)):
                self._source.mark()
        self._source.rewind()
        return True

    def _read_tagged_call(self, syntax: TaggedCall) -> Generator[None, None, bool]:
        """Read arguments until the tail. They are passed on one by one."""
        name = yield from self._read_name(syntax.after_name)
        if name is None:
            return False
        parameters = self._schemas.get(name, {})
        num_arguments = 0
        while True:
            yield from self._skip_space()
            found = yield from self._accept_any(syntax.parameter, syntax.tail)
            argument = None
            if found == syntax.parameter:
                argument = yield from self._read_argument(syntax, parameters)
            if not num_arguments and (argument or found == syntax.tail):
                self._start_call(name)
            if argument is None:
                break
            self._add_arguments(("{" if not num_arguments else ", ") + argument)
            num_arguments += 1
        if found == syntax.tail:
            self._add_arguments("}" if num_arguments else "{}")
        self._source.rewind()
        return num_arguments > 0 or found == syntax.tail

    def _read_argument(self, syntax: TaggedCall, parameters: Mapping[str, Any]) -> Generator[None, None, str | None]:
        """Read a key and a value; return them as a member of a JSON object."""
        before, _, after = syntax.after_key.partition("\n")
        key = yield from self._read_until(before, _MAX_HEAD_CHARS)
        yield from self._skip_space_before(after)
        if key is None or not (yield from self._accept_all(after)):
            return None
        value = yield from self._read_until(syntax.after_value)
        if value is None:
            return None
        key, _, attributes = key.partition('"')
        is_string = {"true": True, "false": False}.get(attributes.removeprefix(' string="'))
        return f"{dump(key)}: {value_in_json(value, parameter_schema(parameters, key), is_string)}"

    def _read_whole_call(self, syntax: PythonCall | GemmaCall) -> Generator[None, None, bool]:
        name = yield from self._read_name(syntax.opening)
        text = (yield from self._read_brackets(syntax.quotes)) if name is not None else None
        arguments = syntax.read_arguments(text) if text is not None else None
        if name is None or arguments is None:
            return False
        self._start_call(name)
        self._add_arguments(arguments)
        return True

    def _read_name(self, after: str) -> Generator[None, None, str | None]:
        """Read a known function's name, and the text up to and including `after`."""
        name = yield from self._read_run(_NAME)
        if not self._is_known(name):
            return None
        if after and (yield from self._read_until(after, _MAX_HEAD_CHARS)) is None:
            return None
        return name

    def _skip_space_before(self, text: str) -> Generator[None, None, None]:
        if text:
            yield from self._skip_space()

    def _read_head(self) -> Generator[None, None, tuple[str, str] | None]:
        """Read an object until it is certain to be a call. Returns its name, and its arguments if they came first."""
        name: str | None = None
        arguments: list[str] = []
        while (key := (yield from self._read_key())) is not None:
            if key in _NAME_KEYS and name is None:
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

    def _accept_separator(self) -> Generator[None, None, bool]:
        yield from self._skip_space()
        return (yield from self._accept(","))

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

    def _add_reasoning(self, text: str) -> None:
        self._flush_content()
        if self._events and isinstance(last := self._events[-1], ReasoningDelta):
            self._events[-1] = ReasoningDelta(last.text + text)
        else:
            self._events.append(ReasoningDelta(text))

    def _flush_content(self) -> None:
        if self._content:
            self._events.append(ContentDelta("".join(self._content)))
            self._content.clear()


def parse_answer(
    text: str, tool_format: ToolFormat | None, names: Collection[str] | None = None, **settings: Any
) -> ParsedAnswer:
    """Parse a whole answer; see `AnswerParser`."""
    parser = AnswerParser(tool_format, names, **settings)
    return add_up([*parser.feed(text), *parser.finish()])
