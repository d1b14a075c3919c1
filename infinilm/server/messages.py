"""The messages between the HTTP process and the engine's process, in msgpack."""

from dataclasses import asdict, fields, is_dataclass
from typing import Any

import msgspec

from infinilm.config import Config
from infinilm.distributed.config import DistConfig
from infinilm.engine.stats import EngineStats
from infinilm.outputs import AnswerDelta
from infinilm.sampling_params import SamplingParams
from infinilm.structured_output import Reasoning, StructuredOutput


class Timing(msgspec.Struct, array_like=True, frozen=True):
    """Target times of steps (None: what suits the device), and the longest time between two reports of the engine.
    All in seconds."""

    mixed_step: float | None
    prefill_step: float | None
    heartbeat: float


class Start(msgspec.Struct, tag="start", array_like=True):
    """Load a model."""

    settings: dict[str, Any]
    timing: Timing
    reports_cache: bool = False
    """Whether to send `CacheChanged`."""


class Submit(msgspec.Struct, tag="submit", array_like=True):
    """Answer a prompt."""

    request_id: str
    prompt_token_ids: list[int]
    params: dict[str, Any]
    """The sampling parameters that differ from their defaults."""
    cache_salt: str | None
    num_cached_tokens: int = 0
    """In a cluster: tokens that the sender expects in the prefix cache. They do not count as work."""


class Abort(msgspec.Struct, tag="abort", array_like=True):
    """End a request, or one of its answers."""

    request_id: str
    answer: int | None = None


class Stop(msgspec.Struct, tag="stop", array_like=True):
    """Free the memory and end the process."""


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
    default_params: dict[str, int | float]
    """The model's defaults for sampling."""
    memory: str
    """How the memory is used, as a sentence."""
    guarantee: str = ""
    """See `EngineStats`."""
    system_fingerprint: str = ""
    seconds: dict[str, float] = {}
    """The time of the start, by cause."""


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """The engine failed, and its process ends."""

    error: str
    is_permanent: bool
    """Whether another start would fail the same way, as with a bad setting or checkpoint."""


class Rejected(msgspec.Struct, tag="rejected", array_like=True):
    """A request was refused, or failed before its first step."""

    request_id: str
    error: str
    is_bug: bool = False
    """Whether the engine is at fault, not the client."""


class Stepped(msgspec.Struct, tag="stepped", array_like=True):
    """The output of a step."""

    deltas: list[AnswerDelta]


class Stats(msgspec.Struct, tag="stats", array_like=True):
    """The engine's state, sent at intervals."""

    stats: EngineStats


class CacheChanged(msgspec.Struct, tag="cache", array_like=True):
    """Blocks that the prefix cache gained and lost: the first `HASH_BYTES` of each one's hash, joined."""

    added: bytes
    removed: bytes = b""


Report = Ready | Failed | Rejected | Stepped | Stats | CacheChanged
HASH_BYTES = 8

encode_message = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(Report).decode


def config_to_wire(config: Config) -> dict[str, Any]:
    """The settings as plain values, for `config_from_wire`."""
    settings = {field.name: getattr(config, field.name) for field in fields(config)}
    settings["model"] = None if config.model is None else str(config.model)
    if (dist := config.distributed) is not None:
        settings["distributed"] = {"tp_device_ids": list(dist.tp_device_ids), "pp_size": dist.pp_size}
    return settings


def config_from_wire(settings: dict[str, Any]) -> Config:
    """The settings that `config_to_wire` wrote, checked again."""
    dist = settings["distributed"]
    return Config.from_kwargs(**{**settings, "distributed": DistConfig(**dist) if dist else None})


_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}


def params_to_wire(params: SamplingParams) -> dict[str, Any]:
    """The sampling parameters that differ from their defaults, as plain values, for `params_from_wire`."""
    values = {name: getattr(params, name) for name in _DEFAULTS}
    return {
        name: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        for name, value in values.items()
        if value != _DEFAULTS[name]
    }


def params_from_wire(values: dict[str, Any]) -> SamplingParams:
    """The sampling parameters that `params_to_wire` wrote, checked again."""
    if structured := values.get("structured"):
        values["structured"] = StructuredOutput(**structured)
    if reasoning := values.get("reasoning"):
        values["reasoning"] = Reasoning(**reasoning)
    return SamplingParams.from_kwargs(**values)
