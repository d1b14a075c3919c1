"""Reads streamed answers: when tokens arrived and how many, and how the answer ended."""

import json
from array import array
from dataclasses import dataclass, field
from typing import Any

MAX_ERROR_BYTES = 1 << 16
MAX_MESSAGE_LENGTH = 400
INTERRUPTED = "interrupted"
"""The kind of error of requests that were open when the measurement was stopped."""

_PLAIN = b'"finish_reason":null'
"""Every event with text contains this, and otherwise only a chat's first event. So such events need no decoding."""


def _floats() -> "array[float]":
    return array("d")


def _counts() -> "array[int]":
    return array("L")


@dataclass(slots=True)
class Trace:
    """The record of one request. Times are those of `perf_counter`, in seconds."""

    index: int
    start: float
    """Just before the request was sent, or its connection opened."""
    lateness: float = 0.0
    """How much later `start` was than planned."""
    end: float = 0.0
    """When the last part of the reply arrived."""
    times: "array[float]" = field(default_factory=_floats)
    """When tokens arrived."""
    counts: "array[int]" = field(default_factory=_counts)
    """How many arrived: tokens if the server reports them in each event, otherwise events."""
    num_events: int = 0
    """Events with tokens."""
    num_prompt_tokens: int | None = None
    """As the server reports."""
    num_output_tokens: int | None = None
    error: str | None = None
    """The kind of error. None: answered completely."""
    message: str = ""
    """Details of the error."""

    @property
    def num_tokens(self) -> int:
        """Tokens as the server reports, or else the number of events."""
        return sum(self.counts) if self.num_output_tokens is None else self.num_output_tokens

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token; None if there is none."""
        return self.times[0] - self.start if self.times else None

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first arrival; None if there was no second."""
        num_later = self.num_tokens - self.counts[0] if len(self.times) > 1 else 0
        return (self.times[-1] - self.times[0]) / num_later if num_later > 0 else None

    def fail(self, error: str, message: object = "") -> None:
        """Record an error, unless there is one already."""
        if self.error is None:
            self.error, self.message = error, " ".join(str(message).split())


class EventReader:
    """Reads one streamed reply into a trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._status = 0
        self._content_type = ""
        self._body = b""
        """The body of a reply that is not a stream."""
        self._line = b""
        """The beginning of an incomplete line."""
        self._is_plain = False
        """Whether events need no decoding: the first one with text has arrived, and each brings one token."""
        self._has_counts = False
        """Whether each event reports the number of tokens so far."""
        self._is_finished = False

    def begin(self, status: int, content_type: str) -> None:
        self._status, self._content_type = status, content_type

    def feed(self, data: bytes, now: float) -> None:
        trace = self._trace
        trace.end = now
        if self._status != 200 or self._content_type != "text/event-stream":
            self._body += data[: MAX_ERROR_BYTES - len(self._body)]
            return
        lines = self._line + data
        if lines.endswith(b"\n"):
            self._line = b""
        else:
            end = lines.rfind(b"\n") + 1
            lines, self._line = lines[:end], lines[end:]
        num_events = lines.count(b"\ndata:") + lines.startswith(b"data:")
        if not num_events:
            return
        num_tokens = num_events
        if not self._is_plain or lines.count(_PLAIN) != num_events:
            num_events, num_tokens = self._read_closely(lines)
        trace.num_events += num_events
        if num_tokens:
            trace.times.append(now)
            trace.counts.append(num_tokens)

    def conclude(self) -> None:
        """Check, at the end of the reply, whether it is an answer."""
        trace = self._trace
        if self._status != 200:
            trace.fail(f"HTTP {self._status}", describe_error(self._body))
        elif self._content_type != "text/event-stream":
            trace.fail("no stream", f"the reply is of the type {self._content_type!r}")
        elif not self._is_finished:
            trace.fail("cut off", "the stream ended without a finish_reason or [DONE]")
        elif not trace.times:
            trace.fail("empty", "the stream has no text")

    def _read_closely(self, lines: bytes) -> tuple[int, int]:
        """Decode each event. Returns the number of events with tokens, and of tokens."""
        num_events = num_tokens = 0
        for line in lines.splitlines():
            if not line.startswith(b"data:"):
                continue
            content = line[5:].strip()
            if content == b"[DONE]":
                self._is_finished = True
                continue
            try:
                event = json.loads(content)
                num_new = self._read_event(event)
            except (ValueError, TypeError, AttributeError, KeyError):
                self._trace.fail("malformed event", repr(content[:80]))
                continue
            num_events += num_new > 0
            num_tokens += num_new
        return num_events, num_tokens

    def _read_event(self, event: dict[str, Any]) -> int:
        """The number of tokens in an event, if known."""
        if event.get("error"):
            self._trace.fail("error in the stream", error_message(event))
            return 0
        choice = event["choices"][0] if event.get("choices") else None
        is_last = choice is None or bool(choice.get("finish_reason"))
        self._is_finished |= choice is not None and is_last
        num_known = self._trace.num_output_tokens or 0
        if usage := event.get("usage"):
            self._has_counts |= not is_last
            self._trace.num_prompt_tokens = int(usage["prompt_tokens"])
            self._trace.num_output_tokens = int(usage["completion_tokens"])
        if choice is None or not _has_text(choice, is_last=is_last):
            return 0
        self._is_plain = not self._has_counts
        return max(0, (self._trace.num_output_tokens or 0) - num_known) if self._has_counts else 1


def _has_text(choice: dict[str, Any], *, is_last: bool) -> bool:
    """Whether an event brings a token. An incomplete character may be a token without text."""
    if "text" in choice:
        return bool(choice["text"]) or not is_last
    return any(value for name, value in choice["delta"].items() if name != "role")


def describe_error(reply: bytes) -> str:
    """The message of an error reply; the reply itself if it has none."""
    try:
        return error_message(json.loads(reply))
    except ValueError:
        return reply.decode(errors="replace")[:MAX_MESSAGE_LENGTH]


def error_message(reply: Any) -> str:
    """The message in a decoded error reply, which may be nested."""
    for name in ("error", "message", "detail"):
        if isinstance(reply, dict) and name in reply:
            reply = reply[name]
    return (reply if isinstance(reply, str) else json.dumps(reply))[:MAX_MESSAGE_LENGTH]
