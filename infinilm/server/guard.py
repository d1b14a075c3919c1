"""What every request passes before any route sees it: host, key, size; and what every response gets."""

import asyncio
import hashlib
import hmac
from collections.abc import Sequence

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infinilm.server.api_errors import ApiError
from infinilm.server.jobs import now
from infinilm.server.metrics import Metrics
from infinilm.server.settings import ServerSettings

OPEN_PATHS = ("/", "/health/live")
"""Routes without a key: the page, which asks for one, and the sign of life. The page's files are open too."""
STATIC_PREFIX = "/static/"
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")

SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
]


class KeyRing:
    """The keys that open the service. Only their hashes are kept."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._hashes = [_hash(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def find(self, key: bytes) -> str | None:
        """The tenant that a key stands for. All keys are compared, each in constant time."""
        given = _hash(key)
        found = None
        for known in self._hashes:
            if hmac.compare_digest(given, known):
                found = known.hex()[:16]
        return found


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Guard:
    """ASGI middleware. Refusals have OpenAI's shape, like all other errors."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: Metrics, paths: Sequence[str]) -> None:
        self._app = app
        self._settings = settings
        self._limits = settings.limits
        self._metrics = metrics
        self._paths = frozenset(paths)
        self._keys = KeyRing(settings.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["arrival_time"] = now()
        scope["direct_send"] = send  # for the pieces of a stream: once begun, nobody on the way has to see them
        path = scope["path"]
        label = path if path in self._paths else "other"

        async def watched_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.responses[label, message["status"]] += 1
                message["headers"] = [*message["headers"], *SECURITY_HEADERS]
                if path == "/" or path.startswith(STATIC_PREFIX):  # or a browser could mix the files of two versions
                    message["headers"].append((b"cache-control", b"no-cache"))
            await send(message)

        try:
            headers = _first_headers(scope)
            self._check_host(headers)
            self._check_key(scope, headers)
            self._check_body(scope, headers)
        except ApiError as error:
            await refuse(error, watched_send)
            return
        await self._app(
            scope, _LimitedBody(receive, self._limits.max_body_bytes, self._limits.read_timeout), watched_send
        )

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        """Without a key, a page that a browser has open must not reach us under a name of its own."""
        if self._keys or not self._settings.is_loopback:
            return
        host = headers.get(b"host", b"localhost").decode("latin-1")
        name = host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]
        if name.lower() not in (*LOOPBACK_NAMES, self._settings.host):
            raise ApiError(403, f"the host {host[:100]!r} is not this server; use localhost", code="bad_host")

    def _check_key(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if not self._keys:
            return
        path = scope["path"]
        if path in OPEN_PATHS or path.startswith(STATIC_PREFIX):
            return
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        tenant = self._keys.find(key.strip())
        if scheme.lower() != b"bearer" or tenant is None:
            raise ApiError(
                401,
                "give an API key of this server in the header 'Authorization: Bearer <key>'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        scope["tenant"] = tenant

    def _check_body(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._limits.max_body_bytes:
            raise _too_large(self._limits.max_body_bytes)
        if scope["method"] == "POST" and scope["path"] in self._paths:
            kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
            if kind != b"application/json":
                raise ApiError(
                    415,
                    f"the content type is {kind.decode('latin-1')[:100]!r}; send JSON with the header "
                    "'Content-Type: application/json'",
                    code="unsupported_media_type",
                )


class _LimitedBody:
    """Receives a body of a certain size at most, within a certain time."""

    def __init__(self, receive: Receive, max_bytes: int, timeout: float) -> None:
        self._receive = receive
        self._num_left = max_bytes
        self._max_bytes = max_bytes
        self._timeout = timeout
        self._is_complete = False

    async def __call__(self) -> Message:
        if self._is_complete:
            return await self._receive()
        try:
            message = await asyncio.wait_for(self._receive(), self._timeout)
        except TimeoutError:
            raise HTTPException(408, f"the body did not come within {self._timeout:g} s") from None
        if message["type"] == "http.request":
            self._num_left -= len(message.get("body", b""))
            if self._num_left < 0:
                raise HTTPException(413, _too_large(self._max_bytes).message)
            self._is_complete = not message.get("more_body", False)
        return message


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes (max_body_bytes)", code="body_too_large")


def _first_headers(scope: Scope) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        found.setdefault(name, value)
    return found


async def refuse(error: ApiError, send: Send) -> None:
    """Send an error, and close the connection: a body may still be on its way."""
    body = error.encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
        *((name.lower().encode(), value.encode()) for name, value in error.headers.items()),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
