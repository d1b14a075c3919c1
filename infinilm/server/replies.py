"""How replies are formatted and sent: as one JSON body, or as server-sent events while the answers grow."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from infinilm.outputs import TokenLogprobs
from infinilm.server.api_errors import ApiError
from infinilm.server.protocol import SamplingFields
from infinilm.server.response_stream import Chunk, ResponseStream
from infinilm.server.service import Service
from infinilm.text.answer import Answer
from infinilm.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0
"""In place of minus infinity, which JSON does not have."""

encode = msgspec.json.Encoder().encode


class Reply(ABC):
    """Formats engine output as one JSON body or as SSE chunks."""

    content_key: str
    """The key of a choice's content in an event."""
    no_content: Any
    """The content of a choice's last event."""

    def __init__(
        self, service: Service, body: SamplingFields, stream: ResponseStream, *, prefix: str, kind: str, text_key: str
    ) -> None:
        """`text_key` precedes the text in an event with text only, such as `"text":`."""
        self._tokenizer = service.tokenizer
        self._stream = stream
        self._base = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": service.model_name,
            "system_fingerprint": service.ready.system_fingerprint,
        }
        self._has_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._templates = [self._template(text_key, answer.index) for answer in stream.answers]
        """For each answer: the bytes before and after the text in an event with text only."""
        self._is_begun = [False] * len(stream.answers)
        self._num_open = len(stream.answers)
        self._last: Answer | None = None
        """The answer that ended last."""

    @abstractmethod
    def keep(self, chunks: list[Chunk]) -> None:
        """Keep the parts of chunks that `whole` needs."""

    @abstractmethod
    def write(self, chunks: list[Chunk]) -> bytes:
        """The events for chunks; there may be none."""

    @abstractmethod
    def _whole_choice(self, answer: Answer) -> dict[str, Any]: ...

    @abstractmethod
    def _finish_reason(self, answer: Answer) -> str | None: ...

    def _usage(self) -> dict[str, Any]:
        return self._stream.usage()

    def whole(self) -> dict[str, Any]:
        """The body, once all answers have ended."""
        choices = [self._whole_choice(answer) for answer in self._stream.answers]
        return {**self._base, "choices": choices, "usage": self._usage(), "timings": self._stream.timings()}

    def end(self) -> bytes:
        """The last events: the end of the last answer, with the timings; then the usage, if it was asked for."""
        assert self._last is not None
        timings = self._stream.timings()
        last = self._event(self._choice(self._last, self.no_content, is_end=True), timings)
        if not self._has_usage:
            return last + DONE
        usage = {**self._base, "choices": [], "usage": self._usage(), "timings": timings}
        return last + b"data: " + encode(usage) + b"\n\n" + DONE

    def fail(self, error: ApiError) -> bytes:
        """The last event of a request that has failed."""
        return b"data: " + error.encode() + b"\n\n"

    def _write_end(self, written: list[bytes], answer: Answer) -> None:
        """Write the end of an answer. The end of the last answer is left to `end`, which adds the timings."""
        self._num_open -= 1
        if self._num_open:
            written.append(self._event(self._choice(answer, self.no_content, is_end=True)))
        else:
            self._last = answer

    def _event(self, choice: dict[str, Any], timings: dict[str, Any] | None = None) -> bytes:
        event = {**self._base, "choices": [choice]}
        if self._has_usage:
            event["usage"] = None
        if timings is not None:
            event["timings"] = timings
        return b"data: " + encode(event) + b"\n\n"

    def _template(self, text_key: str, index: int) -> tuple[bytes, bytes]:
        head = encode(self._base)[:-1] + b',"choices":[{"index":%d,%s' % (index, text_key.encode())
        usage = b',"usage":null' if self._has_usage else b""
        closing = b"}" * text_key.count("{")
        return b"data: " + head, closing + b',"logprobs":null,"finish_reason":null}]' + usage + b"}\n\n"

    def _choice(
        self, answer: Answer, content: Any, logprobs: dict[str, Any] | None = None, *, is_end: bool = False
    ) -> dict[str, Any]:
        choice = {"index": answer.index, self.content_key: content, "logprobs": logprobs, "finish_reason": None}
        if is_end:
            choice |= {"finish_reason": self._finish_reason(answer), "stop_reason": answer.stop_reason}
        return choice


async def respond(
    service: Service, body: SamplingFields, request: Request, stream: ResponseStream, reply: Reply
) -> Response:
    """Run a request and send its reply, whole or as events."""
    await stream.begin(request.receive, timeout=body.timeout, max_timeout=service.limits.request_timeout)
    if body.stream:
        return EventStream(stream, reply)
    try:
        while not stream.is_over:
            reply.keep(await stream.read_chunks())
        content = encode(reply.whole())
    finally:
        stream.close()
    return Response(content, media_type="application/json", headers=stream.headers())


class EventStream(Response):
    """A reply in events. One write sends all new output.

    A slow reader gets larger pieces; only a few numbers per token are held for it. The connection is closed when the
    reader takes nothing for `write_timeout` seconds.
    """

    def __init__(self, stream: ResponseStream, reply: Reply) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache", **stream.headers()})
        del self.headers["content-length"]
        self._stream = stream
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 (the stream receives)
        stream, reply = self._stream, self._reply
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            send = scope["direct_send"]
            while not stream.is_over:
                if body := reply.write(await stream.read_chunks()):
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            last = reply.end()
        except ApiError as error:
            last = reply.fail(error)
        finally:
            stream.close()
        await send({"type": "http.response.body", "body": last, "more_body": False})


# --- log-probabilities, in the two forms of OpenAI's API ----------------------------------------------------


def chat_logprobs(positions: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    """The form of chat completions."""

    def describe(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.token(token_id),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    content = [
        {**describe(each.token_id, each.logprob), "top_logprobs": [describe(*pair) for pair in each.top.items()]}
        for each in positions
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """The form of completions: parallel lists. A token's offset in the text continues from the tokens before it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def describe_next(self, positions: Sequence[TokenLogprobs | None], token_ids: Sequence[int]) -> dict[str, Any]:
        """The lists for the next tokens. The first token of a prompt has no log-probability."""
        tokens: list[str] = []
        offsets: list[int] = []
        for token_id in token_ids:
            tokens.append(self._tokenizer.token(token_id))
            offsets.append(self._offset)
            self._offset += len(tokens[-1])
        return {
            "tokens": tokens,
            "token_logprobs": [None if each is None else max(each.logprob, LOWEST_LOGPROB) for each in positions],
            "top_logprobs": [None if each is None else self._by_text(each) for each in positions],
            "text_offset": offsets,
        }

    def _by_text(self, position: TokenLogprobs) -> dict[str, float]:
        """The most likely tokens, best first, and the actual one. If two have the same text, the better one is kept."""
        found: dict[str, float] = {}
        for token_id, logprob in (*position.top.items(), (position.token_id, position.logprob)):
            found.setdefault(self._tokenizer.token(token_id), max(logprob, LOWEST_LOGPROB))
        return found


def join_lists(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {name: [item for part in parts for item in part[name]] for name in parts[0]}
