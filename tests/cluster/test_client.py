"""A front's client against replicas that the tests play: what happens to requests when replicas refuse, die or hang."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from infinilm.cluster import client as client_module
from infinilm.cluster import wire
from infinilm.cluster.client import ClusterClient, ReplicaAddress, Ticket
from infinilm.config import Config
from infinilm.engine.sequence import block_hashes
from infinilm.engine.stats import EngineStats
from infinilm.framing import frame, read_frame
from infinilm.outputs import AnswerDelta, FinishReason
from infinilm.sampling_params import SamplingParams
from infinilm.server import messages
from infinilm.server.admission import Admission
from infinilm.server.api_errors import ApiError
from infinilm.server.engine_request import DeltaQueue, EngineRequest, now
from infinilm.server.settings import Limits

SECRET = b"s" * 32
READY = messages.Ready(1024, 300, 8, 512, 64, 16, "cpu", "float32", 0.1, {}, "")


class FakeReplica:
    """Takes requests and does nothing, until the test tells it what to answer."""

    def __init__(self, name: str, state: str = "ready", secret: bytes = SECRET) -> None:
        self.name = name
        self.state = state
        self.secret = secret
        self.commands: asyncio.Queue[messages.Command] = asyncio.Queue()
        self.cache = b""
        self.is_silent = False

    async def __aenter__(self) -> "FakeReplica":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = ReplicaAddress(self.name, "127.0.0.1", self._server.sockets[0].getsockname()[1], "node")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.die()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        try:
            await wire.greet(reader, writer, self.secret, is_front=False)
            self.send(wire.Greeting(READY, self.cache))
            self.send(wire.Load(self.state, None, 0, 0, 0, EngineStats()))
            while True:
                self.commands.put_nowait(messages.decode_command(await read_frame(reader)))
        except Exception:
            writer.close()

    def send(self, report: wire.Report) -> None:
        self._writer.write(frame(messages.encode_message(report)))

    def say(self, request_id: str, *token_ids: int, finish_reason: FinishReason | None = None) -> None:
        self.send(messages.Stepped([AnswerDelta(request_id, 0, list(token_ids), None, finish_reason)]))

    def refuse(self, request_id: str, status: int, **headers: str) -> None:
        self.send(wire.Refused(request_id, status, f"{self.name} says {status}", "code", headers))

    def die(self) -> None:
        self._writer.transport.abort()


class FakeHandle:
    """Ray Serve's handle: names the replicas."""

    def __init__(self, replicas: Sequence[FakeReplica]) -> None:
        self.addresses = [each.address for each in replicas]

    @asynccontextmanager
    async def choose_replica(self, ticket: Ticket, *, _reserve: bool) -> AsyncIterator[None]:
        ticket.note(self.addresses)
        yield


def make_request(name: str = "r", prompt: Sequence[int] = (1, 2, 3), session: str = "") -> EngineRequest:
    params = SamplingParams(max_tokens=8)
    return EngineRequest(name, list(prompt), params, DeltaQueue(), "", now(), session=session)


Scenario = Callable[[ClusterClient, list[FakeReplica]], Awaitable[None]]


def play(scenario: Scenario, *names: str) -> None:
    """Run a scenario with a client that is connected to replicas of these names."""

    async def run() -> None:
        replicas = [FakeReplica(name) for name in names]
        for replica in replicas:
            await replica.__aenter__()
        handle = FakeHandle(replicas)
        limits = Limits(max_requests=1 << 30)
        client = ClusterClient(Config(), limits, Admission(limits), lambda: handle, SECRET)
        await client.start()
        while len([link for link in client.links.values() if link.is_open]) < len(replicas):
            await asyncio.sleep(0.01)
        try:
            async with asyncio.timeout(20):
                await scenario(client, replicas)
        finally:
            await client.stop()
            for replica in replicas:
                await replica.__aexit__()

    asyncio.run(run())


async def next_submit(*replicas: FakeReplica) -> tuple[FakeReplica, messages.Submit]:
    """The next request that any of the replicas gets."""
    waits = {asyncio.create_task(replica.commands.get()): replica for replica in replicas}
    done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    (task,) = done
    command = task.result()
    assert isinstance(command, messages.Submit)
    return waits[task], command


async def error_of(request: EngineRequest) -> ApiError:
    while request.error is None:
        await request.output.read_all()
    return request.error


def test_a_request_whose_replica_dies_before_its_first_token_is_answered_by_another() -> None:
    async def scenario(client: ClusterClient, replicas: list[FakeReplica]) -> None:
        request = make_request()
        client.enter([request])
        first, _ = await next_submit(*replicas)
        first.die()
        second, submit = await next_submit(*(each for each in replicas if each is not first))
        second.say(submit.request_id, 5, finish_reason="stop")
        while not request.is_ended:
            await request.output.read_all()
        assert request.error is None
        assert second.name in request.route
        assert "retries=1" in request.route

    play(scenario, "a", "b")


def test_an_answer_that_has_begun_ends_with_an_error_that_says_so() -> None:
    async def scenario(client: ClusterClient, replicas: list[FakeReplica]) -> None:
        request = make_request()
        client.enter([request])
        first, submit = await next_submit(*replicas)
        first.say(submit.request_id, 5, 6)
        await request.output.read_all()
        first.die()
        error = await error_of(request)
        assert "cut off after 2 tokens" in error.message
        assert f"replica {first.name} on node" in error.message
        assert error.code == "replica_died"
        assert request.is_ended
        assert all(replica.commands.empty() for replica in replicas)

    play(scenario, "a", "b")


def test_the_last_replica_dies_and_the_client_is_told_within_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "RETRY_S", 0.1)

    async def scenario(client: ClusterClient, replicas: list[FakeReplica]) -> None:
        request = make_request()
        client.enter([request])
        first, _ = await next_submit(*replicas)
        client._handle_of_engines.addresses.clear()  # type: ignore[union-attr]
        first.die()
        error = await error_of(request)
        assert error.status == 503
        assert "replica a on node" in error.message
        with pytest.raises(ApiError) as refusal:
            client.enter([make_request("later")])
        assert refusal.value.status == 503

    play(scenario, "a")


def test_full_replicas_are_passed_over_until_all_are_full() -> None:
    async def scenario(client: ClusterClient, replicas: list[FakeReplica]) -> None:
        request = make_request()
        client.enter([request])
        first, submit = await next_submit(*replicas)
        first.refuse(submit.request_id, 429, **{"Retry-After": "9"})
        second, submit = await next_submit(*(each for each in replicas if each is not first))
        second.refuse(submit.request_id, 429, **{"Retry-After": "4"})
        error = await error_of(request)
        assert error.status == 429
        assert error.headers == {"Retry-After": "4"}
        assert request.is_ended

    play(scenario, "a", "b")


def test_a_bad_request_is_not_tried_elsewhere() -> None:
    async def scenario(client: ClusterClient, replicas: list[FakeReplica]) -> None:
        request = make_request()
        client.enter([request])
        first, submit = await next_submit(*replicas)
        first.refuse(submit.request_id, 400)
        assert (await error_of(request)).status == 400
        assert all(replica.commands.empty() for replica in replicas)

    play(scenario, "a", "b")


def test_a_silent_replica_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "SILENCE_S", 0.2)
    monkeypatch.setattr(client_module, "WATCH_S", 0.05)

    async def scenario(client: ClusterClient, replicas: list[FakeReplica]) -> None:
        request = make_request()
        client.enter([request])
        first, submit = await next_submit(*replicas)
        first.say(submit.request_id, 5)
        assert "has said nothing for 0.2 s" in (await error_of(request)).message

    play(scenario, "a")


def test_a_cancelled_request_is_aborted_where_it_is() -> None:
    async def scenario(client: ClusterClient, replicas: list[FakeReplica]) -> None:
        request = make_request()
        client.enter([request])
        first, submit = await next_submit(*replicas)
        client.cancel(request)
        assert await first.commands.get() == messages.Abort(submit.request_id, None)
        first.refuse(submit.request_id, 499)
        while not request.is_ended:
            await asyncio.sleep(0.01)
        assert request.error is None
        assert not client._requests
        assert not client._placements

    play(scenario, "a")


def test_the_replica_that_holds_the_prompt_gets_it_and_loses_it_by_eviction() -> None:
    async def scenario(client: ClusterClient, replicas: list[FakeReplica]) -> None:
        prompt = list(range(1, 50))
        hashes = b"".join(each[: messages.HASH_BYTES] for each in block_hashes(prompt, b"", READY.block_size))
        replicas[1].send(messages.CacheChanged(hashes))
        while not client.scoreboard.views["b"].cached:
            await asyncio.sleep(0.01)
        request = make_request(prompt=prompt)
        client.enter([request])
        first, _ = await next_submit(*replicas)
        assert (first.name, request.route) == ("b", "b, reason=prefix, cached=48")
        replicas[1].send(messages.CacheChanged(b"", hashes))
        while client.scoreboard.views["b"].cached:
            await asyncio.sleep(0.01)
        assert client.scoreboard.views["b"].count_cached(wire.split_hashes(hashes)) == 0

    play(scenario, "a", "b")


def test_a_peer_without_the_secret_is_refused() -> None:
    async def run() -> None:
        async with FakeReplica("stranger", secret=b"x" * 32) as stranger:
            handle = FakeHandle([stranger])
            limits = Limits()
            client = ClusterClient(Config(), limits, Admission(limits), lambda: handle, SECRET)
            starting = asyncio.create_task(client.start())
            await asyncio.sleep(0.3)
            assert not starting.done()
            assert not any(link.is_open for link in client.links.values())
            starting.cancel()
            await client.stop()

    asyncio.run(run())


def test_a_router_that_fails_keeps_no_request_from_the_replicas_that_it_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "DISCOVERY_S", 0.05)

    async def scenario(client: ClusterClient, replicas: list[FakeReplica]) -> None:
        handle = client._handle_of_engines
        handle.addresses = None  # type: ignore[union-attr]
        await asyncio.sleep(0.3)
        client.enter([make_request()])
        await next_submit(*replicas)

    play(scenario, "a")


def test_a_replica_that_ray_serve_stops_gets_no_more_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "RETRY_S", 0.2)
    monkeypatch.setattr(client_module, "DISCOVERY_S", 0.05)

    async def scenario(client: ClusterClient, replicas: list[FakeReplica]) -> None:
        handle = client._handle_of_engines
        handle.addresses = handle.addresses[1:]  # type: ignore[union-attr]
        await asyncio.sleep(0.3)
        for number in range(4):
            client.enter([make_request(f"r{number}")])
            assert (await next_submit(*replicas))[0] is replicas[1]
        handle.addresses = []  # type: ignore[union-attr]
        await asyncio.sleep(0.3)
        request = make_request("last")
        client.enter([request])
        assert (await error_of(request)).status == 503

    play(scenario, "a", "b")
