"""Parts of a client's connection: closing, timers, and responses for HTTP/1.0."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class LingeringTransport:
    """A transport with another `close`: uvicorn closes connections in several places."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[asyncio.Transport], None]) -> None:
        self._transport = transport
        self._close = close
        self._is_closing = False

    def write(self, data: bytes) -> None:
        """Write, unless `close` was called."""
        if not self._is_closing:
            self._transport.write(data)

    def close(self) -> None:
        """Close, on the first call."""
        if not self.is_closing():
            self._is_closing = True
            self._close(self._transport)

    def is_closing(self) -> bool:
        """Whether `close` was called, or the connection is lost."""
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
        """Whether the call is scheduled."""
        return self._handle is not None

    def start(self, seconds: float) -> None:
        """Schedule the call, in place of an earlier one."""
        self.stop()
        self._handle = self._loop.call_later(seconds, self._fire)

    def stop(self) -> None:
        """Cancel the call."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        self._callback()


def unframed_send(cycle: RequestResponseCycle) -> Callable[[Any], Awaitable[None]]:
    """The `send` for an HTTP/1.0 client, which reads no chunks: a body without a length ends with the connection."""
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
