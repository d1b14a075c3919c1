"""Turns a request's fields into checked sampling parameters."""

import re
from collections.abc import Mapping
from typing import Any

from infinilm.errors import InfinilmError
from infinilm.sampling_params import SamplingParams
from infinilm.server.api_errors import ApiError, bad_request
from infinilm.server.protocol import ChatRequest, JsonObjectFormat, JsonSchemaFormat, SamplingFields
from infinilm.server.settings import Limits
from infinilm.structured_output import StructuredOutput

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
_GUIDES = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Request fields, and their names in `StructuredOutput`."""


def check_limits(body: SamplingFields, limits: Limits) -> None:
    """Refuse fields above their limits."""
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
    if size > getattr(limits, limit):
        raise bad_request(f"{name} asks for {size}; this server allows {getattr(limits, limit)} ({limit})", name)


def stop_strings(body: SamplingFields) -> tuple[str, ...]:
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def make_params(body: SamplingFields, max_tokens: int, **others: Any) -> SamplingParams:
    """The parameters for the engine. They have no stop strings: the HTTP process decodes text and finds those."""
    values = {name: getattr(body, name) for name in _SAME_NAMES} | others
    given = {name: value for name, value in values.items() if value is not None}
    if body.logit_bias:
        given["logit_bias"] = _bias_by_id(body.logit_bias)
    try:
        return SamplingParams.from_kwargs(max_tokens=max_tokens, **given)
    except InfinilmError as error:
        raise as_bad_request(error) from error


def as_bad_request(error: InfinilmError, param: str | None = None) -> ApiError:
    """One of the package's errors as a 400. Its first word is often the parameter."""
    word = re.match(r"[a-z_]+", str(error))
    return bad_request(str(error), word.group() if word and word.group() in SamplingFields.model_fields else param)


def _bias_by_id(logit_bias: Mapping[str, float]) -> dict[int, float]:
    for key in logit_bias:
        if not _TOKEN_ID.fullmatch(key):
            raise bad_request(f'logit_bias has the key {key[:40]!r}; keys are token ids, as in "17"', "logit_bias")
    return {int(token_id): bias for token_id, bias in logit_bias.items()}


def find_structure(body: SamplingFields, tool_grammar: str | None = None) -> StructuredOutput | None:
    """The constraint on the form of a request's answers, or None. More than one is refused."""
    asked: dict[str, tuple[str, Any]] = {
        name: (kind, getattr(body, name)) for name, kind in _GUIDES.items() if getattr(body, name) is not None
    }
    if isinstance(body, ChatRequest):
        if isinstance(body.response_format, JsonObjectFormat):
            asked["response_format"] = ("json_object", True)
        elif isinstance(body.response_format, JsonSchemaFormat):
            asked["response_format"] = ("json_schema", body.response_format.json_schema.schema_)
    if tool_grammar is not None:
        asked["tool_choice"] = ("grammar", tool_grammar)
    if not asked:
        return None
    names = list(asked)
    if len(names) > 1:
        raise bad_request(f"{' and '.join(names)} can't be combined; give one of them", names[0])
    if body.stop:
        raise bad_request(
            f"stop can't be combined with {names[0]}: it could cut off an answer before it is complete", "stop"
        )
    kind, value = asked[names[0]]
    try:
        return StructuredOutput(**{kind: value})
    except InfinilmError as error:
        raise bad_request(f"{names[0]}: {error}", names[0]) from error
