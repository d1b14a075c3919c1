"""The requests that are understood. A field that is not here, or has another type, is refused by its name."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

MAX_INTEGER = 2**31 - 1
SEED_LOW, SEED_HIGH = -(2**63), 2**63 - 1

T = TypeVar("T")
Count = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
ListOf = Annotated[list[T], Field(fail_fast=True)]
"""A list of which only the first wrong element is reported: millions of errors would stop the server for minutes."""


class Strict(BaseModel):
    """Unknown fields and values of another type are errors: "1" is no number, and neither is NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Strict):
    """What to send besides the text."""

    include_usage: bool | None = None
    """A last chunk with the number of tokens."""


class SamplingFields(Strict):
    """What all requests for text have in common. None of a value means its default."""

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
    """A piece of a message."""

    type: Literal["text"]
    text: str


class FunctionCall(Strict):
    """What a tool was asked to do, in an earlier turn."""

    name: str
    arguments: str
    """A JSON object, as text."""


class ToolCall(Strict):
    """A tool call of an earlier turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | ListOf[TextPart] | None = None
    name: str | None = None
    tool_calls: ListOf[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    """The `openai` client sends an assistant's message back with it."""


class Function(Strict):
    """What a tool does and takes."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema."""
    strict: bool | None = None


class Tool(Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """A function by its name."""

    name: str


class NamedTool(Strict):
    """The one tool to call."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Strict):
    """A schema that the answer will follow."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class TextFormat(Strict):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """Some JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class ChatRequest(SamplingFields):
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
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """Every error looks like this."""

    error: ErrorDetail
