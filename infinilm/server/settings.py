"""The settings of the service, checked when they are made."""

import ipaddress
from dataclasses import dataclass, field, fields
from typing import Any, Self

from infinilm.checks import check_integer, check_real
from infinilm.errors import InvalidTypeError, InvalidValueError

MIN_KEY_LENGTH = 8


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits for one client and for all together. Times are in seconds."""

    max_requests: int = 1024
    """Requests in progress or waiting, over all clients. Others get a 429."""
    max_total_tokens: int = 4_194_304
    """Tokens of their prompts and of the answers they ask for. Others get a 429."""
    max_connections: int = 2048
    """Beyond, only `/health/live` is answered, on a few more connections."""
    max_body_bytes: int = 8 << 20
    max_total_body_bytes: int = 512 << 20
    """Of all bodies that are being received or whose request is in progress. Other requests get a 503."""
    max_header_bytes: int = 32 << 10
    """Also for all trailers, chunk sizes and chunk extensions of a chunked body together."""
    max_headers: int = 128
    max_json_nodes: int = 50_000
    """Arrays, objects and members of objects in a body, at all depths."""
    max_prompts: int = 128
    """Prompts in one request."""
    max_n: int = 16
    """Answers per prompt."""
    max_stops: int = 16
    max_stop_length: int = 256
    max_logprobs: int = 20
    max_logit_bias: int = 1024
    max_tools: int = 128
    request_timeout: float = 600.0
    """From a request's arrival to its last token, unless the request says less."""
    read_timeout: float = 30.0
    """For a request's headers, and again for its whole body."""
    write_timeout: float = 60.0
    """A client that reads nothing of a response for this long is disconnected."""
    prepare_timeout: float = 5.0
    """For rendering the chat template, and making tokens of the prompt."""
    drain_timeout: float = 30.0
    """After SIGTERM, for the requests in progress."""
    step_timeout: float = 120.0
    """For the engine to report progress: a step, or a heartbeat when idle. Without one it is killed and restarted."""
    mixed_step_time: float = 0.1
    """A step in which answers continue computes as many prompt tokens as fit into about this time, at least 16."""
    prefill_step_time: float = 0.5
    """The same for a step with prompts only: how long a new request waits for the current step."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(item.default, int):
                check_integer(item.name, value, low=1)
            else:
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
                raise InvalidTypeError(f"unknown limit {name!r}; known are: {', '.join(kinds)}")
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
