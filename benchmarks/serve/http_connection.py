"""A small HTTP/1.1 client for many streams, with little work per packet."""

import asyncio
import json
import ssl
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol
from urllib.parse import urlsplit

from infinilm.errors import InvalidValueError

BUFFER_BYTES = 1 << 18
MAX_HEAD_BYTES = 1 << 16


class Reader(Protocol):
    """Receives one reply."""

    def begin(self, status: int, content_type: str) -> None:
        """The reply's status and content type."""
        ...

    def feed(self, data: bytes, now: float) -> None:
        """Take a part of the body, received at the time `now` of `perf_counter`."""
        ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server's address and key."""

    host: str
    port: int
    is_secure: bool
    prefix: str
    """The path before `/v1`."""
    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, base_url: str, api_key: str | None = None) -> "Endpoint":
        """Parse an address such as `http://127.0.0.1:8000`, with or without `/v1` at its end."""
        try:
            url = urlsplit(base_url)
            port = url.port
        except ValueError:
            url, port = urlsplit(""), None
        if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment:
            raise InvalidValueError(f"base_url={base_url!r} is no address; use one such as http://127.0.0.1:8000")
        if api_key is not None and (not api_key.isascii() or not api_key.isprintable()):
            raise InvalidValueError("api_key has characters that no HTTP header can hold; use printable ASCII")
        is_secure = url.scheme == "https"
        prefix = url.path.rstrip("/").removesuffix("/v1")
        return cls(url.hostname, port or (443 if is_secure else 80), is_secure, prefix, api_key)

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.is_secure else 'http'}://{self.address}{self.prefix}"

    def request(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """The bytes of a request: a POST of `body` as JSON, or a GET if there is none."""
        content = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        lines = [
            f"{'GET' if body is None else 'POST'} {self.prefix}{path} HTTP/1.1",
            f"Host: {self.address}",
            "User-Agent: infinilm-bench",
            f"Content-Length: {len(content)}",
        ]
        if body is not None:
            lines.append("Content-Type: application/json")
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "", ""]).encode() + content


class Connection(asyncio.BufferedProtocol):
    """One connection, with one request at a time.

    All connections read into one buffer: each packet is processed before the next one is read.
    """

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self._transport: asyncio.Transport | None = None
        self._reader: Reader | None = None
        self._done: asyncio.Future[None] | None = None
        self._reset()

    def _reset(self) -> None:
        self._unread = b""
        self._has_head = False
        self._is_chunked = False
        self._num_left: int | None = None
        """Bytes of the body that are still missing. None: the body ends with the connection."""
        self._can_reuse = True

    @property
    def is_idle(self) -> bool:
        return self._transport is not None and self._done is None

    @property
    def has_reply(self) -> bool:
        """Whether any part of the last request's reply has arrived."""
        return self._has_head or bool(self._unread)

    async def exchange(self, request: bytes, reader: Reader) -> None:
        """Send a request and pass the whole reply to `reader`. Raises `ConnectionResetError` if it is cut off."""
        if self._transport is None:
            raise ConnectionResetError("the server has closed the connection")
        self._reset()
        self._reader = reader
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        except BaseException:
            self.close()
            raise
        finally:
            self._reader = self._done = None
        if not self._can_reuse:
            self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    # --- what the event loop calls ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 (there is but one buffer)
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        now = perf_counter()
        if self._reader is None:  # there is no request
            self.close()
            return
        try:
            self._read(self._unread + bytes(self._buffer[:nbytes]), self._reader, now)
        except ValueError as error:
            self._fail(ConnectionResetError(f"the reply is no valid HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends a reply of unknown length, and cuts off any other."""
        self._transport = None
        if self._done is None or self._done.done():
            return
        if exc is None and self._has_head and not self._is_chunked and self._num_left is None:
            self._done.set_result(None)
        else:
            self._fail(ConnectionResetError(str(exc or "the server closed the connection in mid-reply")))

    # --- replies ----------------------------------------------------------------------------------------

    def _read(self, data: bytes, reader: Reader, now: float) -> None:
        """Process the data so far, and keep what is incomplete."""
        if not self._has_head:
            head, end, data = data.partition(b"\r\n\r\n")
            if not end:
                if len(head) > MAX_HEAD_BYTES:
                    raise ValueError(f"its head has more than {MAX_HEAD_BYTES} bytes")
                self._unread = head
                return
            self._read_head(head, reader)
        is_last = False
        if self._is_chunked:
            body, self._unread, is_last = split_chunks(data)
        elif self._num_left is None:
            body, self._unread = data, b""
        else:
            body, self._unread = data[: self._num_left], data[self._num_left :]
            self._num_left -= len(body)
            is_last = self._num_left == 0
        if body:
            reader.feed(body, now)
        if is_last and self._done is not None and not self._done.done():
            self._can_reuse = self._can_reuse and not self._unread
            self._done.set_result(None)

    def _read_head(self, head: bytes, reader: Reader) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
            raise ValueError(f"it begins with {first[:40]!r}")
        pairs = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self._has_head = True
        self._is_chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        if not self._is_chunked and "content-length" in headers:
            self._num_left = int(headers["content-length"])
        self._can_reuse = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
        reader.begin(int(rest[:3]), headers.get("content-type", "").partition(";")[0].strip().lower())

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


def split_chunks(data: bytes) -> tuple[bytes, bytes, bool]:
    """The content of complete chunks, the data after them, and whether the last chunk is among them."""
    body: list[bytes] = []
    start = 0
    while (line_end := data.find(b"\r\n", start)) >= 0:
        size = int(data[start:line_end].partition(b";")[0], 16)
        if size < 0:
            raise ValueError(f"a chunk has the size {size}")
        end = line_end + 2 + size
        if len(data) < end + 2:
            break
        start = end + 2
        if size == 0:
            return b"".join(body), data[start:], True
        body.append(data[line_end + 2 : end])
    return b"".join(body), data[start:], False


class BodyReader:
    def __init__(self) -> None:
        self.status = 0
        self.body = b""

    def begin(self, status: int, content_type: str) -> None:  # noqa: ARG002 (not needed)
        self.status = status

    def feed(self, data: bytes, now: float) -> None:  # noqa: ARG002 (nothing is timed)
        self.body += data


class Connector:
    """Opens connections to one server; resolves its address only once."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._address = (endpoint.host, endpoint.port)
        self._ssl = ssl.create_default_context() if endpoint.is_secure else None
        self._buffer = memoryview(bytearray(BUFFER_BYTES))

    async def connect(self) -> Connection:
        """A new connection; raises an `OSError` if there is none."""
        host, port = self._address
        transport, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(self._buffer),
            host,
            port,
            ssl=self._ssl,
            server_hostname=self._endpoint.host if self._ssl else None,
        )
        self._address = transport.get_extra_info("peername")[:2]
        return connection
