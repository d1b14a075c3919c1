"""`POST /v1/chat/completions`."""

from collections.abc import Collection
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from infinilm.errors import InfinilmError
from infinilm.server import protocol
from infinilm.server.answer_events import (
    ArgumentsDelta,
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallStart,
    add_up,
)
from infinilm.server.answer_parser import AnswerParser
from infinilm.server.api_errors import bad_request
from infinilm.server.harmony import make_parser
from infinilm.server.replies import Reply, chat_logprobs, encode, respond
from infinilm.server.response_stream import Chunk, ResponseStream
from infinilm.server.service import Service
from infinilm.server.tool_request import ToolRequest, call_grammar, check_tool_request, prepare_messages
from infinilm.structured_output import Reasoning, StructuredOutput
from infinilm.text.answer import Answer
from infinilm.text.reasoning import PromptEnd, ReasoningTracker, end_of_prompt

_OWN_NAMES = {
    *("self", "messages", "tools", "add_generation_prompt", "special_tokens"),
    *("parse_special_tokens", "check_text", "is_marked"),
}
"""Arguments of `Tokenizer.encode_chat` and the functions that it calls. `chat_template_kwargs` can't set them."""


async def chat(service: Service, body: protocol.ChatRequest, request: Request) -> Response:
    stream, plan = await open_chat(service, body, request)
    return await respond(service, body, request, stream, ChatReply(service, body, stream, plan))


async def open_chat(
    service: Service, body: protocol.ChatRequest, request: Request
) -> "tuple[ResponseStream, AnswerPlan]":
    """Check a request, encode its messages, and make an engine request of it."""
    _check(service, body)
    plan = AnswerPlan(service, body)
    token_ids = await encode_chat(service, body.messages, plan, _template_variables(service, body))
    plan.note_prompt(token_ids)
    structured = protocol.find_structure(body, plan.grammar)
    max_tokens = service.max_model_len - len(token_ids)
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    params = protocol.make_params(
        body,
        min(asked or max_tokens, max_tokens),
        service.ready.default_params,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structured=structured,
        reasoning=plan.reasoning_of(structured),
    )
    return service.open_stream(request, body, [token_ids], [params], kept_ids=plan.kept_ids), plan


def _check(service: Service, body: protocol.ChatRequest) -> None:
    service.check_model(body.model)
    service.client.check_open()
    protocol.check_limits(body, service.limits)
    protocol.check_stores_nothing(body)
    protocol.check_size("top_logprobs", body.top_logprobs or 0, "max_logprobs", service.limits)
    protocol.check_size("tools", len(body.tools or ()), "max_tools", service.limits)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    if body.thinking_token_budget is not None and service.reasoning is None:
        raise bad_request(
            "thinking_token_budget needs a model that reasons, and this one's chat template shows no reasoning; "
            "leave it out, or start the server with --reasoning-parser",
            "thinking_token_budget",
            protocol.UNSUPPORTED,
        )
    if body.max_tokens == 0:
        raise bad_request("max_tokens=0 leaves nothing to answer; use 1 or more", "max_tokens")
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise bad_request("max_tokens and max_completion_tokens disagree; give one of them", "max_completion_tokens")


def _template_variables(service: Service, body: protocol.ChatRequest) -> dict[str, Any]:
    """`chat_template_kwargs`, and `reasoning_effort` if the template reads it. Models without reasoning ignore it."""
    given = body.chat_template_kwargs or {}
    if body.reasoning_effort is None:
        return given
    templates = f"{service.tokenizer.chat_template} {service.tokenizer.tool_template}"
    if "reasoning_effort" in templates:
        return {"reasoning_effort": body.reasoning_effort, **given}
    if "enable_thinking" in templates:
        raise bad_request(
            f"reasoning_effort={body.reasoning_effort!r} is not supported by this model; switch its reasoning on or "
            'off with chat_template_kwargs, as in {"enable_thinking": false}',
            "reasoning_effort",
            protocol.UNSUPPORTED,
        )
    return given


async def encode_chat(
    service: Service, messages: list[protocol.Message], plan: "AnswerPlan", variables: dict[str, Any] | None
) -> list[int]:
    if service.tokenizer.chat_template is None:
        raise bad_request("this model has no chat template; use /v1/completions", "messages")
    if taken := _OWN_NAMES & (variables or {}).keys():
        raise bad_request(f"chat_template_kwargs can't set {min(taken)!r}", "chat_template_kwargs")
    plain, extra = plan.prepare([_plain(message) for message in messages])
    return await service.prompts.render(plain, {**(variables or {}), **extra})


def _plain(message: protocol.Message) -> dict[str, Any]:
    """A message in the form that templates expect."""
    plain = message.model_dump(exclude_none=True)
    if message.role == "developer":  # the name of "system" for OpenAI's newer models
        plain["role"] = "system"
    return plain


class AnswerPlan:
    """How a request's tools and the model's reasoning affect its prompt, its grammar and the parsing of its answers."""

    def __init__(self, service: Service, body: protocol.ChatRequest | None = None) -> None:
        self._service = service
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools] if body and body.tools is not None else None
        choice = body.tool_choice if body else None
        self._tools = tools
        self._choice = choice if choice is None or isinstance(choice, str) else choice.model_dump()
        self._is_parallel = body.parallel_tool_calls if body else None
        self._reasoning_budget = body.thinking_token_budget if body else None
        self._prompt_end: PromptEnd = "neither"
        try:
            self.request: ToolRequest = check_tool_request(tools, self._choice, self._is_parallel)
            self.grammar = call_grammar(
                service.tool_format,
                tools,
                self._choice,
                self._is_parallel,
                special_tokens=service.tool_marker_ids,
                answer_schema=protocol.schema_of(body.response_format) if body else None,
                answer_header=service.reasoning.answer_header if service.reasoning else "",
            )
        except InfinilmError as error:
            raise bad_request(str(error), "tools") from error

    @property
    def kept_ids(self) -> Collection[int]:
        """Special tokens that stay in the text: markers, or all if the client parses calls itself."""
        service = self._service
        if self.request.names and not service.tool_format.is_parsed:
            return service.tokenizer.special_ids
        tool_ids = service.tool_marker_ids.values() if self.request.names else ()
        return {*service.reasoning_marker_ids.values(), *tool_ids}

    def note_prompt(self, token_ids: list[int]) -> None:
        if self._service.reasoning is not None:
            self._prompt_end = end_of_prompt(self._service.tokenizer, token_ids, self._service.reasoning)

    def reasoning_of(self, structured: StructuredOutput | None) -> Reasoning | None:
        """The reasoning's settings for the engine, if it must limit the reasoning or start a grammar after it."""
        found, budget = self._service.reasoning, self._reasoning_budget
        if found is None or self._prompt_end == "closed" or (structured is None and budget is None):
            return None
        return Reasoning(
            opening="" if self._prompt_end == "open" else found.opening,
            closing=found.closing,
            max_tokens=budget,
            forced_closing=found.closing + ("" if self.request.names else found.answer_header),
            header="" if self.grammar else found.answer_header,
            repeats=found.repeats,
        )

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
            raise protocol.as_bad_request(error, "messages") from error

    def make_parser(self) -> AnswerParser | None:
        """A parser for one answer; None if all of it is content."""
        tool_format, reasoning, names = self._service.tool_format, self._service.reasoning, self.request.names
        if not names and reasoning is None:
            return None
        is_parsed = bool(names) and tool_format.is_parsed
        return make_parser(
            tool_format if is_parsed else None,
            names if is_parsed else (),
            is_parallel=self.request.is_parallel,
            schemas={tool.name: tool.parameters for tool in self.request.tools},
            reasoning=reasoning,
            is_reasoning=self._prompt_end == "open",
        )

    def make_tracker(self) -> ReasoningTracker | None:
        """Counts the tokens of one answer's reasoning."""
        found = self._service.reasoning
        if found is None:
            return None
        opening = "" if self._prompt_end == "open" else found.opening
        return ReasoningTracker(self._service.tokenizer.token_bytes, opening, found.closing, repeats=found.repeats)


class ChatReply(Reply):
    content_key = "delta"
    no_content: dict[str, Any] = {}  # noqa: RUF012 (read only)

    def __init__(self, service: Service, body: protocol.ChatRequest, stream: ResponseStream, plan: AnswerPlan) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(service, body, stream, prefix="chatcmpl", kind=kind, text_key='"delta":{"content":')
        self._wants_logprobs = bool(body.logprobs)
        self._parsers = [plan.make_parser() for _ in stream.answers]
        self._trackers = [plan.make_tracker() for _ in stream.answers]
        self._found: list[list[Event]] = [[] for _ in stream.answers]

    def _parse(self, chunk: Chunk) -> list[Event]:
        """Split new text into reasoning, content and calls. A call that must be the only one ends the answer."""
        parser, tracker = self._parsers[chunk.answer.index], self._trackers[chunk.answer.index]
        if tracker is not None:
            for token_id in chunk.delta.token_ids:
                tracker.advance(token_id)
        if parser is None:
            return [ContentDelta(chunk.text)] if chunk.text else []
        was_done = parser.is_done
        if was_done:
            chunk.is_end = False  # the answer has ended with an earlier chunk
            return []
        found = parser.feed(chunk.text) if chunk.text else []
        if parser.is_done:
            chunk.is_end = True
            self._stream.end_answer(chunk.answer)
        if chunk.is_end:
            found += parser.finish()
        return found

    def _usage(self) -> dict[str, Any]:
        counts = [tracker.num_tokens for tracker in self._trackers if tracker is not None]
        details = {"completion_tokens_details": {"reasoning_tokens": sum(counts)}} if counts else {}
        return {**super()._usage(), **details}

    def _finish_reason(self, answer: Answer) -> str | None:
        parser = self._parsers[answer.index]
        has_calls = parser is not None and parser.num_calls > 0
        return "tool_calls" if has_calls and answer.finish_reason == "stop" else answer.finish_reason

    def _new_logprobs(self, chunk: Chunk) -> dict[str, Any] | None:
        """The log-probabilities of the chunk's tokens, without a token that ended the answer: it is not in the text."""
        if not self._wants_logprobs:
            return None
        positions = chunk.delta.logprobs or []
        is_cut = chunk.is_end and chunk.answer.ends_with_token
        return chat_logprobs(positions[:-1] if is_cut else positions, self._tokenizer)

    def keep(self, chunks: list[Chunk]) -> None:
        for each in chunks:
            self._found[each.answer.index] += self._parse(each)

    def _whole_choice(self, answer: Answer) -> dict[str, Any]:
        parsed = add_up(self._found[answer.index])
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if parsed.calls or parsed.reasoning:
            message["content"] = parsed.content or None
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in parsed.calls
            ]
        positions = answer.logprobs[:-1] if answer.ends_with_token else answer.logprobs
        return {
            "index": answer.index,
            "message": message,
            "logprobs": chat_logprobs(positions, self._tokenizer) if self._wants_logprobs else None,
            "finish_reason": self._finish_reason(answer),
            "stop_reason": answer.stop_reason,
        }

    def write(self, chunks: list[Chunk]) -> bytes:
        written: list[bytes] = []
        for each in chunks:
            answer = each.answer
            if not self._is_begun[answer.index]:
                self._is_begun[answer.index] = True
                written.append(self._event(self._choice(answer, {"role": "assistant", "content": ""})))
            if self._wants_logprobs or self._parsers[answer.index] is not None:
                self._write_parsed(written, each)
            elif each.text:
                before, after = self._templates[answer.index]
                written += (before, encode(each.text), after)
            if each.is_end:
                self._write_end(written, answer)
        return b"".join(written)

    def _write_parsed(self, written: list[bytes], chunk: Chunk) -> None:
        logprobs = self._new_logprobs(chunk)
        events = self._parse(chunk)
        if not events and logprobs and logprobs["content"]:
            tracker = self._trackers[chunk.answer.index]  # tokens whose text is held back
            is_within = tracker is not None and tracker.state == "within"
            events = [ReasoningDelta("") if is_within else ContentDelta("")]
        for event in events:
            written.append(self._event(self._choice(chunk.answer, _delta_of(event), logprobs)))
            logprobs = None


def _delta_of(event: Event) -> dict[str, Any]:
    match event:
        case ContentDelta():
            return {"content": event.text}
        case ReasoningDelta():
            return {"reasoning_content": event.text}
        case ToolCallStart():
            function = {"name": event.name, "arguments": ""}
            return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
        case ArgumentsDelta():
            return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
