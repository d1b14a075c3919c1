"""The requests of the API: their fields, how bodies are read, and the sampling parameters that they ask for.

Unknown fields and wrong types are refused by name.
"""

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from infinilm.errors import InfinilmError
from infinilm.sampling_params import SamplingParams
from infinilm.server.api_errors import ApiError, bad_request
from infinilm.server.settings import Limits
from infinilm.structured_output import StructuredOutput

MAX_INTEGER = 2**31 - 1
SEED_LOW, SEED_HIGH = -(2**63), 2**63 - 1
UNSUPPORTED = "unsupported"
"""The error code for features of OpenAI's API that this server does not have."""

T = TypeVar("T")
Count = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
ListOf = Annotated[list[T], Field(fail_fast=True)]
"""A list that reports only its first wrong element: millions of errors would stop the server for minutes."""


class Strict(BaseModel):
    """Refuses unknown fields and values of another type: "1" is not a number, and neither is NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Strict):
    include_usage: bool | None = None
    """A last chunk with the number of tokens."""


class SamplingFields(Strict):
    """The fields of all requests for text. None means the default."""

    model: str | None = None
    """The name in `/v1/models`."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INTEGER)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=MAX_INTEGER)] | None = None
    stop: str | ListOf[str] | None = None
    stop_token_ids: ListOf[Count] | None = None
    ignore_eos: bool | None = None
    seed: Annotated[int, Field(ge=SEED_LOW, le=SEED_HIGH)] | None = None
    presence_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    """By token id, written as a string."""
    guided_json: dict[str, Any] | str | None = None
    """A JSON schema that the text will follow."""
    guided_regex: str | None = None
    guided_choice: ListOf[str] | None = None
    guided_grammar: str | None = None
    timeout: Annotated[float, Field(gt=0, le=86400)] | None = None
    """Seconds from arrival to the last token."""
    user: Annotated[str, Field(max_length=256)] | None = None
    """For the server's log."""


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`."""

    prompt: str | ListOf[str] | ListOf[int] | ListOf[ListOf[int]]
    """A text or token ids, or several of either."""
    echo: bool | None = None
    """Put the prompt before the answer."""
    logprobs: Count | None = None
    """Report each token's log-probability, and those of this many most likely ones."""
    best_of: Count | None = None
    """Not supported."""
    suffix: str | None = None
    """Not supported."""


class TextPart(Strict):
    type: Literal["text"]
    text: str


class FunctionCall(Strict):
    name: str
    arguments: str
    """A JSON object, as text."""


class ToolCall(Strict):
    """A tool call of an earlier turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | ListOf[TextPart] | None = None
    name: str | None = None
    tool_calls: ListOf[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """The reasoning of an earlier answer, for chat templates that repeat it."""
    refusal: None = None
    """The `openai` client sends an assistant's message back with it."""


class Function(Strict):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema."""
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    """The one tool to call."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Strict):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class NeutralFields(Strict):
    """Fields of OpenAI's API with the values that ask for nothing beyond what is done anyway."""

    store: bool | None = None
    """Only false: nothing is stored."""
    metadata: dict[str, str] | None = None
    """Labels of a stored answer."""
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: Annotated[str, Field(max_length=256)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=256)] | None = None
    """The prefix cache works without it."""


def check_stores_nothing(body: NeutralFields) -> None:
    if body.store:
        raise bad_request("store=true is not supported: this server keeps no answers; send false", "store", UNSUPPORTED)


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(SamplingFields, NeutralFields):
    """`POST /v1/chat/completions`."""

    messages: Annotated[ListOf[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INTEGER)] | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    response_format: ResponseFormat | None = None
    tools: ListOf[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Values for the chat template's own variables, such as `enable_thinking`."""
    modalities: ListOf[Literal["text"]] | None = None
    reasoning_effort: Effort | None = None
    """For chat templates that know it, and for models that do not reason."""
    thinking_token_budget: Count | None = None
    """The most tokens of reasoning; then it is closed, and the answer begins."""
    verbosity: Literal["medium"] | None = None


class TokenizeRequest(Strict):
    """`POST /tokenize`: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[ListOf[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    """For a text: put the tokens around it that the model expects. Default: yes."""


class DetokenizeRequest(Strict):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: ListOf[Count]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """The form of all errors."""

    error: ErrorDetail


# --- bodies ---------------------------------------------------------------------------------------------------
#
# The complexity of a body is bounded before it is parsed and validated: small values take much memory once they are
# parsed, and each wrong one may become a validation error.

_STRING = re.compile(r'"(?:[^"\\]++|\\.?)*+"?', re.DOTALL)
"""A string in JSON, or the rest of the text if the string does not end. It never backtracks."""


class JsonRequest(Request):
    """A request whose body is JSON in UTF-8 with at most `max_json_nodes` arrays, objects and members of objects."""

    async def json(self) -> Any:
        """The parsed body. Raises `ValueError` if it is not JSON."""
        text = (await self.body()).decode("utf-8-sig")
        max_nodes = self.app.state.max_json_nodes
        if _count_nodes(text) > max_nodes < _count_nodes(_STRING.sub("", text)):
            raise bad_request(
                f"the body has more than {max_nodes} arrays, objects and members of objects (max_json_nodes)",
                code="body_too_complex",
            )
        return json.loads(text)


def _count_nodes(text: str) -> int:
    return text.count("[") + text.count("{") + text.count(":")


class JsonRoute(APIRoute):
    """A route whose requests are `JsonRequest`s. The application's state holds `max_json_nodes`."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json


# --- sampling parameters --------------------------------------------------------------------------------------

_CONVERTED = {"max_tokens", "stop", "logit_bias"}
_SAME_NAMES = SamplingFields.model_fields.keys() & {field.name for field in fields(SamplingParams)} - _CONVERTED
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
_GUIDES = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Request fields, and their names in `StructuredOutput`."""


def check_limits(body: SamplingFields, limits: Limits) -> None:
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


def make_params(
    body: SamplingFields, max_tokens: int, defaults: Mapping[str, int | float], **others: Any
) -> SamplingParams:
    """The parameters for the engine; `defaults` are the model's.

    They have no stop strings: the HTTP process decodes text and finds stop strings itself.
    """
    values = {name: getattr(body, name) for name in _SAME_NAMES} | others
    given = {**defaults, **{name: value for name, value in values.items() if value is not None}}
    if body.logit_bias:
        given["logit_bias"] = _bias_by_id(body.logit_bias)
    try:
        return SamplingParams.from_kwargs(**given, max_tokens=max_tokens)
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


def schema_of(response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None) -> dict[str, Any] | None:
    """The JSON schema that answers must follow; None if the format is not JSON."""
    if isinstance(response_format, JsonSchemaFormat):
        return response_format.json_schema.schema_
    return {"type": "object"} if isinstance(response_format, JsonObjectFormat) else None


def find_structure(body: SamplingFields, tool_grammar: str | None = None) -> StructuredOutput | None:
    """The constraint on the form of a request's answers, or None. More than one is refused."""
    asked: dict[str, tuple[str, Any]] = {
        name: (kind, getattr(body, name)) for name, kind in _GUIDES.items() if getattr(body, name) is not None
    }
    if tool_grammar is not None:  # it includes the response format where text is allowed
        asked["tool_choice"] = ("grammar", tool_grammar)
    elif isinstance(body, ChatRequest) and isinstance(body.response_format, JsonObjectFormat):
        asked["response_format"] = ("json_object", True)
    elif isinstance(body, ChatRequest) and isinstance(body.response_format, JsonSchemaFormat):
        asked["response_format"] = ("json_schema", body.response_format.json_schema.schema_)
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
