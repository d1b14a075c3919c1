"""From a request's fields to checked sampling parameters."""

import re
from collections.abc import Mapping
from typing import Any

from infinilm.errors import InfinilmError
from infinilm.sampling_params import SamplingParams
from infinilm.server.api_errors import ApiError, bad_request
from infinilm.server.protocol import SamplingFields
from infinilm.server.settings import Limits

_SAME_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "n",
    "stop_token_ids",
    "ignore_eos",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


def check_limits(body: SamplingFields, limits: Limits) -> None:
    """Refuse what asks for more than one request may."""
    sizes = {
        "n": (body.n or 1, "max_n"),
        "stop": (len(stop_strings(body)), "max_stops"),
        "stop_token_ids": (len(body.stop_token_ids or ()), "max_stops"),
        "logit_bias": (len(body.logit_bias or ()), "max_logit_bias"),
    }
    for name, (size, limit) in sizes.items():
        check_size(name, size, limit, limits)
    for stop in stop_strings(body):
        if not stop:
            raise bad_request("stop holds an empty text, which would end every answer at once", "stop")
        check_size("stop", len(stop), "max_stop_length", limits)
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream to be true", "stream_options")


def check_size(name: str, size: int, limit: str, limits: Limits) -> None:
    """Refuse a field that is larger than a limit."""
    if size > getattr(limits, limit):
        raise bad_request(f"{name} asks for {size}; this server allows {getattr(limits, limit)} ({limit})", name)


def stop_strings(body: SamplingFields) -> tuple[str, ...]:
    """The texts that end an answer."""
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def make_params(body: SamplingFields, max_tokens: int, **others: Any) -> SamplingParams:
    """The parameters for the engine. Stop strings are not among them: they are found where text is made."""
    values = {name: getattr(body, name) for name in _SAME_NAMES} | others
    given = {name: value for name, value in values.items() if value is not None}
    if body.logit_bias:
        given["logit_bias"] = _bias_by_id(body.logit_bias)
    return refusing_params(max_tokens=max_tokens, **given)


def refusing_params(**values: Any) -> SamplingParams:
    """Make the parameters; what they refuse is a bad request."""
    try:
        return SamplingParams.from_kwargs(**values)
    except InfinilmError as error:
        raise as_bad_request(error) from error


def as_bad_request(error: InfinilmError, param: str | None = None) -> ApiError:
    """One of the package's own errors as a 400; its first word is often the parameter."""
    word = re.match(r"[a-z_]+", str(error))
    return bad_request(str(error), word.group() if word and word.group() in SamplingFields.model_fields else param)


def _bias_by_id(logit_bias: Mapping[str, float]) -> dict[int, float]:
    for key in logit_bias:
        if not _TOKEN_ID.fullmatch(key):
            raise bad_request(f'logit_bias has the key {key[:40]!r}; keys are token ids, as in "17"', "logit_bias")
    return {int(token_id): bias for token_id, bias in logit_bias.items()}
