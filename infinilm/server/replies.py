"""How replies are sent: whole, or as server-sent events while the answers come."""

from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from infinilm.server.api_errors import ApiError
from infinilm.server.calls import Call, News
from infinilm.server.events import encode
from infinilm.server.protocol import SamplingFields
from infinilm.server.service import Service

DONE = b"data: [DONE]\n\n"


class Reply(Protocol):
    """Formats engine output as one JSON body or as SSE chunks."""

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
        return EventStream(call, reply)
    try:
        while not call.is_over:
            reply.keep(await call.read())
        content = encode(reply.whole())
    finally:
        call.close()
    return Response(content, media_type="application/json")


class EventStream(Response):
    """A reply that is sent in pieces: one write for all that has come, however much that is.

    A slow reader gets larger pieces; a few numbers per token wait for it meanwhile. The connection cuts off a reader
    that takes nothing for `write_timeout` seconds.
    """

    def __init__(self, call: Call, reply: Reply) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._call = call
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 (the call receives)
        """Send the reply."""
        call, reply = self._call, self._reply
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            send = scope["direct_send"]
            while not call.is_over:
                if body := reply.write(await call.read()):
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            last = reply.end() + DONE
        except ApiError as error:
            last = b"data: " + error.encode() + b"\n\n"
        finally:
            call.close()
        await send({"type": "http.response.body", "body": last, "more_body": False})
