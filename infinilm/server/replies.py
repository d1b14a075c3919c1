"""How replies are sent: whole, or as server-sent events while the answers come."""

import asyncio
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from infinilm.server.api_errors import ApiError
from infinilm.server.calls import Call, News
from infinilm.server.connection import CUT
from infinilm.server.events import encode
from infinilm.server.protocol import SamplingFields
from infinilm.server.service import Service

DONE = b"data: [DONE]\n\n"


class Reply(Protocol):
    """Makes what is sent of what comes, at once or in pieces."""

    def keep(self, news: list[News]) -> None:
        """Take in what has come, for `whole`."""
        ...

    def whole(self) -> dict[str, Any]:
        """All of it."""
        ...

    def write(self, news: list[News]) -> bytes:
        """The events for what has come; may be none."""
        ...

    def end(self) -> bytes:
        """The last events, once all answers are done."""
        ...


async def respond(service: Service, body: SamplingFields, request: Request, call: Call, reply: Reply) -> Response:
    """Run a call and send its reply, as the request wants it."""
    limits = service.limits
    await call.begin(request.receive, timeout=body.timeout, max_timeout=limits.request_timeout)
    if body.stream:
        return EventStream(call, reply, limits.write_timeout)
    try:
        while not call.is_over:
            reply.keep(await call.read())
        content = encode(reply.whole())
    finally:
        call.close()
    return Response(content, media_type="application/json")


class EventStream(Response):
    """A reply that is sent in pieces: one write for all that has come, however much that is.

    A reader who is slow gets larger pieces; what waits for him is a few numbers per token. One who takes nothing for
    `write_timeout` seconds is cut off.
    """

    def __init__(self, call: Call, reply: Reply, write_timeout: float) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._call = call
        self._reply = reply
        self._write_timeout = write_timeout
        self._num_writes = 0
        self._is_writing = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 (the call receives)
        """Send the reply."""
        call, reply = self._call, self._reply
        watch = asyncio.create_task(self._watch_reader(scope))
        try:
            await self._write(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            send = scope["direct_send"]
            while not call.is_over:
                if body := reply.write(await call.read()):
                    await self._write(send, {"type": "http.response.body", "body": body, "more_body": True})
            last = reply.end() + DONE
        except ApiError as error:
            last = b"data: " + error.encode() + b"\n\n"
        finally:
            call.close()
            watch.cancel()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _write(self, send: Send, message: Message) -> None:
        self._is_writing = True
        await send(message)
        self._is_writing = False
        self._num_writes += 1

    async def _watch_reader(self, scope: Scope) -> None:
        """Cut the connection if the same write is not done between two looks."""
        num_before = -1
        while not (self._is_writing and self._num_writes == num_before):
            num_before = self._num_writes
            await asyncio.sleep(self._write_timeout)
        scope["extensions"][CUT]()
