"""Reads JSON bodies. Their complexity is bounded before they are parsed and validated.

Small values take much memory once they are parsed, and each wrong one may become a validation error of its own.
"""

import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from infinilm.server.api_errors import bad_request
from infinilm.server.settings import Limits

_STRING = re.compile(r'"(?:[^"\\]++|\\.?)*+"?', re.DOTALL)
"""A string in JSON, or the rest of the text if the string does not end. It never backtracks."""


class JsonRequest(Request):
    """A request whose body is JSON in UTF-8 with at most `max_nodes` arrays, objects and members of objects."""

    max_nodes: int

    async def json(self) -> Any:
        """The body, parsed. What is not JSON raises `ValueError`, as `json.loads` does."""
        text = (await self.body()).decode("utf-8-sig")
        if _count_nodes(text) > self.max_nodes < _count_nodes(_STRING.sub("", text)):
            raise bad_request(
                f"the body has more than {self.max_nodes} arrays, objects and members of objects (max_json_nodes)",
                code="body_too_complex",
            )
        return json.loads(text)


def _count_nodes(text: str) -> int:
    return text.count("[") + text.count("{") + text.count(":")


def json_route(limits: Limits) -> type[APIRoute]:
    """The class of routes that read such requests."""

    class JsonRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
            handle = super().get_route_handler()

            async def handle_json(request: Request) -> Response:
                bounded = JsonRequest(request.scope, request.receive)
                bounded.max_nodes = limits.max_json_nodes
                return await handle(bounded)

            return handle_json

    return JsonRoute
