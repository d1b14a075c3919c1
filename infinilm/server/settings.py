"""The settings of the service, checked when they are made."""

import ipaddress
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Self

from infinilm.checks import check_integer, check_real
from infinilm.errors import InvalidTypeError, InvalidValueError

MIN_KEY_LENGTH = 8


def _limit(default: Any, meaning: str) -> Any:
    """A limit. `infinilm serve --limit help` shows its meaning, which begins with the unit."""
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits for one client and for all together."""

    max_requests: int = _limit(1024, "requests in progress or waiting, of all clients; others get a 429")
    max_total_tokens: int = _limit(
        4_194_304, "tokens of their prompts and of the answers they ask for; others get a 429"
    )
    max_connections: int = _limit(2048, "connections; beyond, only /health/live is answered, on a few more")
    max_body_bytes: int = _limit(8 << 20, "bytes of a request's body")
    max_total_body_bytes: int = _limit(
        512 << 20, "bytes of all bodies being received or whose request is in progress; others get a 503"
    )
    max_header_bytes: int = _limit(32 << 10, "bytes of a request's headers; also of a chunked body's framing")
    max_headers: int = _limit(128, "headers of a request")
    max_json_nodes: int = _limit(50_000, "arrays, objects and members of objects in a body, at all depths")
    max_prompts: int = _limit(128, "prompts in a request")
    max_n: int = _limit(16, "answers per prompt")
    max_stops: int = _limit(16, "stop strings of a request")
    max_stop_length: int = _limit(256, "characters of a stop string")
    max_logprobs: int = _limit(20, "log-probabilities per token")
    max_logit_bias: int = _limit(1024, "entries of logit_bias")
    max_tools: int = _limit(128, "tools of a request")
    request_timeout: float = _limit(600.0, "seconds from arrival to the last token, unless the request says less")
    read_timeout: float = _limit(30.0, "seconds for a request's headers, and again for its whole body")
    write_timeout: float = _limit(60.0, "seconds in which a client must read something of a response")
    prepare_timeout: float = _limit(5.0, "seconds for rendering the chat template and making tokens of the prompt")
    drain_timeout: float = _limit(30.0, "seconds for the requests in progress after SIGTERM")
    step_timeout: float = _limit(
        120.0, "seconds in which the engine must report progress; without, it is killed and restarted"
    )
    mixed_step_time: float | None = _limit(
        None,
        "seconds a step should take in which answers continue, which bounds the gaps in streams: it computes as many "
        "prompt tokens as fit, at least 16; by default 0.012 on a GPU, else 0.1",
    )
    prefill_step_time: float | None = _limit(
        None,
        "seconds a step with prompts only should take: how long a new request waits for the current step; by default "
        "0.1 on a GPU, else 0.5",
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(item.default, int):
                check_integer(item.name, value, low=1)
            elif value is not None or item.default is not None:
                check_real(item.name, value, low=0.0, high=86_400.0, above_low=True)

    @classmethod
    def from_pairs(cls, pairs: list[str]) -> Self:
        """Build from texts such as `max_n=4`."""
        kinds = {item.name: int if isinstance(item.default, int) else float for item in fields(cls)}
        values: dict[str, Any] = {}
        for pair in pairs:
            name, _, text = pair.partition("=")
            name = name.strip().replace("-", "_")
            if name not in kinds:
                close = get_close_matches(name, kinds, n=1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                raise InvalidTypeError(f"unknown limit {name!r}; {hint}--limit help lists them: {', '.join(kinds)}")
            try:
                values[name] = kinds[name](text)
            except ValueError:
                raise InvalidValueError(f"{name}={text!r} must be a number, as in {name}=10") from None
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    model_name: str | None = None
    """The model's name in requests. None: the name of its file or directory."""
    log_requests: bool = False
    parse_special_tokens: bool = False
    """Whether special tokens in the messages of a chat become control tokens."""
    reasoning_parser: str | None = None
    """How the model marks its reasoning, or "none". None: detected from its chat template."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        check_integer("port", self.port, low=0, high=65535)
        for key in self.api_keys:
            if len(key) < MIN_KEY_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
                raise InvalidValueError(
                    f"an API key of {len(key)} characters was given; use {MIN_KEY_LENGTH} or more printable ASCII "
                    "characters without spaces"
                )
        if not self.is_loopback and not self.api_keys:
            raise InvalidValueError(
                f"host={self.host!r} can be reached from other machines, and there is no API key; "
                "give one with --api-key-file or INFINILM_API_KEY, or listen on 127.0.0.1"
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the service."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
