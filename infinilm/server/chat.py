"""`POST /v1/chat/completions`."""

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from infinilm.server.answers import Answer
from infinilm.server.api_errors import bad_request
from infinilm.server.calls import Call, News
from infinilm.server.chat_prompt import ToolPlan, encode_chat
from infinilm.server.events import EventMaker, encode
from infinilm.server.logprobs import chat_logprobs
from infinilm.server.protocol import ChatRequest
from infinilm.server.replies import respond
from infinilm.server.sampling import check_limits, check_size, make_params
from infinilm.server.service import Service, make_id
from infinilm.server.structure import find_structure
from infinilm.server.tools import ArgumentsDelta, ContentDelta, Event, ToolCallStart, add_up


async def chat(service: Service, body: ChatRequest, request: Request) -> Response:
    """Answer a request."""
    _check(service, body)
    plan = ToolPlan(service, body)
    token_ids = await encode_chat(service, body.messages, plan, body.chat_template_kwargs)
    room = service.max_model_len - len(token_ids)
    params = make_params(
        body,
        min(_asked_tokens(body) or room, room),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structured=find_structure(body, plan.grammar),
    )
    call = service.open_call(request, body, [token_ids], [params], kept_ids=plan.kept_ids)
    reply = ChatReply(service, body, call, plan)
    return await respond(service, body, request, call, reply)


def _check(service: Service, body: ChatRequest) -> None:
    service.check_model(body.model)
    service.admission.check_open()
    check_limits(body, service.limits)
    check_size("top_logprobs", body.top_logprobs or 0, "max_logprobs", service.limits)
    check_size("tools", len(body.tools or ()), "max_tools", service.limits)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    if body.max_tokens == 0:
        raise bad_request("max_tokens=0 leaves nothing to answer; use 1 or more", "max_tokens")
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise bad_request("max_tokens and max_completion_tokens disagree; give one of them", "max_completion_tokens")


def _asked_tokens(body: ChatRequest) -> int | None:
    return body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens


class ChatReply:
    """Makes the reply, whole or as events."""

    def __init__(self, service: Service, body: ChatRequest, call: Call, plan: ToolPlan) -> None:
        self._tokenizer = service.tokenizer
        self._call = call
        self._wants_logprobs = bool(body.logprobs)
        self._parsers = [plan.parser() for _ in call.answers]
        self._found: list[list[Event]] = [[] for _ in call.answers]
        self._base = {
            "id": make_id("chatcmpl"),
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": service.model_name,
        }
        has_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._events = EventMaker(self._base, call, has_usage=has_usage)
        self._templates = [self._events.template('"delta":{"content":', answer.index) for answer in call.answers]
        self._is_begun = [False] * len(call.answers)
        self._last: Answer | None = None

    def _parse(self, news: News) -> list[Event]:
        """What new text is: for the reader, or a call. After a call that had to be the only one, the answer ends."""
        parser = self._parsers[news.answer.index]
        if parser is None:
            return [ContentDelta(news.text)] if news.text else []
        was_done = parser.is_done
        if was_done:
            news.is_end = False  # it was before
            return []
        found = parser.feed(news.text) if news.text else []
        if parser.is_done:
            news.is_end = True
            news.answer.finish_reason = "stop"
            self._call.end_early(self._call.jobs[0], news.answer.index)
        if news.is_end:
            found += parser.finish()
        return found

    def _finish_reason(self, answer: Answer) -> str | None:
        parser = self._parsers[answer.index]
        has_calls = parser is not None and parser.num_calls > 0
        return "tool_calls" if has_calls and answer.finish_reason == "stop" else answer.finish_reason

    def _new_logprobs(self, news: News) -> dict[str, Any] | None:
        """Of the tokens that came, without the one that ended the answer: it is no part of the text."""
        if not self._wants_logprobs:
            return None
        positions = news.delta.logprobs or []
        is_cut = news.is_end and news.answer.ends_with_token
        return chat_logprobs(positions[:-1] if is_cut else positions, self._tokenizer)

    # --- whole ------------------------------------------------------------------------------------------

    def keep(self, news: list[News]) -> None:
        """Take in news."""
        for each in news:
            self._found[each.answer.index] += self._parse(each)

    def whole(self) -> dict[str, Any]:
        """The reply."""
        choices = [self._whole_choice(answer) for answer in self._call.answers]
        usage = self._call.usage()
        return {**self._base, "choices": choices, "usage": usage, "timings": self._call.timings()}

    def _whole_choice(self, answer: Answer) -> dict[str, Any]:
        parsed = add_up(self._found[answer.index])
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if parsed.calls:
            message["content"] = parsed.content or None
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

    # --- as events --------------------------------------------------------------------------------------

    def write(self, news: list[News]) -> bytes:
        """The events for what has come."""
        written: list[bytes] = []
        for each in news:
            answer = each.answer
            if not self._is_begun[answer.index]:
                self._is_begun[answer.index] = True
                written.append(self._events.make(self._choice(answer, {"role": "assistant", "content": ""})))
            if self._wants_logprobs or self._parsers[answer.index] is not None:
                self._write_parsed(written, each)
            elif each.text:
                before, after = self._templates[answer.index]
                written += (before, encode(each.text), after)
            if each.is_end:
                if self._events.count_done():
                    self._last = answer
                else:
                    written.append(self._events.make(self._choice(answer, {}, is_end=True)))
        return b"".join(written)

    def _write_parsed(self, written: list[bytes], news: News) -> None:
        logprobs = self._new_logprobs(news)
        events = self._parse(news)
        if not events and logprobs and logprobs["content"]:
            events = [ContentDelta("")]  # tokens whose text is held back
        for event in events:
            written.append(self._events.make(self._choice(news.answer, _delta_of(event), logprobs)))
            logprobs = None

    def end(self) -> bytes:
        """The end of the answer that was done last."""
        assert self._last is not None
        return self._events.end(self._choice(self._last, {}, is_end=True))

    def _choice(
        self, answer: Answer, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, *, is_end: bool = False
    ) -> dict[str, Any]:
        choice = {"index": answer.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        if is_end:
            choice |= {"finish_reason": self._finish_reason(answer), "stop_reason": answer.stop_reason}
        return choice


def _delta_of(event: Event) -> dict[str, Any]:
    match event:
        case ContentDelta():
            return {"content": event.text}
        case ToolCallStart():
            function = {"name": event.name, "arguments": ""}
            return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
        case ArgumentsDelta():
            return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
