"""What the events of completions and of chat completions have in common."""

from typing import Any

import msgspec

from infinilm.server.calls import Call

encode = msgspec.json.Encoder().encode


class EventMaker:
    """Makes events around choices: `base` is what all of a reply's events begin with."""

    def __init__(self, base: dict[str, Any], call: Call, *, has_usage: bool) -> None:
        self._base = base
        self._call = call
        self._has_usage = has_usage
        self._num_open = len(call.answers)

    def make(self, choice: dict[str, Any], timings: dict[str, Any] | None = None) -> bytes:
        """An event with one choice."""
        event = {**self._base, "choices": [choice]}
        if self._has_usage:
            event["usage"] = None
        if timings is not None:
            event["timings"] = timings
        return b"data: " + encode(event) + b"\n\n"

    def template(self, key: str, index: int) -> tuple[bytes, bytes]:
        """An event before and after the text of the choice `index`, which stands at `key` (`"text":`)."""
        head = encode(self._base)[:-1] + b',"choices":[{"index":%d,%s' % (index, key.encode())
        usage = b',"usage":null' if self._has_usage else b""
        closing = b"}" * key.count("{")
        return b"data: " + head, closing + b',"logprobs":null,"finish_reason":null}]' + usage + b"}\n\n"

    def count_done(self) -> bool:
        """Count an answer that is done. Whether it is the last one: its end waits for the timings, for `end`."""
        self._num_open -= 1
        return self._num_open == 0

    def end(self, choice: dict[str, Any]) -> bytes:
        """The end of the last answer, with the timings; then the usage, if it was asked for."""
        timings = self._call.timings()
        last = self.make(choice, timings)
        if not self._has_usage:
            return last
        usage = {**self._base, "choices": [], "usage": self._call.usage(), "timings": timings}
        return last + b"data: " + encode(usage) + b"\n\n"
