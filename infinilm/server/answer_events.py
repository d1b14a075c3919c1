"""The events of an answer while it is generated, and the whole answer that they add up to."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
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


Event: TypeAlias = ReasoningDelta | ContentDelta | ToolCallStart | ArgumentsDelta


@dataclass(frozen=True)
class ToolCall:
    """One call; `arguments` is the text as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ParsedAnswer:
    content: str
    calls: list[ToolCall]
    reasoning: str = ""


def add_up(events: Iterable[Event]) -> ParsedAnswer:
    content: list[str] = []
    reasoning: list[str] = []
    starts: list[ToolCallStart] = []
    arguments: list[list[str]] = []
    for event in events:
        match event:
            case ContentDelta():
                content.append(event.text)
            case ReasoningDelta():
                reasoning.append(event.text)
            case ToolCallStart():
                starts.append(event)
                arguments.append([])
            case ArgumentsDelta():
                arguments[event.index].append(event.text)
    calls = [ToolCall(start.id, start.name, "".join(texts)) for start, texts in zip(starts, arguments, strict=True)]
    return ParsedAnswer("".join(content), calls, "".join(reasoning))
