"""Middleware for all requests: checks host, API key and body size, and adds headers to responses."""

import hashlib
import hmac
import logging
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infinilm.server.api_errors import ApiError, body_too_large
from infinilm.server.connection import CUT
from infinilm.server.engine_request import now
from infinilm.server.logs import choose_request_id, request_id
from infinilm.server.metrics import Metrics
from infinilm.server.settings import ServerSettings

logger = logging.getLogger(__name__)

OPEN_PATHS = ("/", "/health/live")
"""Routes that need no key: the page, which asks for one, and the liveness check. The page's files need none either."""
STATIC_PREFIX = "/static/"
MAX_LENGTH_DIGITS = 18
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
    """The API keys. Only their hashes are kept."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._hashes = [_hash(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def find(self, key: bytes) -> str | None:
        """The tenant of a key, or None. All keys are compared, each in constant time."""
        given = _hash(key)
        found = None
        for known in self._hashes:
            if hmac.compare_digest(given, known):
                found = known.hex()[:16]
        return found


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Guard:
    """ASGI middleware. Its refusals have the form of OpenAI's API; Starlette's own middleware answers in plain text."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: Metrics, paths: Sequence[str]) -> None:
        self._app = app
        self._settings = settings
        self._limits = settings.limits
        self._metrics = metrics
        self._paths = frozenset(paths)
        self._keys = KeyRing(settings.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["arrival_time"] = now()
        scope["direct_send"] = send  # for server-sent events, which bypass the middleware
        path = scope["path"]
        label = path if path in self._paths else "other"
        headers = dict(reversed(scope["headers"]))  # if a name is repeated, the first one counts
        own_id = choose_request_id(headers.get(b"x-request-id"))
        request_id.set(own_id)
        has_started = False

        async def watched_send(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                self._metrics.responses.labels(label, message["status"]).inc()
                message["headers"] = [*message["headers"], *SECURITY_HEADERS, (b"x-request-id", own_id.encode())]
                if path == "/" or path.startswith(STATIC_PREFIX):  # a browser must not mix the files of two versions
                    message["headers"].append((b"cache-control", b"no-cache"))
            await send(message)

        try:
            self._check_host(headers)
            self._check_key(scope, headers)
            self._check_body(scope, headers)
        except ApiError as error:
            await _refuse(error, scope, receive, watched_send)
            return
        try:
            await self._app(scope, receive, watched_send)
        except Exception:
            logger.exception("%s %s failed", scope["method"], path)
            if has_started:
                scope["extensions"][CUT]()
            else:
                failed = ApiError(500, f"the server failed to handle this request; its log says more at {own_id}")
                await _refuse(failed, scope, receive, watched_send)

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        """Without keys, refuse other host names: a page in a browser could reach this server by DNS rebinding."""
        if self._keys or not self._settings.is_loopback:
            return
        host = headers.get(b"host", b"localhost").decode("latin-1")
        name = host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]
        if name.lower() not in (*LOOPBACK_NAMES, self._settings.host):
            raise ApiError(403, f"the host {host[:100]!r} is not this server; use localhost", code="bad_host")

    def _check_key(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        path = scope["path"]
        if not self._keys or path in OPEN_PATHS or path.startswith(STATIC_PREFIX):
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
        length = headers.get(b"content-length", b"").strip().lstrip(b"0")
        if len(length) > MAX_LENGTH_DIGITS or int(length or b"0") > self._limits.max_body_bytes:
            raise body_too_large(self._limits.max_body_bytes)
        if scope["method"] == "POST" and scope["path"] in self._paths:
            kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
            if kind != b"application/json":
                raise ApiError(
                    415,
                    f"the content type is {kind.decode('latin-1')[:100]!r}; send JSON with the header "
                    "'Content-Type: application/json'",
                    code="unsupported_media_type",
                )
            encoding = headers.get(b"content-encoding", b"").strip().lower()
            if encoding not in (b"", b"identity"):
                raise ApiError(
                    415,
                    f"the content encoding is {encoding.decode('latin-1')[:100]!r}; send the body uncompressed, "
                    "without the header 'Content-Encoding'",
                    code="unsupported_content_encoding",
                )


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Send an error and close the connection: the client may still be sending a body."""
    response = error.to_response()
    response.headers["connection"] = "close"
    await response(scope, receive, send)
