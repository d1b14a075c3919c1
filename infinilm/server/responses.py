"""`POST /v1/responses`: a chat, with the reply in the form of OpenAI's Responses API."""

import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from infinilm.server.answer_events import ContentDelta, ReasoningDelta, ToolCallStart
from infinilm.server.api_errors import ApiError, bad_request
from infinilm.server.chat import AnswerPlan, ChatReply, open_chat
from infinilm.server.protocol import ChatRequest
from infinilm.server.replies import encode, respond
from infinilm.server.response_stream import Chunk, ResponseStream
from infinilm.server.responses_request import ResponsesRequest, to_chat
from infinilm.server.service import Service
from infinilm.text.answer import Answer

_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning",
}
"""Fields of a chat request, and their names here."""


async def create_response(service: Service, body: ResponsesRequest, request: Request) -> Response:
    chat_body = to_chat(body)
    try:
        stream, plan = await open_chat(service, chat_body, request)
    except ApiError as error:
        raise _renamed(error) from error
    reply = ResponsesReply(service, chat_body, stream, plan, body)
    try:
        encode(reply.response)  # it repeats the request's texts
    except UnicodeEncodeError as error:
        raise bad_request(f"a text has a lone surrogate, which UTF-8 cannot express: {error}") from error
    return await respond(service, chat_body, request, stream, reply)


def _renamed(error: ApiError) -> ApiError:
    """An error about the chat request, with the field name of the Responses API."""
    if error.param not in _NAMES:
        return error
    name = _NAMES[error.param]
    message = re.sub(rf"\b{error.param}\b", name, error.message, count=1)
    return ApiError(error.status, message, param=name, code=error.code, headers=error.headers)


def no_such_response(response_id: str) -> ApiError:
    return ApiError(
        404,
        f"there is no response {response_id[:100]!r}: this server stores none; send the whole conversation as input",
        param="response_id",
        code="response_not_found",
    )


class ResponsesReply(ChatReply):
    """Turns an answer into output items: one for each run of reasoning or text, and one for each call."""

    def __init__(
        self, service: Service, chat_body: ChatRequest, stream: ResponseStream, plan: AnswerPlan, body: ResponsesRequest
    ) -> None:
        super().__init__(service, chat_body, stream, plan)
        self.response = _describe(body, stream, service.model_name)
        """The response without output."""
        self._output: list[dict[str, Any]] = []
        """The items. The last one is open: more may be added to it."""
        self._texts: list[str] = []
        """The pieces of the open item's text or arguments."""
        self._logprobs: list[Any] = []
        """The log-probabilities of the open item's text."""
        self._held_logprobs: list[Any] = []
        """The log-probabilities of tokens whose text is held back."""
        self._is_streamed = bool(body.stream)
        self._num_events = 0
        self._events: list[bytes] = []

    # --- one body ---------------------------------------------------------------------------------------

    def keep(self, chunks: list[Chunk]) -> None:
        self._add(chunks)

    def whole(self) -> dict[str, Any]:
        (answer,) = self._stream.answers
        status, reason = ("incomplete", "max_output_tokens") if _is_cut(answer) else ("completed", None)
        usage = self._usage()
        return {
            **self.response,
            "status": status,
            "incomplete_details": reason and {"reason": reason},
            "output": self._output,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cache_write_tokens": 0, **usage["prompt_tokens_details"]},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
                "total_tokens": usage["total_tokens"],
            },
            "timings": self._stream.timings(),
        }

    # --- events -----------------------------------------------------------------------------------------

    def write(self, chunks: list[Chunk]) -> bytes:
        if not self._num_events:
            self._emit("response.created", response=self.response)
            self._emit("response.in_progress", response=self.response)
        self._add(chunks)
        events, self._events = self._events, []
        return b"".join(events)

    def end(self) -> bytes:
        whole = self.whole()
        self._emit(f"response.{whole['status']}", response=whole)
        return b"".join(self._events)

    def fail(self, error: ApiError) -> bytes:
        problem = {"code": "server_error", "message": error.message}
        self._emit("response.failed", response={**self.response, "status": "failed", "error": problem})
        return b"".join(self._events)

    def _emit(self, kind: str, **content: Any) -> None:
        if not self._is_streamed:
            return
        event = {"type": kind, "sequence_number": self._num_events, **content}
        self._events.append(b"event: %s\ndata: %s\n\n" % (kind.encode(), encode(event)))
        self._num_events += 1

    def _emit_in_item(self, kind: str, **content: Any) -> None:
        index = len(self._output) - 1
        self._emit(f"response.{kind}", item_id=self._output[index]["id"], output_index=index, **content)

    # --- items ------------------------------------------------------------------------------------------

    def _add(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            if logprobs := self._new_logprobs(chunk):
                self._held_logprobs += logprobs["content"]
            for event in self._parse(chunk):
                if isinstance(event, ContentDelta):
                    self._add_text(event.text)
                elif isinstance(event, ReasoningDelta):
                    self._add_reasoning(event.text)
                elif isinstance(event, ToolCallStart):
                    self._open({"id": _new_id("fc"), "type": "function_call", "call_id": event.id, "name": event.name})
                else:
                    self._texts.append(event.text)
                    self._emit_in_item("function_call_arguments.delta", delta=event.text)
            if chunk.is_end:
                if not self._output or (self._held_logprobs and self._is_open("message")):
                    self._add_text("")
                self._close("incomplete" if _is_cut(chunk.answer) else "completed")

    def _is_open(self, kind: str) -> bool:
        return bool(self._output) and self._output[-1]["type"] == kind

    def _open(self, item: dict[str, Any]) -> None:
        """Begin an item, and close the previous one as completed."""
        self._close("completed")
        self._held_logprobs = []
        self._output.append(item)
        started = {**item, "status": "in_progress", **_EMPTY[item["type"]]}
        self._emit("response.output_item.added", output_index=len(self._output) - 1, item=started)

    def _add_text(self, text: str) -> None:
        if not self._is_open("message"):
            logprobs = self._held_logprobs
            self._open({"id": _new_id("msg"), "type": "message"})
            self._held_logprobs = logprobs
            self._emit_in_item("content_part.added", content_index=0, part=_text_part("", []))
        logprobs, self._held_logprobs = self._held_logprobs, []
        self._texts.append(text)
        self._logprobs += logprobs
        self._emit_in_item("output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _add_reasoning(self, text: str) -> None:
        if not self._is_open("reasoning"):
            self._open({"id": _new_id("rs"), "type": "reasoning"})
        self._texts.append(text)
        self._emit_in_item("reasoning_text.delta", content_index=0, delta=text)

    def _close(self, status: str) -> None:
        if not self._output:
            return
        item, text, logprobs = self._output[-1], "".join(self._texts), self._logprobs
        self._texts, self._logprobs = [], []
        item["status"] = status
        if item["type"] == "message":
            part = _text_part(text, logprobs)
            item |= {"role": "assistant", "content": [part]}
            self._emit_in_item("output_text.done", content_index=0, text=text, logprobs=logprobs)
            self._emit_in_item("content_part.done", content_index=0, part=part)
        elif item["type"] == "reasoning":
            item |= {"summary": [], "content": [{"type": "reasoning_text", "text": text}]}
            self._emit_in_item("reasoning_text.done", content_index=0, text=text)
        else:
            item["arguments"] = text
            self._emit_in_item("function_call_arguments.done", name=item["name"], arguments=text)
        self._emit("response.output_item.done", output_index=len(self._output) - 1, item=item)


_EMPTY: Mapping[str, dict[str, Any]] = {
    "message": {"role": "assistant", "content": []},
    "reasoning": {"summary": [], "content": []},
    "function_call": {"arguments": ""},
}
"""The content fields of each item type before there is text."""


def _is_cut(answer: Answer) -> bool:
    return answer.finish_reason == "length"


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def _text_part(text: str, logprobs: list[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _describe(body: ResponsesRequest, stream: ResponseStream, model: str) -> dict[str, Any]:
    """The response before it has output: the request's settings, with defaults filled in."""
    params = stream.requests[0].params
    text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
    choice = body.tool_choice
    return {
        "id": _new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}, "verbosity": "medium", **text},
        "tool_choice": (choice if isinstance(choice, str) else choice.model_dump()) if choice else "auto",
        "tools": [{"description": None, "strict": None, **tool.model_dump()} for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }
