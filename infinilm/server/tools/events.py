"""What a parser reports of an answer, and what it adds up to."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins; the calls of an answer are numbered from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the arguments of the call that began last."""

    index: int
    text: str


Event: TypeAlias = ContentDelta | ToolCallStart | ArgumentsDelta


@dataclass(frozen=True)
class ToolCall:
    """One call; `arguments` is the text that the model wrote."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ParsedAnswer:
    """A whole answer."""

    content: str
    calls: list[ToolCall]


def add_up(events: Iterable[Event]) -> ParsedAnswer:
    """Put the events of one answer together."""
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
