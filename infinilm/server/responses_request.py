"""The fields of `POST /v1/responses`, and their conversion to a chat request."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from infinilm.server.api_errors import bad_request
from infinilm.server.protocol import (
    MAX_INTEGER,
    UNSUPPORTED,
    ChatRequest,
    Count,
    Effort,
    Function,
    FunctionCall,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    ListOf,
    Message,
    NamedFunction,
    NamedTool,
    NeutralFields,
    SamplingFields,
    Strict,
    TextFormat,
    TextPart,
    Tool,
    ToolCall,
)

LOGPROBS = "message.output_text.logprobs"
Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Strict):
    type: Literal["input_text"]
    text: str


class OutputText(Strict):
    """Text of an earlier answer."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: ListOf[dict[str, Any]] | None = None


ContentPart = Annotated[InputText | OutputText, Field(discriminator="type")]


class InputMessage(Strict):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | ListOf[ContentPart]
    id: str | None = None
    status: Status | None = None
    phase: None = None


class CallItem(Strict):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    """A JSON object, as text."""
    id: str | None = None
    status: Status | None = None


class CallOutputItem(Strict):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | ListOf[InputText]
    id: str | None = None
    status: Status | None = None


class ReasoningText(Strict):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Strict):
    """The reasoning of an earlier answer, before its message or calls."""

    type: Literal["reasoning"]
    summary: ListOf[ReasoningText] | None = None
    content: ListOf[ReasoningText] | None = None
    encrypted_content: None = None
    id: str | None = None
    status: Status | None = None

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content or ())


def _type_of(item: Any) -> str | None:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else None


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _type_of,
        custom_error_type="unknown_item",
        custom_error_message="an item's type must be message, function_call, function_call_output or reasoning. "
        "Nothing is stored here, so send items whole; leave out calls of built-in tools, which this server does not "
        "have",
    ),
]


class FunctionTool(Strict):
    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema."""
    strict: bool | None = None


class NamedFunctionTool(Strict):
    """The one function to call."""

    type: Literal["function"]
    name: str


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class TextSettings(Strict):
    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Strict):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Accepted, and none is made: reasoning items hold the reasoning itself."""


class EventOptions(Strict):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(SamplingFields, NeutralFields):
    """`POST /v1/responses`. The server's own sampling fields, such as `top_k`, are those of other requests."""

    input: str | Annotated[ListOf[InputItem], Field(min_length=1)]
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_INTEGER)] | None = None
    top_logprobs: Count | None = None
    include: ListOf[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    text: TextSettings | None = None
    tools: ListOf[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: Count | None = None
    stream_options: EventOptions | None = None  # type: ignore[assignment]
    background: bool | None = None
    """Not supported."""
    previous_response_id: str | None = None
    """Not supported."""
    conversation: str | dict[str, Any] | None = None
    """Not supported."""
    prompt: dict[str, Any] | None = None
    """Not supported."""

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())


_REMEDIES = {
    "previous_response_id": "answers are not stored here; send the whole conversation as input",
    "conversation": "conversations are not stored here; send the whole conversation as input",
    "prompt": "prompts are not stored here; send the text as instructions and input",
    "background": "this server answers at once; leave it out, and use stream to see the answer grow",
    "n": "a response has one answer; send several requests, or use /v1/chat/completions",
    "max_tokens": "its name here is max_output_tokens",
}
_SAME_NAMES = (SamplingFields.model_fields.keys() | NeutralFields.model_fields.keys()) - {"stream_options"}


def to_chat(body: ResponsesRequest) -> ChatRequest:
    """The equivalent chat request."""
    for name, remedy in _REMEDIES.items():
        value = getattr(body, name)
        if value is not None and value is not False and (name, value) != ("n", 1):
            raise bad_request(f"{name} is not supported: {remedy}", name, UNSUPPORTED)
    choice: Any = body.tool_choice
    if isinstance(choice, NamedFunctionTool):
        choice = NamedTool(type="function", function=NamedFunction(name=choice.name))
    return ChatRequest(
        **{name: getattr(body, name) for name in _SAME_NAMES},
        messages=_to_messages(body),
        max_completion_tokens=body.max_output_tokens,
        logprobs=body.wants_logprobs,
        top_logprobs=body.top_logprobs or None,
        response_format=_to_format(body.text),
        tools=[Tool(type="function", function=_to_function(tool)) for tool in body.tools or ()] or None,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=body.chat_template_kwargs,
        thinking_token_budget=body.thinking_token_budget,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
    )


def _to_function(tool: FunctionTool) -> Function:
    return Function(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)


def _to_format(text: TextSettings | None) -> TextFormat | JsonObjectFormat | JsonSchemaFormat | None:
    found = text.format if text else None
    if not isinstance(found, SchemaFormat):
        return found
    schema = found.model_dump(by_alias=True, exclude={"type"})
    return JsonSchemaFormat(type="json_schema", json_schema=JsonSchema(**schema))


def _to_messages(body: ResponsesRequest) -> list[Message]:
    """The input as messages.

    Templates expect one system message, and an answer's calls in the same message as its text: such items are merged.
    Reasoning becomes part of the answer that follows it; without such an answer it is left out.
    """
    items = body.input
    if isinstance(items, str):
        items = [InputMessage(role="user", content=items)]
    messages: list[Message] = []
    if body.instructions is not None:
        messages.append(Message(role="system", content=_to_parts(body.instructions)))
    call_ids: set[str] = set()
    reasoning: str | None = None
    for index, item in enumerate(items):
        last = messages[-1] if messages else None
        if isinstance(item, ReasoningItem):
            reasoning = item.text or None
        elif isinstance(item, CallItem):
            call = ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments))
            call_ids.add(item.call_id)
            if last is None or last.role != "assistant":
                last = Message(role="assistant")
                messages.append(last)
            last.tool_calls = [*(last.tool_calls or ()), call]
            last.reasoning_content, reasoning = last.reasoning_content or reasoning, None
        elif isinstance(item, CallOutputItem):
            if item.call_id not in call_ids:
                raise bad_request(
                    f"input[{index}].call_id is {item.call_id!r}, which is no earlier call's; send the function_call "
                    "item before its output",
                    "input",
                )
            messages.append(Message(role="tool", content=_to_parts(item.output), tool_call_id=item.call_id))
        elif item.role in ("system", "developer") and len(messages) == 1 and messages[0].role == "system":
            messages[0].content = [*_to_parts(messages[0].content or ""), *_to_parts(item.content)]
        else:
            role = "system" if item.role == "developer" else item.role
            messages.append(Message(role=role, content=_to_parts(item.content)))
            if role == "assistant":
                messages[-1].reasoning_content, reasoning = reasoning, None
    if not messages:
        raise bad_request("input has only reasoning; send the conversation around it", "input")
    return messages


def _to_parts(content: str | list[InputText] | list[InputText | OutputText] | list[TextPart]) -> list[TextPart]:
    if isinstance(content, str):
        return [TextPart(type="text", text=content)]
    return [TextPart(type="text", text=part.text) for part in content]
