"""Errors as OpenAI's API reports them: a status and `{"error": {message, type, param, code}}`."""

from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
_FIRST_SERVER_STATUS = 500
_MAX_ERRORS = 50
"""How many errors of one field are looked at."""
_TYPE_NAMES = ("body", "str", "int", "float", "bool")


class ApiError(Exception):
    """Why a request is refused or has failed."""

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
        self.message = message.encode(errors="replace").decode()  # it may quote lone surrogates
        self.param = param and param.encode(errors="replace").decode()
        self.code = code
        self.headers = headers or {}

    def encode(self) -> bytes:
        """The reply as JSON."""
        usual = "server_error" if self.status >= _FIRST_SERVER_STATUS else "invalid_request_error"
        kind = _TYPES.get(self.status, usual)
        detail = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": detail})

    def to_response(self) -> Response:
        return Response(self.encode(), self.status, media_type="application/json", headers=self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the request itself is wrong."""
    return ApiError(400, message, param=param, code=code)


def body_too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes (max_body_bytes)", code="body_too_large")


def shutting_down() -> ApiError:
    """A 503 for requests that arrive, or have not ended, when the server shuts down."""
    return unavailable("the server is shutting down", code="shutting_down")


def unavailable(message: str, retry_after: float = 1.0, code: str = "engine_unavailable") -> ApiError:
    """A 503: the request may be tried again."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(max(1, round(retry_after)))})


# --- the application's handlers --------------------------------------------------------------------------------


def install_handlers(app: FastAPI) -> None:
    """Give every error of the application this form."""
    for kind in (ApiError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _handle)


async def _handle(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        error = describe(error.errors())
    elif isinstance(error, HTTPException):
        error = _from_http(request, error)
    assert isinstance(error, ApiError)
    return error.to_response()


def _from_http(request: Request, error: HTTPException) -> ApiError:
    messages = {
        404: f"there is nothing at {request.url.path[:200]!r}",
        405: f"{request.method} is not allowed for {request.url.path[:200]!r}",
    }
    if error.status_code == 400:  # the framework can't read the body
        return _unreadable(error.__cause__)
    message = messages.get(error.status_code) or str(error.detail) or HTTPStatus(error.status_code).phrase
    headers = {name: value for name, value in (error.headers or {}).items() if name.lower() == "allow"}
    return ApiError(error.status_code, message, headers=headers)


def _unreadable(cause: BaseException | None) -> ApiError:
    if isinstance(cause, ApiError):
        return cause
    if isinstance(cause, UnicodeDecodeError):
        return bad_request(
            f"the body is not valid UTF-8: {cause.reason} at byte {cause.start}; send JSON in UTF-8",
            code="invalid_utf8",
        )
    if isinstance(cause, RecursionError):
        return bad_request("the body is nested too deeply to be read as JSON", code="invalid_json")
    if isinstance(cause, ValueError):  # Python's limit
        return bad_request("the body is not valid JSON: an integer has too many digits", code="invalid_json")
    return bad_request("the body can't be read as JSON", code="invalid_json")


def describe(errors: Any) -> ApiError:
    """Put validation errors in one message, each with its field. If a field has several types, all are named."""
    first = errors[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return bad_request(f"the body is not valid JSON: {reason} at character {first['loc'][-1]}", code="invalid_json")
    wrong = [error for error in errors if error["type"] != "extra_forbidden"]
    if not wrong:
        names = [_path(error["loc"]) for error in errors]
        known = "are not known" if len(names) > 1 else "is not known"
        return bad_request(f"{', '.join(names[:10])} {known} to this server", names[0], "unknown_field")
    field = wrong[0]["loc"][:2]
    wrong = [error for error in wrong if error["loc"][:2] == field][:_MAX_ERRORS]
    paths = [_path(error["loc"]) for error in wrong]
    # For a union, keep the deepest errors: they are of the members that the value came closest to.
    wrong = [error for error, own in zip(wrong, paths, strict=True) if not any(p.startswith(f"{own}.") for p in paths)]
    reasons = list(dict.fromkeys(map(_reason, wrong)))
    return bad_request("; or ".join(reasons[:4]), _path(field) or None, "invalid_value")


def _reason(error: Any) -> str:
    message = error["msg"].removeprefix("Value error, ")
    return f"{_path(error['loc']) or 'the body'}: {message[:1].lower()}{message[1:]}"


def _path(loc: Any) -> str:
    """The path in the body, without the type names that pydantic adds for the members of a union."""
    parts = [str(part)[:64] for part in loc]
    return ".".join(part for part in parts if part not in _TYPE_NAMES and "[" not in part)
