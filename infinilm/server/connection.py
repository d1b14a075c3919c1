"""uvicorn's connection, with limits on size, number and time, and a close that lets the client read the response."""

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from infinilm.server.api_errors import ApiError, bad_request, body_too_large, unavailable
from infinilm.server.logs import choose_request_id
from infinilm.server.metrics import Metrics
from infinilm.server.settings import Limits

CUT = "infinilm.cut"
"""A function in `scope["extensions"]` that drops the connection at once, with all unsent data."""
LIVE_PATH = b"/health/live"
MAX_PIPELINED = 16
"""Requests that may wait on a connection for the response to an earlier one."""
CHUNK_OVERHEAD_BYTES = 16
"""Allowed for the framing of one chunk: its size in hexadecimal, two line ends, and a few bytes more."""
MAX_LINGER_BYTES = 64 << 20
"""How much of a refused request is read and discarded, so that the client gets to read the response."""
NUM_RESERVED = 32
"""Connections that are accepted when `max_connections` are busy. On these, only `/health/live` is answered."""


class RefusedError(Exception):
    """Ends the parsing of a request."""


class Phase(Enum):
    """What the client is expected to send."""

    IDLE = 0
    HEADERS = 1
    BODY = 2
    DISCARDED = 3
    """The connection ends: received data is discarded."""


class LimitedConnection(HttpToolsProtocol):
    """Refuses requests that are too large, too slow or too many.

    All bytes are bounded: the headers and the body by their limits; trailers, chunk sizes and chunk extensions together
    by `max_header_bytes`, give or take one read from the socket. Time is bounded too: `read_timeout` for the headers,
    and again for the whole body.
    """

    def __init__(self, *args: Any, limits: Limits, metrics: Metrics, pool: "ConnectionPool", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._metrics = metrics
        self._pool = pool
        self._phase = Phase.IDLE
        self._num_overhead_bytes = 0
        """Bytes of the current message that are not body."""
        self._num_body_bytes = 0
        self._num_held_bytes = 0
        """Bytes of the bodies of all requests that are not answered."""
        self._num_discarded_bytes = 0
        self._cycles: list[RequestResponseCycle] = []
        """Requests whose headers are complete and whose response may not be, oldest first."""
        self._read_timer = Timer(self.loop, self._read_timed_out)
        self._write_timer = Timer(self.loop, self._check_progress)
        self._num_unsent_bytes = 0
        self._refusal: ApiError | None = None

    # --- the transport --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(LingeringTransport(transport, self._close))  # type: ignore[arg-type]
        self._read_timer.start(self._limits.read_timeout)
        self._pool.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._read_timer.stop()
        self._write_timer.stop()
        self._pool.remove(self)
        self._release()
        for cycle in self._open_cycles():
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._phase is Phase.DISCARDED:
            self._num_discarded_bytes += len(data)
            if self._num_discarded_bytes > MAX_LINGER_BYTES:
                self.transport.abort()
            return
        self._unset_keepalive_if_required()
        if not self._read_timer.is_running:
            self._read_timer.start(self._limits.read_timeout)
        self._num_overhead_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._refuse(self._refusal or bad_request("the request is not valid HTTP/1.1", code="invalid_http"))
            return
        self._num_overhead_bytes = max(0, self._num_overhead_bytes)
        if self._num_overhead_bytes > self._limits.max_header_bytes:
            self._refuse(self._headers_too_large())

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_progress()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._write_timer.stop()

    def shutdown(self) -> None:
        if self._phase is Phase.IDLE or self._open_cycles():
            super().shutdown()
        else:
            self.transport.abort()

    def _close(self, transport: asyncio.Transport) -> None:
        """Close the connection after the written data is sent.

        If the client is still sending, closing the socket would reset the connection, and the client could lose the
        response. So only our side is closed, and received data is discarded, up to a limit.
        """
        self._watch_progress()
        if self._phase is Phase.IDLE and not self.pipeline:
            self._read_timer.stop()
            transport.close()
            return
        self._phase = Phase.DISCARDED
        self._read_timer.start(self._limits.read_timeout)
        self.flow.resume_reading()
        transport.write_eof()

    def _watch_progress(self) -> None:
        self._num_unsent_bytes = self.transport.get_write_buffer_size()
        self._write_timer.start(self._limits.write_timeout)

    def _check_progress(self) -> None:
        """Drop the connection if the client has read nothing for `write_timeout` seconds."""
        num_unsent_bytes = self.transport.get_write_buffer_size()
        if 0 < num_unsent_bytes < self._num_unsent_bytes:
            self._watch_progress()
        elif num_unsent_bytes:
            self.transport.abort()

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # Upgrades are not supported, and this parser skips the body. So parse again without the upgrade headers.
            method, version = self.parser.get_method(), self.parser.get_http_version().encode()
            if method == b"CONNECT":
                raise httptools.HttpParserInvalidMethodError from None
            names = (b"upgrade", b"connection")
            kept = [*((name, value) for name, value in self.headers if name not in names), (b"connection", b"close")]
            lines = [b"%s %s HTTP/%s" % (method, self.url, version), *(b"%s: %s" % pair for pair in kept)]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.feed_data(b"\r\n".join(lines) + b"\r\n\r\n" + data[upgrade.args[0] :])

    # --- the parser -----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if len(self.pipeline) >= MAX_PIPELINED:
            raise RefusedError
        self._phase = Phase.HEADERS
        self._num_body_bytes = 0
        self._read_timer.start(self._limits.read_timeout)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. Trailers are dropped."""
        if self._phase is Phase.BODY:
            return
        if len(self.headers) >= self._limits.max_headers:
            self._stop_parsing(ApiError(431, f"there are more than {self._limits.max_headers} headers (max_headers)"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request, while its body may still be received."""
        if self.parser.should_upgrade():  # the request is parsed again
            return
        num_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if num_bytes > self._limits.max_header_bytes:
            self._stop_parsing(self._headers_too_large())
        is_regular = self._pool.note_request(self)
        if not is_regular and self.url.partition(b"?")[0] != LIVE_PATH:
            self._stop_parsing(unavailable("too many connections are open", code="too_many_connections"))
        self._num_overhead_bytes = 0
        self._read_timer.start(self._limits.read_timeout)
        self.scope["extensions"] = {CUT: self.transport.abort}  # type: ignore[dict-item]
        super().on_headers_complete()
        self._phase = Phase.BODY
        self._cycles = [*self._open_cycles(), self.cycle]
        if not is_regular:
            self.cycle.keep_alive = False
        if self.scope["http_version"] == "1.0":
            self.cycle.send = unframed_send(self.cycle)  # type: ignore[assignment, method-assign]

    def on_body(self, body: bytes) -> None:
        self._num_overhead_bytes -= len(body) + CHUNK_OVERHEAD_BYTES
        self._num_body_bytes += len(body)
        if self._num_body_bytes > self._limits.max_body_bytes:
            self._stop_parsing(body_too_large(self._limits.max_body_bytes))
        if not self.cycle.response_complete:
            self._hold(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._phase = Phase.IDLE
        self._num_overhead_bytes = 0
        self._read_timer.stop()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the next request, unless it could not be parsed."""
        super().on_response_complete()
        if self._open_cycles():
            return
        self._release()
        if self.transport.is_closing():
            return
        if self._phase is Phase.DISCARDED:
            self.transport.close()
        else:
            self._pool.note_idle(self)

    def _hold(self, num_bytes: int) -> None:
        """Count bytes of a body, which are held until the response is complete.

        The limit does not apply to a connection that alone holds bytes.
        """
        self._num_held_bytes += num_bytes
        self._pool.num_body_bytes += num_bytes
        if self._num_held_bytes < self._pool.num_body_bytes > self._limits.max_total_body_bytes:
            self._stop_parsing(
                unavailable(
                    f"the bodies of all requests are larger than {self._limits.max_total_body_bytes} bytes "
                    "(max_total_body_bytes)",
                    code="too_many_bodies",
                )
            )

    def _release(self) -> None:
        self._pool.num_body_bytes -= self._num_held_bytes
        self._num_held_bytes = 0

    # --- refusals -------------------------------------------------------------------------------------------

    def _stop_parsing(self, refusal: ApiError) -> None:
        """Raise through the parser: there is no other way to stop it."""
        self._refusal = refusal
        raise RefusedError

    def _headers_too_large(self) -> ApiError:
        return ApiError(
            431, f"the headers or trailers are larger than {self._limits.max_header_bytes} bytes (max_header_bytes)"
        )

    def _read_timed_out(self) -> None:
        if self.flow.read_paused or (self._phase is Phase.IDLE and self._open_cycles()):  # the client is not late
            self._read_timer.start(self._limits.read_timeout)
        elif self._phase is Phase.BODY:
            timeout = self._limits.read_timeout
            self._refuse(ApiError(408, f"the body was not received within {timeout:g} s (read_timeout)"))
        else:
            self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        """Read no more requests. Answer the current one, unless the responses to earlier ones are still being sent."""
        current = self.cycle if self._phase is Phase.BODY else None
        unanswered = self._open_cycles()
        self._phase = Phase.DISCARDED
        self._read_timer.stop()
        self._release()
        if current is None and not unanswered:
            self._answer(error)
        elif current is not None and unanswered[:1] == [current] and not current.response_started:
            current.disconnected = True
            current.message_event.set()
            self._answer(error)
        elif current in unanswered[1:]:  # it is not started; the connection closes after the earlier responses
            self.pipeline.popleft()
            self._cycles.remove(current)
        elif not unanswered:
            self.transport.close()

    def _open_cycles(self) -> list[RequestResponseCycle]:
        return [cycle for cycle in self._cycles if not cycle.response_complete]

    def _answer(self, error: ApiError) -> None:
        body = error.encode()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            "x-request-id": choose_request_id(None),
            **error.headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._metrics.responses.labels("other", error.status).inc()
        self.transport.write(STATUS_LINE[error.status] + head.encode() + b"\r\n" + body)
        self.transport.close()


class ConnectionPool:
    """All connections. When there are too many, the oldest without a request in progress is closed."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self.num_body_bytes = 0
        """Bytes of the bodies that are being received, or whose request is in progress."""
        self._idle: dict[LimitedConnection, None] = {}
        self._reserved: dict[LimitedConnection, None] = {}
        """Connections beyond `max_connections`."""

    def add(self, connection: LimitedConnection) -> None:
        """Add a connection. If all others are busy, it is reserved; the oldest reserved one may be closed."""
        if len(connection.connections) <= self.max_connections or self._drop_oldest(self._idle):
            self._idle[connection] = None
            return
        self._reserved[connection] = None
        if len(self._reserved) > NUM_RESERVED:
            self._drop_oldest(self._reserved)

    def note_request(self, connection: LimitedConnection) -> bool:
        """Mark a connection as busy. Returns False if it is a reserved one and no idle one can be closed for it."""
        self._idle.pop(connection, None)
        is_reserved = connection in self._reserved
        if is_reserved and (len(connection.connections) <= self.max_connections or self._drop_oldest(self._idle)):
            del self._reserved[connection]
            return True
        return not is_reserved

    def note_idle(self, connection: LimitedConnection) -> None:
        self._idle[connection] = None

    def remove(self, connection: LimitedConnection) -> None:
        self._idle.pop(connection, None)
        self._reserved.pop(connection, None)

    def _drop_oldest(self, among: dict[LimitedConnection, None]) -> bool:
        for connection in among:
            del among[connection]
            connection.transport.abort()
            return True
        return False


class LingeringTransport:
    """Replaces a transport's `close`, which uvicorn calls in several places."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[asyncio.Transport], None]) -> None:
        self._transport = transport
        self._close = close
        self._is_closing = False

    def write(self, data: bytes) -> None:
        if not self._is_closing:
            self._transport.write(data)

    def close(self) -> None:
        if not self.is_closing():
            self._is_closing = True
            self._close(self._transport)

    def is_closing(self) -> bool:
        return self._is_closing or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Timer:
    """Calls a function once, unless it is stopped or started again before."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self._handle is not None

    def start(self, seconds: float) -> None:
        """Schedule the call, in place of an earlier one."""
        self.stop()
        self._handle = self._loop.call_later(seconds, self._fire)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        self._callback()


def unframed_send(cycle: RequestResponseCycle) -> Callable[[Any], Awaitable[None]]:
    """The `send` for HTTP/1.0 clients, which can't read chunks: closing the connection ends a body without a length."""
    has_length = False

    async def send(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            if not has_length:
                cycle.chunked_encoding = False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await RequestResponseCycle.send(cycle, message)

    return send
