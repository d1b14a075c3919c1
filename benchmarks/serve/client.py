"""Sends requests to a server according to a load, and records the result of each."""

import asyncio
import gc
import resource
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, islice
from time import perf_counter, process_time

from benchmarks.serve.events import INTERRUPTED, EventReader, Trace
from benchmarks.serve.http_connection import BodyReader, Connection, Connector, Endpoint, Reader
from benchmarks.serve.work import Load, Work

LOOK_SECONDS = 1.0
"""How often the client measures its own CPU use."""
PAUSE_SECONDS = 0.1
"""The pause of a closed loop's stream after an error, because a refusal may be immediate."""
MIN_STOCK = 16


@dataclass(frozen=True, slots=True)
class Plan:
    endpoint: Endpoint
    work: Work
    load: Load
    timeout: float = 600.0
    """Seconds that a request may take."""


@dataclass(slots=True)
class Measured:
    traces: list[Trace] = field(default_factory=list)
    cpu_share: float = 0.0
    """Share of one core that the client, or the busiest of its processes, used."""
    peak_cpu_share: float = 0.0
    """The same, in the busiest second."""
    is_interrupted: bool = False


class Client:
    """Sends requests over reused connections."""

    def __init__(self, endpoint: Endpoint, timeout: float) -> None:
        self._endpoint = endpoint
        self._timeout = timeout
        self._connector = Connector(endpoint)
        self._idle: list[Connection] = []

    async def get(self, path: str) -> BodyReader:
        """A whole reply. Raises an `OSError` if there is none."""
        reader = BodyReader()
        async with asyncio.timeout(self._timeout):
            await self._exchange(self._endpoint.request(path), reader)
        return reader

    async def stream(self, request: bytes, trace: Trace) -> None:
        """Send a request and follow its answer. Errors are recorded in the trace."""
        reader = EventReader(trace)
        trace.start = trace.end = perf_counter()
        try:
            async with asyncio.timeout(self._timeout):
                await self._exchange(request, reader)
            reader.conclude()
        except TimeoutError:
            trace.fail("timeout", f"not answered within {self._timeout:g} s")
        except OSError as error:
            trace.fail("connection lost" if isinstance(error, ConnectionResetError) else "no connection", error)
        except asyncio.CancelledError:
            trace.fail(INTERRUPTED)
            raise

    async def open(self, number: int) -> None:
        """Open connections in advance. Failures are ignored: they recur, and are reported, when one is needed."""
        opened = await asyncio.gather(*(self._connector.connect() for _ in range(number)), return_exceptions=True)
        self._idle += [connection for connection in opened if isinstance(connection, Connection)]

    async def _exchange(self, request: bytes, reader: Reader) -> None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_idle:
                continue
            try:
                await connection.exchange(request, reader)
            except ConnectionResetError:
                if connection.has_reply:
                    raise
                continue  # the server closed it just before it was reused
            self._keep(connection)
            return
        connection = await self._connector.connect()
        await connection.exchange(request, reader)
        self._keep(connection)

    def _keep(self, connection: Connection) -> None:
        if connection.is_idle:
            self._idle.append(connection)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


class Stock:
    """Requests made in advance, so that streams that need one at the same time don't wait for each other."""

    def __init__(self, make: Callable[[int], bytes], indices: Iterator[int], size: int) -> None:
        self._make = make
        self._indices = indices
        self._size = size
        self._made: deque[tuple[int, bytes]] = deque()
        self._has_room = asyncio.Event()
        while len(self._made) < size:
            self._add()

    def pop(self) -> tuple[int, bytes]:
        """The next request and its number."""
        if not self._made:
            self._add()
        self._has_room.set()
        return self._made.popleft()

    async def keep_full(self) -> None:
        """Make further requests, one at a time, between other tasks."""
        while True:
            await self._has_room.wait()
            self._has_room.clear()
            while len(self._made) < self._size:
                self._add()
                await asyncio.sleep(0)

    def _add(self) -> None:
        index = next(self._indices)
        self._made.append((index, self._make(index)))


class LoadRun:
    """One run of a plan, or one of several equal shares of it."""

    def __init__(self, plan: Plan, share: int = 0, num_shares: int = 1) -> None:
        self.num_done = 0
        self.num_errors = 0
        self._begin = 0.0
        self._plan = plan
        self._share = share
        self._num_shares = num_shares
        self._num_at_once = len(range(share, plan.load.streams or plan.load.burst or 0, num_shares))
        self._client = Client(plan.endpoint, plan.timeout)
        self._stock = Stock(self._make_request, count(share, num_shares), max(MIN_STOCK, self._num_at_once))
        self._tasks: set[asyncio.Task[None]] = set()
        self._measured = Measured()

    @property
    def num_open(self) -> int:
        return len(self._measured.traces) - self.num_done

    @property
    def seconds(self) -> float:
        return perf_counter() - self._begin

    async def prepare(self) -> None:
        """Do slow work before the run: open the first connections, collect garbage."""
        _allow_many_files()
        await self._client.open(self._num_at_once)
        gc.collect()

    async def run(self, begin: float, on_look: Callable[["LoadRun"], None] | None = None) -> Measured:
        """Send requests from `begin` (of `perf_counter`) on. Ends when all are answered, or after `stop`."""
        self._begin = begin
        gc.disable()  # a collection would hold up the clocks of all streams
        await asyncio.sleep(max(0.0, begin - perf_counter()))
        cpu_begin = process_time()
        helpers = [asyncio.create_task(self._watch(on_look)), asyncio.create_task(self._stock.keep_full())]
        try:
            if self._plan.load.streams is None:
                self._start(self._send_on_time())
            else:
                for _ in range(self._num_at_once):
                    self._start(self._keep_busy())
            while self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            for helper in helpers:
                helper.cancel()
            gc.enable()
            self._client.close()
        measured = self._measured
        measured.cpu_share = (process_time() - cpu_begin) / (perf_counter() - begin)
        measured.peak_cpu_share = max(measured.peak_cpu_share, measured.cpu_share)
        return measured

    def stop(self) -> None:
        """Cancel all open requests."""
        self._measured.is_interrupted = True
        for task in self._tasks:
            task.cancel()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep_busy(self) -> None:
        """One stream of a closed loop."""
        load = self._plan.load
        while load.seconds is None or self.seconds < load.seconds:
            index, request = self._stock.pop()
            if load.requests is not None and index >= load.requests:
                return
            trace = Trace(index, perf_counter())
            await self._send(request, trace)
            if trace.error is not None:
                await asyncio.sleep(PAUSE_SECONDS)

    async def _send_on_time(self) -> None:
        """An open loop: requests don't wait for answers."""
        plan = self._plan
        for offset in islice(plan.load.arrivals(plan.work.seed), self._share, None, self._num_shares):
            index, request = self._stock.pop()
            trace = Trace(index, perf_counter())
            if offset:
                await asyncio.sleep(max(0.0, self._begin + offset - perf_counter()))
                trace.lateness = perf_counter() - self._begin - offset
            self._start(self._send(request, trace))

    def _make_request(self, index: int) -> bytes:
        work = self._plan.work
        return self._plan.endpoint.request(work.path, work.body(index))

    async def _send(self, request: bytes, trace: Trace) -> None:
        self._measured.traces.append(trace)
        try:
            await self._client.stream(request, trace)
        finally:
            self.num_done += 1
            self.num_errors += trace.error is not None

    async def _watch(self, on_look: Callable[["LoadRun"], None] | None) -> None:
        """Measure the client's own CPU use."""
        while True:
            before, cpu_before = perf_counter(), process_time()
            await asyncio.sleep(LOOK_SECONDS)
            share = (process_time() - cpu_before) / (perf_counter() - before)
            self._measured.peak_cpu_share = max(self._measured.peak_cpu_share, share)
            if on_look is not None:
                on_look(self)


def _allow_many_files() -> None:
    """Raise the limit of open connections as far as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems refuse the limit that they report
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
