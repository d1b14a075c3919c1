"""Errors as OpenAI's API reports them: a status and `{"error": {message, type, param, code}}`."""

from typing import Any

import msgspec

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
_FIRST_SERVER_STATUS = 500


class ApiError(Exception):
    """A request that is not answered as asked, and why."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message.encode(errors="replace").decode()  # it may quote what is no Unicode
        self.param = param and param.encode(errors="replace").decode()
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The reply."""
        usual = "server_error" if self.status >= _FIRST_SERVER_STATUS else "invalid_request_error"
        kind = _TYPES.get(self.status, usual)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def encode(self) -> bytes:
        """The reply as JSON."""
        return msgspec.json.encode(self.body())


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the request itself is wrong."""
    return ApiError(400, message, param=param, code=code)


def body_too_large(max_bytes: int) -> ApiError:
    """A 413."""
    return ApiError(413, f"the body is larger than {max_bytes} bytes (max_body_bytes)", code="body_too_large")


def shutting_down() -> ApiError:
    """For requests that arrive, or are still open, when the server ends."""
    return unavailable("the server is shutting down", code="shutting_down")


def unavailable(message: str, retry_after: float = 1.0, code: str = "engine_unavailable") -> ApiError:
    """A 503: it is not the request's fault, and it may be tried again."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(max(1, round(retry_after)))})
