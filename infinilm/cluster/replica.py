"""The engine replica: an engine in its own process, and the connections of the fronts that send it requests."""

import asyncio
import logging
import os
from contextlib import suppress
from typing import Any

from infinilm.cluster import wire
from infinilm.cluster.loop_thread import LoopThread
from infinilm.errors import EngineError
from infinilm.framing import ChannelClosedError, frame, read_frame
from infinilm.loading.sources import resolve
from infinilm.outputs import AnswerDelta
from infinilm.ray_cluster import GROUP_VARIABLE, STRATEGIES
from infinilm.sampling_params import SamplingParams
from infinilm.server import messages
from infinilm.server.admission import Admission
from infinilm.server.api_errors import ApiError, bad_request, shutting_down
from infinilm.server.engine_client import EngineClient, State
from infinilm.server.engine_request import DeltaQueue, EngineRequest, now
from infinilm.server.engine_start import SOCKET_BUFFER_BYTES
from infinilm.server.logs import install_logging
from infinilm.server.run import loop_factory
from infinilm.server.settings import Limits

logger = logging.getLogger(__name__)

TICK_S = 0.1
"""The interval at which the load is checked. Fronts are told when it has changed."""
IDLE_TICKS = 5
"""An unchanged load is sent again after this many ticks, because fronts take a silent replica for dead."""


class EngineServer:
    """The engine and its fronts. Everything runs in one event loop."""

    def __init__(self, config: dict[str, Any], limits: Limits, *, has_tenants: bool, secret: bytes) -> None:
        self.secret = secret
        self.limits = limits
        self.admission = Admission(limits, has_tenants=has_tenants)
        settings = messages.config_from_wire(config)
        self.client = EngineClient(settings.replace(model=resolve(settings.model)), limits, self.admission)
        self.client.cache_listener = self._note_cache
        self.links: set[FrontLink] = set()
        self.open: dict[EngineRequest, int] = {}
        """The requests of all fronts, each with the number of prompt tokens to compute."""
        self.port = 0
        self._cached: dict[bytes, None] = {}
        self._server: asyncio.Server | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._num_proven = -1

    async def start(self, host: str) -> None:
        """Load the model, and listen on a free port."""
        await self.client.start()
        self._server = await asyncio.start_server(self._accept, host, 0, limit=SOCKET_BUFFER_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]
        self._ticker = asyncio.create_task(self._tick())

    async def stop(self) -> None:
        """Let the open requests finish, up to `drain_timeout`. Fronts send the next ones elsewhere."""
        self.client.is_draining = True
        self._tell(self._load())
        deadline = now() + self.limits.drain_timeout
        while self.admission.num_requests and now() < deadline:
            await asyncio.sleep(TICK_S)
        self.client.fail_all(shutting_down())
        await asyncio.sleep(TICK_S)  # for the last deltas to leave
        if self._ticker is not None:
            self._ticker.cancel()
        if self._server is not None:
            self._server.close()
        await self.client.stop()

    async def prove_health(self) -> None:
        """Raise if the engine can't generate. If it drew no token since the last call, a test request draws one."""
        client = self.client
        if client.state is State.FAILED:
            raise EngineError(f"the engine can't be started again: {client.cause}")
        num_tokens, before = client.stats.num_decode_tokens, self._num_proven
        self._num_proven = num_tokens
        if client.state is not State.READY or client.is_draining or num_tokens > before >= 0:
            return
        probe = EngineRequest(
            request_id=f"health-{now()}",
            prompt_token_ids=[0],
            params=SamplingParams(max_tokens=1, temperature=0.0),
            output=DeltaQueue(),
            tenant="health",
            arrival_time=now(),
        )
        try:
            client.enter([probe])
        except ApiError as error:
            if error.status == 429:  # a full engine is healthy
                return
            raise EngineError(str(error)) from error
        with suppress(TimeoutError):
            await asyncio.wait_for(probe.output.wait(), self.limits.step_timeout)
        if probe.first_time is None and client.state is State.READY:
            client.cancel(probe)
            raise EngineError(f"the engine generated no token within step_timeout={self.limits.step_timeout:g} s")

    def queued_tokens(self) -> int:
        """The tokens to compute of prompts without a first token."""
        return sum(num_tokens for request, num_tokens in self.open.items() if request.first_time is None)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = FrontLink(self, reader, writer)
        try:
            await wire.greet(reader, writer, self.secret, is_front=False)
            link.send(self._greeting())
            link.send(self._load())
            self.links.add(link)
            await link.follow()
        except ChannelClosedError as error:
            logger.info("a front has gone: %s", error)
        finally:
            self.links.discard(link)
            link.close()

    def _greeting(self) -> wire.Greeting:
        assert self.client.ready is not None
        return wire.Greeting(self.client.ready, b"".join(self._cached))

    def _load(self) -> wire.Load:
        client = self.client
        state = "draining" if client.is_draining else str(client.state)
        return wire.Load(
            state, client.cause, self.queued_tokens(), self.admission.num_requests, client.num_restarts, client.stats
        )

    def _note_cache(self, report: messages.CacheChanged) -> None:
        size = messages.HASH_BYTES
        for start in range(0, len(report.removed), size):
            self._cached.pop(report.removed[start : start + size], None)
        self._cached |= {report.added[start : start + size]: None for start in range(0, len(report.added), size)}
        self._tell(report)

    async def _tick(self) -> None:
        """Send fronts the load when it has changed, and every `IDLE_TICKS` ticks when it has not."""
        last, num_silent, num_restarts = b"", 0, self.client.num_restarts
        while True:
            await asyncio.sleep(TICK_S)
            if self.client.num_restarts != num_restarts and self.client.state is State.READY:
                num_restarts = self.client.num_restarts
                self._cached.clear()  # the new engine's cache is empty
                self._tell(self._greeting())
            load = self._load()
            encoded = messages.encode_message(load)
            num_silent = num_silent + 1 if encoded == last else 0
            if num_silent % IDLE_TICKS == 0:
                self._tell(load)
            last = encoded

    def _tell(self, report: wire.Report) -> None:
        for link in self.links:
            link.send(report)


class FrontLink(DeltaQueue):
    """The connection of one front, and the queue in which its requests' output arrives."""

    def __init__(self, server: EngineServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__()
        self._server = server
        self._reader = reader
        self._writer = writer
        self._requests: dict[str, EngineRequest] = {}
        self._deltas: list[AnswerDelta] = []

    def send(self, report: wire.Report) -> None:
        if not self._writer.is_closing():
            self._writer.write(frame(messages.encode_message(report)))

    async def follow(self) -> None:
        """Receive requests until the front closes the connection."""
        while True:
            command = messages.decode_command(await read_frame(self._reader))
            if isinstance(command, messages.Submit):
                self._submit(command)
            elif isinstance(command, messages.Abort) and (request := self._requests.get(command.request_id)):
                self._server.client.cancel(request, command.answer)
                if request.is_ended:  # it was still waiting, so the engine will not report its end
                    self._refuse(request, ApiError(499, "the request was cancelled"))

    def put(self, request: EngineRequest, delta: AnswerDelta | None) -> None:
        """Send output. All deltas of a step are one message."""
        if delta is not None:
            if not self._deltas:
                asyncio.get_running_loop().call_soon(self._flush)
            self._deltas.append(delta)
            if request.num_open == 0:
                self._forget(request)
        elif request.error is not None:
            self._flush()
            self._refuse(request, request.error)

    def close(self) -> None:
        """End the requests of a front that is gone."""
        for request in list(self._requests.values()):
            self._server.client.cancel(request)
            self._forget(request)
        self._writer.close()

    def _submit(self, command: messages.Submit) -> None:
        server = self._server
        try:
            params = messages.params_from_wire(command.params)
        except (TypeError, ValueError) as error:  # a front of another version
            self.send(wire.Refused.from_error(command.request_id, bad_request(str(error))))
            return
        request = EngineRequest(
            request_id=command.request_id,
            prompt_token_ids=command.prompt_token_ids,
            params=params,
            output=self,
            tenant=command.cache_salt or "",
            arrival_time=now(),
        )
        self._requests[command.request_id] = request
        server.open[request] = max(len(command.prompt_token_ids) - command.num_cached_tokens, 1)
        try:
            server.client.enter([request])
        except ApiError as error:
            self._refuse(request, error)

    def _refuse(self, request: EngineRequest, error: ApiError) -> None:
        self._forget(request)
        self.send(wire.Refused.from_error(request.request_id, error))

    def _forget(self, request: EngineRequest) -> None:
        self._requests.pop(request.request_id, None)
        self._server.open.pop(request, None)

    def _flush(self) -> None:
        if self._deltas:
            deltas, self._deltas = self._deltas, []
            self.send(messages.Stepped(deltas))


class EngineReplica:
    """The Ray Serve deployment of an engine. Requests reach it over its own connections, not through Ray."""

    def __init__(self, config: dict[str, Any], limits: dict[str, Any], *, has_tenants: bool, secret: str) -> None:
        import ray

        install_logging()
        if config["executor"] in STRATEGIES:
            context, group = ray.get_runtime_context(), ray.util.get_current_placement_group()
            assert group is not None
            os.environ |= {GROUP_VARIABLE: group.id.hex(), "RAY_ADDRESS": context.gcs_address}
        self._host = ray.util.get_node_ip_address()
        self._node_id = ray.get_runtime_context().get_node_id()
        self._thread = LoopThread("engine", loop_factory())
        self._server: EngineServer | None = None
        self._thread.start(
            self._start(config, Limits(**limits), has_tenants=has_tenants, secret=bytes.fromhex(secret))
        ).result()

    async def _start(self, config: dict[str, Any], limits: Limits, *, has_tenants: bool, secret: bytes) -> None:
        self._server = EngineServer(config, limits, has_tenants=has_tenants, secret=secret)
        await self._server.start(self._host)

    @property
    def server(self) -> EngineServer:
        assert self._server is not None
        return self._server

    def record_replica_metadata(self) -> dict[str, Any]:
        """The address for fronts. Ray Serve passes it to their router."""
        return {"host": self._host, "port": self.server.port, "node_id": self._node_id}

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {"queued_tokens": float(self.server.queued_tokens())}

    async def check_health(self) -> None:
        await self._thread.call(self.server.prove_health())

    async def __del__(self) -> None:
        """Ray Serve calls this before it stops the replica."""
        if self._server is not None:
            await self._thread.call(self._server.stop())
