"""The service without HTTP: a request's body goes in, the reply's body comes back.

The routes are called as an HTTP server would call them, so the same code checks, renders, answers and refuses requests.
Limits that protect a service from its clients are lifted: the caller decides how many requests are open.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from infinilm.config import Config
from infinilm.errors import WorkerDiedError
from infinilm.server.app import create_app
from infinilm.server.engine_client import State
from infinilm.server.messages import Ready
from infinilm.server.service import Service
from infinilm.server.settings import Limits, ServerSettings

_NO_LIMIT = 2**31 - 1
_DAY_S = 86_400.0
MAX_DEATHS = 8
"""The engine is given up when it has died this many times without an answer in between."""
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class DirectReply:
    status: int
    request_id: str
    content: bytes
    """JSON, in one line."""


class DirectService:
    """One model. All methods belong to one event loop."""

    def __init__(
        self,
        config: Config,
        *,
        model_name: str | None = None,
        tool_call_parser: str | None = None,
        parse_special_tokens: bool = False,
    ) -> None:
        limits = Limits(
            max_requests=_NO_LIMIT,
            max_total_tokens=_NO_LIMIT,
            max_body_bytes=_NO_LIMIT,
            request_timeout=_DAY_S,
            prepare_timeout=600.0,  # it includes the time in which other prompts are prepared
            # No client waits for single tokens, so steps may be long.
            mixed_step_time=2.0,
            prefill_step_time=2.0,
        )
        settings = ServerSettings(model_name=model_name, parse_special_tokens=parse_special_tokens, limits=limits)
        self.service = Service(config, settings, tool_call_parser=tool_call_parser)
        self._app = create_app(self.service)
        self._num_restarts = 0
        """The engine's number of restarts at the last reply without a server error."""

    async def start(self) -> Ready:
        """Load the model."""
        return await self.service.start()

    async def stop(self) -> None:
        await self.service.stop()

    async def wait_ready(self) -> None:
        """Wait while the engine restarts. Raises `WorkerDiedError` if it can't be started again, or dies too often."""
        client = self.service.client
        while client.state is not State.READY:
            num_deaths = client.num_restarts - self._num_restarts
            if client.state is not State.RESTARTING or num_deaths >= MAX_DEATHS:
                raise WorkerDiedError(f"the engine died and can't be started again: {client.cause}")
            await asyncio.sleep(_POLL_S)

    async def post(self, path: str, body: bytes) -> DirectReply:
        """Post a JSON body to a route and return the reply."""
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "query_string": b"",
            "headers": headers,
        }
        parts = [{"type": "http.request", "body": body, "more_body": False}]
        status, request_id, content = 0, "", b""

        async def receive() -> dict[str, Any]:
            return parts.pop() if parts else await asyncio.get_running_loop().create_future()

        async def send(message: Any) -> None:
            nonlocal status, request_id, content
            if message["type"] == "http.response.start":
                status, request_id = message["status"], dict(message["headers"])[b"x-request-id"].decode()
            else:
                content += message.get("body", b"")

        await self._app(scope, receive, send)
        if status < 500:
            self._num_restarts = self.service.client.num_restarts
        return DirectReply(status, request_id, content)
