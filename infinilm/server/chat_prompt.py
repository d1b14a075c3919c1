"""From a conversation, and the tools it may use, to a prompt."""

from collections.abc import Collection
from typing import Any

from infinilm.errors import InfinilmError
from infinilm.server.api_errors import bad_request
from infinilm.server.protocol import ChatRequest, Message
from infinilm.server.sampling import as_bad_request
from infinilm.server.service import Service
from infinilm.server.tools import ToolCallParser, ToolRequest, call_grammar, check_tool_request, prepare_messages

_OWN_NAMES = {"self", "messages", "tools", "add_generation_prompt", "special_tokens"} | {
    "parse_special_tokens",
    "check_text",
    "is_marked",
}
"""Arguments of `Tokenizer.encode_chat` and what it calls; a request's own variables may not set them."""


async def encode_chat(
    service: Service, messages: list[Message], plan: "ToolPlan", variables: dict[str, Any] | None
) -> list[int]:
    """The tokens of a conversation."""
    if service.tokenizer.chat_template is None:
        raise bad_request("this model has no chat template; use /v1/completions", "messages")
    if taken := _OWN_NAMES & (variables or {}).keys():
        raise bad_request(f"chat_template_kwargs can't set {min(taken)!r}", "chat_template_kwargs")
    plain, extra = plan.prepare([_plain(message) for message in messages])
    return await service.prompts.render(plain, {**(variables or {}), **extra})


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates take it."""
    plain = message.model_dump(exclude_none=True)
    if message.role == "developer":
        plain["role"] = "system"  # what OpenAI's newer models call it
    return plain


class ToolPlan:
    """What a request's tools mean for its prompt, its constraint and its answers."""

    def __init__(self, service: Service, body: ChatRequest | None = None) -> None:
        self._service = service
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools] if body and body.tools is not None else None
        choice = body.tool_choice if body else None
        self._tools = tools
        self._choice = choice if choice is None or isinstance(choice, str) else choice.model_dump()
        self._is_parallel = body.parallel_tool_calls if body else None
        tokenizer = service.tokenizer
        markers = service.tool_format.markers
        ids = {marker: tokenizer.backend.token_to_id(marker) for marker in markers}
        self._special = {marker: i for marker, i in ids.items() if i in tokenizer.special_ids}
        try:
            self.request: ToolRequest = check_tool_request(tools, self._choice, self._is_parallel)
            self.grammar = call_grammar(
                service.tool_format, tools, self._choice, self._is_parallel, special_tokens=self._special
            )
        except InfinilmError as error:
            raise bad_request(str(error), "tools") from error

    @property
    def kept_ids(self) -> Collection[int]:
        """Special tokens that are text here: the markers of calls, or all where the client itself looks for calls."""
        if not self.request.names:
            return ()
        return self._special.values() if self._service.tool_format.is_parsed else self._service.tokenizer.special_ids

    def prepare(self, messages: list[dict[str, Any]]) -> tuple[list[Any], dict[str, Any]]:
        """The messages and keywords for the chat template."""
        try:
            return prepare_messages(
                messages,
                self._tools,
                self._choice,
                self._service.template_takes_tools[bool(self.request.tools)],
                parallel_tool_calls=self._is_parallel,
                tool_format=self._service.tool_format,
            )
        except InfinilmError as error:
            raise as_bad_request(error, "messages") from error

    def parser(self) -> ToolCallParser | None:
        """For one answer; None if there is nothing to look for."""
        if not self.request.names:
            return None
        return ToolCallParser(self._service.tool_format, self.request.names, is_parallel=self.request.is_parallel)
