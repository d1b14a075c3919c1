"""Makes every error a reply in OpenAI's shape."""

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from infinilm.server.api_errors import ApiError, bad_request

_TYPE_NAMES = ("body", "str", "int", "float", "bool")


def install_handlers(app: FastAPI) -> None:
    """Have the application answer with them."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)


def to_response(error: ApiError) -> Response:
    """The reply."""
    return Response(error.encode(), error.status, media_type="application/json", headers=error.headers)


async def _api_error(request: Request, error: Exception) -> Response:  # noqa: ARG001
    assert isinstance(error, ApiError)
    return to_response(error)


async def _validation_error(request: Request, error: Exception) -> Response:  # noqa: ARG001
    assert isinstance(error, RequestValidationError)
    return to_response(describe(error.errors()))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {
        404: f"there is nothing at {request.url.path[:200]!r}",
        405: f"{request.method} is not allowed for {request.url.path[:200]!r}",
    }
    if error.status_code == 400:  # the framework's word for a body that it can't read
        return to_response(_unreadable(error.__cause__))
    message = messages.get(error.status_code) or str(error.detail) or HTTPStatus(error.status_code).phrase
    headers = {name: value for name, value in (error.headers or {}).items() if name.lower() == "allow"}
    return to_response(ApiError(error.status_code, message, headers=headers))


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
    """Validation errors in one message, each with its field. Of a field that may be of several types, all are named."""
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
    reasons = list(dict.fromkeys(_reason(error) for error in wrong if error["loc"][:2] == field))
    return bad_request(f"{'; or '.join(reasons[:4])}", _path(field) or None, "invalid_value")


def _reason(error: Any) -> str:
    message = error["msg"].removeprefix("Value error, ")
    return f"{_path(error['loc']) or 'the body'}: {message[:1].lower()}{message[1:]}"


def _path(loc: Any) -> str:
    """Where in the body, without the names of types that tell the members of a union apart."""
    parts = [str(part)[:64] for part in loc]
    return ".".join(part for part in parts if part not in _TYPE_NAMES and "[" not in part)
