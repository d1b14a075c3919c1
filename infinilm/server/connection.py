"""A client's connection: uvicorn's, with limits on headers, time and number, and a way to cut it."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from infinilm.server.api_errors import ApiError, bad_request, unavailable
from infinilm.server.settings import Limits

CUT = "infinilm.cut"
"""A function in `scope["extensions"]` that drops the connection at once, whatever waits to be sent."""


class RefusedError(Exception):
    """Ends the parsing of a request."""


class LimitedConnection(HttpToolsProtocol):
    """Refuses what is too large, too slow or too much before the application hears of it."""

    def __init__(self, *args: Any, limits: Limits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._num_header_bytes = 0
        self._is_in_headers = True
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client, or we, have closed the connection."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came."""
        if self._is_in_headers:
            self._num_header_bytes += len(data)
        super().data_received(data)
        if self._is_in_headers and self._num_header_bytes > self._limits.max_header_bytes:
            self._refusal = self._too_large()
            self.send_400_response("")

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._expect_headers()

    def on_headers_complete(self) -> None:
        """A request's headers are there; its body may follow."""
        self._stop_timer()
        self._is_in_headers = False
        self._num_header_bytes = 0
        num_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if num_bytes > self._limits.max_header_bytes:
            self._refusal = self._too_large()
        elif len(self.connections) > self._limits.max_connections:
            self._refusal = unavailable("too many connections are open", code="too_many_connections")
        if self._refusal is not None:
            raise RefusedError
        self.scope["extensions"] = {CUT: self.transport.abort}  # type: ignore[dict-item]
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what can't be passed on, and close."""
        if self.transport.is_closing():
            return
        error = self._refusal or bad_request(msg)
        body = error.encode()
        retry = "".join(f"{name}: {value}\r\n" for name, value in error.headers.items())
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n{retry}\r\n"
        self.transport.write(STATUS_LINE[error.status] + head.encode() + body)
        self.transport.close()

    def _too_large(self) -> ApiError:
        return ApiError(431, f"the headers are larger than {self._limits.max_header_bytes} bytes (max_header_bytes)")

    def _expect_headers(self) -> None:
        self._is_in_headers = True
        self._stop_timer()
        self._timer = self.loop.call_later(self._limits.read_timeout, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
