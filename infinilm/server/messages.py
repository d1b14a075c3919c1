"""What the HTTP process and the engine's process tell each other: msgpack behind its length, over a socket pair."""

import socket
from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from typing import Any

import msgspec

from infinilm.config import Config
from infinilm.distributed.config import DistConfig
from infinilm.engine.stats import EngineStats
from infinilm.outputs import FinishReason, RequestMetrics, TokenLogprobs
from infinilm.sampling_params import SamplingParams
from infinilm.structured_output import StructuredOutput

LENGTH_BYTES = 4
SOCKET_BUFFER_BYTES = 4 << 20
"""Room for a good many steps, so that the engine never waits for an HTTP process that is busy for a moment."""


class Timing(msgspec.Struct, array_like=True, frozen=True):
    """How long steps should take, and how often the engine reports at least. Seconds."""

    mixed_step: float
    prefill_step: float
    heartbeat: float


class Start(msgspec.Struct, tag="start", array_like=True):
    """Load a model."""

    settings: dict[str, Any]
    timing: Timing


class Submit(msgspec.Struct, tag="submit", array_like=True):
    """Answer a prompt."""

    request_id: str
    prompt_token_ids: list[int]
    params: dict[str, Any]
    """Those sampling parameters that are not the default."""
    cache_salt: str | None


class Abort(msgspec.Struct, tag="abort", array_like=True):
    """End a request, or one of its answers."""

    request_id: str
    answer: int | None = None


class Stop(msgspec.Struct, tag="stop", array_like=True):
    """Give back the memory and end the process."""


Command = Start | Submit | Abort | Stop


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The model is loaded."""

    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    device: str
    dtype: str
    load_seconds: float


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """The engine cannot go on, and its process ends."""

    error: str
    is_permanent: bool
    """Whether another try would fail the same way: a bad setting, a bad checkpoint."""


class Delta(msgspec.Struct, array_like=True, gc=False):
    """What a step added to one answer of one request. See `infinilm.outputs.AnswerDelta`."""

    request_id: str
    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None
    metrics: RequestMetrics | None = None


class Rejected(msgspec.Struct, tag="rejected", array_like=True):
    """A request was not taken on."""

    request_id: str
    error: str
    is_bug: bool = False
    """Whether it is our fault, not the sender's."""


class Stepped(msgspec.Struct, tag="stepped", array_like=True):
    """What a step brought."""

    deltas: list[Delta]


class Stats(msgspec.Struct, tag="stats", array_like=True):
    """The engine's state, every now and then."""

    stats: EngineStats


Report = Ready | Failed | Rejected | Stepped | Stats

_encoder = msgspec.msgpack.Encoder()
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(Report).decode


def frame(message: Command | Report) -> bytes:
    """A message as it is sent."""
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


class FrameReader:
    """Reads messages from a blocking socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray()

    def read_one(self) -> bytes:
        """Wait for a message."""
        while (message := self._cut()) is None:
            self._receive(0)
        return message

    def read_all(self) -> Iterator[bytes]:
        """The messages that are there. Raises EOFError when the other end is gone."""
        self._receive(socket.MSG_DONTWAIT)
        while (message := self._cut()) is not None:
            yield message

    def _receive(self, flags: int) -> None:
        try:
            data = self._socket.recv(1 << 20, flags)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError("the other process is gone")
        self._buffer += data

    def _cut(self) -> bytes | None:
        end = LENGTH_BYTES + int.from_bytes(self._buffer[:LENGTH_BYTES], "little")
        if len(self._buffer) < max(end, LENGTH_BYTES + 1):
            return None
        message = bytes(self._buffer[LENGTH_BYTES:end])
        del self._buffer[:end]
        return message


def config_to_wire(config: Config) -> dict[str, Any]:
    """The settings as plain values."""
    settings = {field.name: getattr(config, field.name) for field in fields(config)}
    settings["model"] = None if config.model is None else str(config.model)
    settings["distributed"] = config.distributed and config.distributed.tp_device_ids
    return settings


def config_from_wire(settings: dict[str, Any]) -> Config:
    """The settings again, checked once more."""
    ids = settings["distributed"]
    return Config.from_kwargs(**{**settings, "distributed": DistConfig(tp_device_ids=ids) if ids else None})


_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}


def params_to_wire(params: SamplingParams) -> dict[str, Any]:
    """The sampling parameters that differ from the default, as plain values."""
    values = {name: getattr(params, name) for name in _DEFAULTS}
    return {
        name: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        for name, value in values.items()
        if value != _DEFAULTS[name]
    }


def params_from_wire(values: dict[str, Any]) -> SamplingParams:
    """The sampling parameters again, checked once more."""
    if structured := values.get("structured"):
        values["structured"] = StructuredOutput(**structured)
    return SamplingParams.from_kwargs(**values)
