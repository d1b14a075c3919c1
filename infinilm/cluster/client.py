"""The client that a front's service uses: an `EngineClient` with many replicas instead of one engine."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from infinilm.cluster import wire
from infinilm.cluster.scoring import Scoreboard
from infinilm.config import Config
from infinilm.engine.sequence import block_hashes
from infinilm.engine.stats import EngineStats
from infinilm.framing import ChannelClosedError, frame, read_frame
from infinilm.server import messages
from infinilm.server.admission import Admission
from infinilm.server.api_errors import ApiError, shutting_down, unavailable
from infinilm.server.engine_client import EngineClient, State
from infinilm.server.engine_request import EngineRequest, now
from infinilm.server.engine_start import SOCKET_BUFFER_BYTES
from infinilm.server.settings import Limits

logger = logging.getLogger(__name__)

DISCOVERY_S = 1.0
"""How often Ray Serve is asked which replicas run."""
POLL_S = 0.05
WATCH_S = 0.25
SILENCE_S = 2.0
"""A replica that sends no report for this long is taken for dead. It sends at least two per second."""
RETRY_S = 2.0
"""How long a request waits for another replica if its own died before the first token."""
CLIENT_GONE = 499
GONE_STATUSES = (500, 503)
"""Refusals after which another replica is tried, as after a 429. If all replicas refuse, the client is told."""


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """A replica that Ray Serve knows to be running."""

    replica_id: str
    host: str
    port: int
    node_id: str


@dataclass(slots=True)
class Ticket:
    """A question for `ReplicaLister`, which passes the running replicas to `note`."""

    note: Callable[[Sequence[ReplicaAddress]], None]


class Handle(Protocol):
    """The part of Ray Serve's `DeploymentHandle` that is used."""

    def choose_replica(self, ticket: Ticket, *, _reserve: bool) -> AbstractAsyncContextManager[Any]: ...


class ReplicaLink:
    """The connection to one replica."""

    def __init__(self, client: "ClusterClient", address: ReplicaAddress) -> None:
        self.address = address
        self.requests: dict[str, EngineRequest] = {}
        self.greeting: wire.Greeting | None = None
        self.load: wire.Load | None = None
        self.token_rate = 0.0
        """Tokens per second, averaged over the last reports."""
        self._load_time = 0.0
        self._client = client
        self._writer: asyncio.StreamWriter | None = None
        self._num_reports = 0
        self.task = asyncio.create_task(self._run())

    @property
    def name(self) -> str:
        return f"replica {self.address.replica_id} on node {self.address.node_id[:8]} ({self.address.host})"

    @property
    def is_open(self) -> bool:
        """Whether it takes requests."""
        return self.greeting is not None and self.load is not None and self.load.state == State.READY

    def send(self, command: messages.Command) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(messages.encode_message(command)))

    async def _run(self) -> None:
        """Connect and receive reports until the replica is gone."""
        cause = "it has closed the connection"
        watch = None
        try:
            async with asyncio.timeout(wire.HANDSHAKE_TIMEOUT_S):
                reader, self._writer = await asyncio.open_connection(
                    self.address.host, self.address.port, limit=SOCKET_BUFFER_BYTES
                )
            await wire.greet(reader, self._writer, self._client.secret, is_front=True)
            watch = asyncio.create_task(self._watch())
            while True:
                report = wire.decode_report(await read_frame(reader))
                self._num_reports += 1
                self._note(report)
        except (ChannelClosedError, OSError) as error:
            if watch is not None and watch.done():
                cause = f"it has said nothing for {SILENCE_S:g} s"
            elif str(error):
                cause = str(error)
        finally:
            if watch is not None:
                watch.cancel()
            if self._writer is not None:
                self._writer.close()
            self._client.lose(self, cause)

    async def _watch(self) -> None:
        """Hang up when the replica is silent. Time in which this process did not run does not count."""
        num_silent, num_seen = 0, -1
        while num_silent * WATCH_S < SILENCE_S:
            await asyncio.sleep(WATCH_S)
            num_silent = num_silent + 1 if num_seen == self._num_reports else 0
            num_seen = self._num_reports
        assert self._writer is not None
        self._writer.transport.abort()

    def _note(self, report: wire.Report) -> None:
        client, replica_id = self._client, self.address.replica_id
        if isinstance(report, wire.Stepped):
            client.take_deltas(self, report.deltas)
        elif isinstance(report, wire.Load):
            self._note_rate(report)
            self.load = report
            client.note_load(self)
        elif isinstance(report, wire.CacheChanged):
            client.scoreboard.change_cache(
                replica_id, wire.split_hashes(report.added), wire.split_hashes(report.removed)
            )
        elif isinstance(report, wire.Refused):
            client.take_refusal(self, report)
        else:
            self.greeting = report
            client.note_greeting(self)

    def _note_rate(self, load: wire.Load) -> None:
        time = now()
        if self.load is not None and (elapsed := time - self._load_time) > 0:
            num_new = max(load.stats.num_decode_tokens - self.load.stats.num_decode_tokens, 0)
            self.token_rate += min(elapsed, 1.0) * (num_new / elapsed - self.token_rate)
        self._load_time = time


@dataclass(slots=True)
class Placement:
    """The replicas that a request was sent to, and their refusals."""

    hashes: Sequence[int]
    refused_by: set[str] = field(default_factory=set)
    refusal: ApiError | None = None
    link: ReplicaLink | None = None
    deadline: float | None = None
    """Until when it waits for a replica: after one died, or while Ray Serve names none that is connected."""


class ClusterClient(EngineClient):
    """Sends each request to the best replica, and to another one if that dies before its first token."""

    def __init__(
        self, config: Config, limits: Limits, admission: Admission, make_handle: Callable[[], Handle], secret: bytes
    ) -> None:
        """`make_handle` is called in the event loop of the service."""
        super().__init__(config, limits, admission)
        self.secret = secret
        self.links: dict[str, ReplicaLink] = {}
        self.scoreboard = Scoreboard()
        self._make_handle = make_handle
        self._handle_of_engines: Handle | None = None
        self._placements: dict[str, Placement] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._opened = asyncio.Event()
        self._named: set[str] = set()
        """The replicas that Ray Serve names as running. One that it is stopping is not named, but still connected."""

    async def start(self) -> messages.Ready:
        """Wait for the first replica."""
        self._handle_of_engines = self._make_handle()
        self._spawn(self._discover())
        while self.ready is None:
            await self._opened.wait()
        return self.ready

    async def stop(self) -> None:
        self.state = State.STOPPED
        tasks = [*self._tasks, *(link.task for link in self.links.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._end_all(shutting_down())

    # --- replicas ---------------------------------------------------------------------------------------

    async def _discover(self) -> None:
        """Ask Ray Serve's router for replicas at intervals, and connect to new ones: no request waits for Ray."""
        assert self._handle_of_engines is not None
        while True:
            try:
                async with self._handle_of_engines.choose_replica(Ticket(self._note_named), _reserve=False):
                    pass
            except Exception:  # the next try may succeed; connected replicas continue
                logger.exception("Ray Serve names no replicas")
            await asyncio.sleep(DISCOVERY_S)

    def _note_named(self, addresses: Sequence[ReplicaAddress]) -> None:
        self._named = {each.replica_id for each in addresses}
        for address in addresses:
            if address.replica_id not in self.links:
                self.links[address.replica_id] = ReplicaLink(self, address)

    def note_greeting(self, link: ReplicaLink) -> None:
        greeting, replica_id = link.greeting, link.address.replica_id
        assert greeting is not None
        self.ready = greeting.ready
        self.scoreboard.block_size = greeting.ready.block_size
        self.scoreboard.drop(replica_id)
        self.scoreboard.change_cache(replica_id, wire.split_hashes(greeting.cache), ())
        self._admission.set_capacity(1 << 30, 1 << 30)  # replicas queue, not fronts

    def note_load(self, link: ReplicaLink) -> None:
        load = link.load
        assert load is not None
        self.scoreboard.note_load(link.address.replica_id, load.queued_tokens, load.stats.num_running)
        self._note_state(load.cause)

    def lose(self, link: ReplicaLink, cause: str) -> None:
        """Forget a replica that is gone. Requests without output are sent elsewhere; the others fail."""
        if self.links.get(link.address.replica_id) is link:
            del self.links[link.address.replica_id]
            self.scoreboard.drop(link.address.replica_id)
        if self.state is State.STOPPED or (link.greeting is None and not link.requests):
            return
        logger.warning("%s is gone: %s", link.name, cause)
        self._note_state(f"{link.name} is gone: {cause}")
        for request in list(link.requests.values()):
            self._move(request, link, unavailable(f"{link.name} is gone: {cause}", code="replica_died"))

    def _note_state(self, cause: str | None) -> None:
        is_open = any(link.is_open for link in self.links.values())
        self.state = State.READY if is_open else State.RESTARTING
        self.cause = None if is_open else cause or self.cause or "no replica is ready"
        self.stats = sum_stats(link.load.stats for link in self.links.values() if link.load is not None)
        self.num_restarts = sum(link.load.num_restarts for link in self.links.values() if link.load is not None)
        if is_open:
            self._opened.set()
        else:
            self._opened.clear()

    # --- requests ---------------------------------------------------------------------------------------

    def enter(self, requests: list[EngineRequest]) -> None:
        self.check_open()
        self._admission.enter(requests)
        while (request := self._admission.pop_ready()) is not None:
            request.submit_time = now()
            self._requests[request.request_id] = request
            hashes = block_hashes(request.prompt_token_ids, request.tenant.encode(), self.scoreboard.block_size)
            joined = b"".join(each[: messages.HASH_BYTES] for each in hashes)
            self._placements[request.request_id] = Placement(wire.split_hashes(joined))
            self._place(request)

    def cancel(self, request: EngineRequest, answer: int | None = None) -> None:
        placement = self._placements.get(request.request_id)
        if placement is None or request.is_ended:
            return
        if placement.link is not None:
            placement.link.send(messages.Abort(request.request_id, answer))
        elif answer is None:
            self._finish(request)

    def fail_all(self, error: ApiError) -> None:
        for request in list(self._requests.values()):
            request.fail(error)
            self.cancel(request)

    def _place(self, request: EngineRequest) -> None:
        """Send a request to the best replica that has not refused it, or wait for one."""
        if not self._try_to_place(request):
            self._spawn(self._wait_to_place(request))

    async def _wait_to_place(self, request: EngineRequest) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            if request.is_ended or self._try_to_place(request):
                return

    def _try_to_place(self, request: EngineRequest) -> bool:
        """Whether the request is sent, or has ended with an error."""
        placement = self._placements[request.request_id]
        open_ids = {each for each, link in self.links.items() if link.is_open}
        candidates = open_ids - placement.refused_by
        if allowed := sorted(candidates & self._named):
            self._send(request, placement, allowed)
            return True
        if candidates and placement.deadline is None:  # Ray Serve names none of the connected replicas
            placement.deadline = now() + RETRY_S
        if (open_ids and not candidates) or placement.deadline is None or now() >= placement.deadline:
            stopped = unavailable("Ray Serve stops the replicas that are connected; try again shortly", retry_after=5)
            self._end(request, placement.refusal or (stopped if candidates else self.down_error()))
            return True
        return False

    def _send(self, request: EngineRequest, placement: Placement, allowed: Sequence[str]) -> None:
        num_tokens = len(request.prompt_token_ids)
        session = f"{request.tenant}/{request.session}" if request.session else ""
        choice = self.scoreboard.choose(placement.hashes, num_tokens, allowed, session)
        self.scoreboard.note_sent(choice, placement.hashes, num_tokens, now())
        tried = f", retries={len(placement.refused_by)}" if placement.refused_by else ""
        request.route = f"{choice.replica_id}, reason={choice.reason}, cached={choice.cached_tokens}{tried}"
        placement.link = link = self.links[choice.replica_id]
        link.requests[request.request_id] = request
        params = messages.params_to_wire(request.params)
        link.send(
            messages.Submit(
                request.request_id, request.prompt_token_ids, params, request.tenant or None, choice.cached_tokens
            )
        )

    def take_deltas(self, link: ReplicaLink, deltas: Sequence[wire.AnswerDelta]) -> None:
        time = now()
        for delta in deltas:
            if (request := link.requests.get(delta.request_id)) is not None:
                self._handle_delta(delta, time)
                if request.num_open == 0:
                    del link.requests[delta.request_id]
                    self._placements.pop(delta.request_id, None)

    def take_refusal(self, link: ReplicaLink, refusal: wire.Refused) -> None:
        if (request := link.requests.get(refusal.request_id)) is None:
            return
        if refusal.status == CLIENT_GONE:
            self._finish(request)
        else:
            self._move(request, link, refusal.to_error())

    def _move(self, request: EngineRequest, link: ReplicaLink, error: ApiError) -> None:
        """Send a request to another replica if that may answer it and the client has no output yet; else end it."""
        del link.requests[request.request_id]
        placement = self._placements[request.request_id]
        placement.link = None
        if request.error is not None:  # it was cancelled meanwhile
            self._finish(request)
            return
        if request.first_time is not None or request.num_open < request.params.n:
            self._end(request, _cut(error, request, link))
        elif error.status == 429 or error.status in GONE_STATUSES:
            placement.refused_by.add(link.address.replica_id)
            placement.refusal = _better(placement.refusal, error)
            if error.status != 429 and placement.deadline is None:
                placement.deadline = now() + RETRY_S
            self._place(request)
        else:
            self._end(request, error)

    def _end(self, request: EngineRequest, error: ApiError) -> None:
        request.fail(error)
        self._finish(request)

    def _finish(self, request: EngineRequest) -> None:
        self._requests.pop(request.request_id, None)
        placement = self._placements.pop(request.request_id, None)
        if placement is not None and placement.link is not None:
            placement.link.requests.pop(request.request_id, None)
        if not request.is_ended:
            self._admission.note_end(request)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _cut(error: ApiError, request: EngineRequest, link: ReplicaLink) -> ApiError:
    """The error at the end of an answer that has begun."""
    sent = f"the answer is cut off after {request.num_output_tokens} tokens"
    return ApiError(error.status, f"{sent}: {error.message} ({link.name})", code=error.code or "replica_died")


def _better(first: ApiError | None, second: ApiError) -> ApiError:
    """The more useful of two refusals for the client: a full replica's, and of those the one with the shorter wait."""
    if first is None or (first.status != 429 and second.status == 429):
        return second
    wait = "Retry-After"
    is_sooner = float(second.headers.get(wait, "inf")) < float(first.headers.get(wait, "inf"))
    return second if first.status == second.status and is_sooner else first


def sum_stats(parts: Iterable[EngineStats]) -> EngineStats:
    total = EngineStats()
    for part in parts:
        for item in fields(EngineStats):
            value, more = getattr(total, item.name), getattr(part, item.name)
            setattr(total, item.name, value + more if isinstance(value, int) else value or more)
    return total
