"""Answers rows through the service, enough at a time to keep the engine full. Answers are lines of the output."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from pydantic import ValidationError
from xxhash import xxh3_64_intdigest

from infinilm.batch.rows import RESPONSES, BadRowError, Call, Row, find_id, line_id, parse
from infinilm.errors import InvalidTypeError, InvalidValueError
from infinilm.server.api_errors import describe
from infinilm.server.direct import DirectReply
from infinilm.server.messages import Ready
from infinilm.server.protocol import SamplingFields


@dataclass(frozen=True, slots=True)
class RowOptions:
    """Settings for turning rows into requests."""

    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the request for rows that do not set them."""
    as_chat: bool = False
    is_text: bool = False
    """Whether rows are lines of plain text."""
    seed: int | None = None
    """A row without a seed gets one made from this and its index, so that a resumed job draws the same tokens."""


def check_sampling(sampling: Any) -> None:
    """Refuse fields that no request can have."""
    if not isinstance(sampling, Mapping):
        raise InvalidTypeError(f"sampling={sampling!r} must be a dict of fields, as in {{'temperature': 0}}")
    try:
        fields = SamplingFields.model_validate(dict(sampling))
    except ValidationError as error:
        raise InvalidValueError(f"sampling: {describe(error.errors())}") from None
    if fields.stream or fields.stream_options:
        raise InvalidValueError("sampling: stream is not for batches; leave it out")


@dataclass(frozen=True, slots=True)
class Answer:
    row: int
    line: bytes
    """The line of the output, without its newline."""
    num_tokens: int
    error: str | None
    """The message without the line number; `line` has both."""
    body: bytes | None
    """The service's reply, if the row was a request."""


class Poster(Protocol):
    """Answers requests: a `DirectService`."""

    async def wait_ready(self) -> None: ...

    async def post(self, path: str, body: bytes, /) -> DirectReply: ...


class Turns:
    """Decides which rows the engine may compute, in order to find a row that kills it.

    When the engine dies, the rows that it was computing are suspects. They are tried again before any other row, a
    quarter of them at a time, and fewer after each further death. A row that kills the engine alone is given up.
    """

    def __init__(self) -> None:
        self._num_open = 0
        self._suspects: set[int] = set()
        self._limit = 0
        """How many suspects may be computed together."""
        self._has_died = False
        """Whether the engine has died and the tries of some rows have not ended yet."""
        self._changed = asyncio.Condition()

    async def enter(self, row: int) -> bool:
        """Wait for a row's turn. Returns whether it is computed alone."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._may_enter(row))
            self._num_open += 1
            return self._limit == 1

    def _may_enter(self, row: int) -> bool:
        if not self._suspects:
            return True
        return not self._has_died and row in self._suspects and self._num_open < self._limit

    async def leave(self, row: int, *, is_suspect: bool) -> None:
        """Note the end of a try."""
        async with self._changed:
            self._num_open -= 1
            if is_suspect:
                self._suspects.add(row)
                self._has_died = True
            else:
                self._suspects.discard(row)
            if not self._suspects:
                self._limit, self._has_died = 0, False
            elif self._has_died and not self._num_open:
                self._limit, self._has_died = max(1, (self._limit or len(self._suspects)) // 4), False
            self._changed.notify_all()


class RowAnswerer:
    """Turns rows into answers. Any number of coroutines may use it at a time."""

    def __init__(self, service: Poster, options: RowOptions) -> None:
        self._service = service
        self._options = options
        self._turns = Turns()

    async def answer(self, row: Row, duplicates: Mapping[int, int]) -> Answer:
        """The answer to a row. An error is an answer too. Raises only if the engine can't be started again."""
        try:
            if (first := duplicates.get(row.index)) is not None:
                raise BadRowError(f"the custom_id is that of line {first}; give each its own", "duplicate_custom_id")
            call = parse(row, is_text=self._options.is_text, as_chat=self._options.as_chat)
        except BadRowError as bad:
            custom_id = line_id(row.line) if self._options.is_text else find_id(row)
            return _answer_of(row, custom_id, None, {"code": bad.code, "message": str(bad)})
        reply = await self._post(row.index, call.url, self._make_body(row, call))
        error = None if reply.status == 200 else json.loads(reply.content)["error"]
        return _answer_of(row, call.custom_id, reply, error)

    def _make_body(self, row: Row, call: Call) -> bytes:
        usual = dict(self._options.sampling)
        if call.url == RESPONSES and "max_tokens" in usual:
            usual["max_output_tokens"] = usual.pop("max_tokens")
        body = {**usual, **call.body}
        if self._options.seed is not None and body.get("seed") is None:
            body["seed"] = xxh3_64_intdigest(f"{self._options.seed}/{row.index}".encode()) >> 1
        return json.dumps(body).encode()

    async def _post(self, row: int, url: str, body: bytes) -> DirectReply:
        while True:
            is_alone = await self._turns.enter(row)
            is_suspect = False
            try:
                await self._service.wait_ready()
                reply = await self._service.post(url, body)
                has_died = reply.status == 500 and b'"engine_died"' in reply.content
                is_suspect = reply.status == 503 or (has_died and not is_alone)
            finally:
                await self._turns.leave(row, is_suspect=is_suspect)
            if not is_suspect:
                return reply


def _answer_of(row: Row, custom_id: str, reply: DirectReply | None, error: Mapping[str, Any] | None) -> Answer:
    """The line of the output. Only a row that is a request has a response."""
    response, num_tokens = b"null", 0
    if reply is not None:
        response = b'{"status_code":%d,"request_id":%s,"body":%s}' % (
            reply.status,
            msgspec.json.encode(reply.request_id),
            reply.content,
        )
        usage = msgspec.json.decode(reply.content, type=_Counted).usage
        num_tokens = usage.completion_tokens + usage.output_tokens
    message = None
    if error is not None:
        message = str(error["message"])
        error = {"code": error.get("code") or "invalid_request", "message": f"line {row.line}: {message}"}
    line = b'{"id":"batch_req_%d","custom_id":%s,"response":%s,"error":%s}' % (
        row.index,
        json.dumps(custom_id).encode(),  # lone surrogates can only be written as escapes
        response,
        json.dumps(error, separators=(",", ":")).encode(),
    )
    return Answer(row.index, line, num_tokens, message, reply.content if reply is not None else None)


class _Usage(msgspec.Struct):
    """The number of output tokens, by the name that each kind of reply has for it."""

    completion_tokens: int = 0
    output_tokens: int = 0


class _Counted(msgspec.Struct):
    usage: _Usage = msgspec.field(default_factory=_Usage)


def num_rows_at_work(ready: Ready) -> int:
    """The number of rows that keeps an engine full: a step's, and some whose prompts are prepared meanwhile."""
    return ready.max_num_seqs + ready.max_num_seqs // 4 + 4


async def answer_all(
    answerer: RowAnswerer,
    rows: Iterable[Row],
    num_at_work: int,
    on_answer: Callable[[Answer], None],
    duplicates: Mapping[int, int] | None = None,
) -> None:
    """Answer rows, and read the next one only when one is done. `on_answer` gets each answer when it is ready.

    `duplicates` is that of a `Scan`.
    """
    rest = iter(rows)

    async def work() -> None:
        for row in rest:
            on_answer(await answerer.answer(row, duplicates or {}))

    await run_together([work() for _ in range(num_at_work)])


async def run_together(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines until all have ended. If one raises, the others are cancelled and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
