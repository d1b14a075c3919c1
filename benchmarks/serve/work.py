"""The requests to a server, and when they are sent."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

from infinilm.checks import check_integer, check_real
from infinilm.errors import InvalidValueError

MAX_STREAMS = 100_000
OWN_FIELDS = frozenset({"model", "prompt", "messages", "max_tokens", "stream", "n"})
WORDS = (
    "time people year way day man thing world life hand part child eye place work week case point company number "
    "group problem fact home water room mother area money story month lot right study book word business issue side "
    "kind head house service friend father power hour game line end member law car city name team minute idea body"
)
"""Words of random chats: most tokenizers have one token for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """When requests are sent (one of `streams`, `rate` and `burst`), and for how long (`requests` or `seconds`)."""

    streams: int | None = None
    """Closed loop: this many at a time, each followed by another when it is answered."""
    rate: float | None = None
    """Open loop: this many per second on average, at random times, independent of earlier ones."""
    burst: int | None = None
    """This many at once."""
    requests: int | None = None
    seconds: float | None = None
    """When to stop sending. The run still waits for open requests."""

    def __post_init__(self) -> None:
        given = [name for name in ("streams", "rate", "burst") if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidValueError(f"{' and '.join(given) or 'no load'} given; use one of streams, rate, burst")
        for name in ("streams", "burst"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), low=1, high=MAX_STREAMS)
        if self.rate is not None:
            check_real("rate", self.rate, low=0, high=1e5, above_low=True)
        if self.requests is not None:
            check_integer("requests", self.requests, low=1)
        if self.seconds is not None:
            check_real("seconds", self.seconds, low=0, high=1e6, above_low=True)
        if self.burst is not None and (self.requests is not None or self.seconds is not None):
            raise InvalidValueError(f"burst={self.burst} is the number of requests; leave out requests and seconds")
        if self.burst is None and self.requests is None and self.seconds is None:
            raise InvalidValueError("the load has no end; give requests or seconds")

    def arrivals(self, seed: int) -> Iterator[float]:
        """The send times of an open loop, in seconds from the beginning."""
        if self.burst is not None:
            yield from [0.0] * self.burst
            return
        assert self.rate is not None
        random = Random(f"arrivals/{seed}")
        now = 0.0
        for _ in count() if self.requests is None else range(self.requests):
            now += random.expovariate(self.rate)
            if self.seconds is not None and now > self.seconds:
                return
            yield now

    def __str__(self) -> str:
        if self.burst is not None:
            return f"{_plural(self.burst, 'request')} at once"
        parts = [f"{self.rate:g} requests/s" if self.streams is None else _plural(self.streams, "stream")]
        if self.requests is not None:
            parts.append(_plural(self.requests, "request"))
        if self.seconds is not None:
            parts.append(f"{self.seconds:g} s")
        return ", ".join(parts)


def _plural(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The requests. Request `i` is the same in every run with the same seed."""

    model: str = ""
    input_len: int = 256
    """Tokens of a prompt, or words of a chat."""
    output_len: int = 128
    prefix_len: int = 0
    """Leading tokens that all prompts share."""
    vocab_size: int = 10_000
    """Prompts are random token ids below this."""
    seed: int = 0
    texts: tuple[str, ...] | None = None
    """Prompts to use instead, in turns."""
    is_chat: bool = False
    """Ask for a chat, not for a completion."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Further fields of every request."""

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len"):
            check_integer(name, getattr(self, name), low=1)
        check_integer("vocab_size", self.vocab_size, low=2, high=2**31)
        check_integer("prefix_len", self.prefix_len, low=0)
        check_integer("seed", self.seed, low=0)
        if self.prefix_len > self.input_len:
            raise InvalidValueError(f"prefix_len={self.prefix_len} must not be more than input_len={self.input_len}")
        if taken := OWN_FIELDS & self.fields.keys():
            raise InvalidValueError(f"the field {min(taken)!r} can't be given: this client sets it, or counts on it")
        if self.texts is not None and not self.texts:
            raise InvalidValueError("there are no prompts; give a file with a text in each line")

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def body(self, index: int) -> dict[str, Any]:
        """Request `index`. Negative ones are for warming up."""
        prompt = self._prompt(index)
        content = {"messages": [{"role": "user", "content": prompt}]} if self.is_chat else {"prompt": prompt}
        return {"model": self.model, **content, "max_tokens": self.output_len, "stream": True, **self.fields}

    def _prompt(self, index: int) -> str | list[int]:
        if self.texts is not None:
            return self.texts[index % len(self.texts)]
        known: Sequence[Any] = WORDS.split() if self.is_chat else range(self.vocab_size)
        prefix = Random(f"{self.seed}/prefix").choices(known, k=self.prefix_len)
        drawn = prefix + Random(f"{self.seed}/{index}").choices(known, k=self.input_len - self.prefix_len)
        return " ".join(drawn) if self.is_chat else drawn

    def __str__(self) -> str:
        if self.texts is not None:
            return f"{len(self.texts):,} texts, {self.output_len} out"
        shared = f" ({self.prefix_len} shared)" if self.prefix_len else ""
        return f"{self.input_len} {'words' if self.is_chat else 'tokens'} in{shared}, {self.output_len} out"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a good answer, in seconds. None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
