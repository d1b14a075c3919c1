"""The HTTP process's client of the engine: sends requests, receives deltas, restarts an engine that dies or hangs."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from typing import Self

from infinilm.config import Config
from infinilm.engine.stats import EngineStats
from infinilm.errors import EngineError
from infinilm.framing import ChannelClosedError, frame, read_frame
from infinilm.outputs import AnswerDelta
from infinilm.processes import ChildProcess
from infinilm.server import messages
from infinilm.server.admission import Admission
from infinilm.server.api_errors import ApiError, bad_request, shutting_down, unavailable
from infinilm.server.engine_request import EngineRequest, now
from infinilm.server.engine_start import SOCKET_BUFFER_BYTES, start_engine_process
from infinilm.server.settings import Limits

logger = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 5.0
"""How long a process may take to end after it has closed its socket or was told to stop."""
FIRST_DELAY_S, MAX_DELAY_S = 0.5, 60.0
STOP_TIMEOUT_S = 5.0
STEADY_S = 60.0
"""An engine that ran for this long is restarted after `FIRST_DELAY_S` again."""
MAX_HEARTBEAT_S = 1.0


class EngineHandle:
    """One run of the engine's process, and the messages to and from it."""

    def __init__(self, process: ChildProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, process: ChildProcess | None = None) -> Self:
        """`process`: one that is already started; by default a new one."""
        process = process or start_engine_process()
        process.socket.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=process.socket, limit=SOCKET_BUFFER_BYTES)
        return cls(process, reader, writer)

    def send(self, command: messages.Command) -> None:
        """Send a command. It is dropped if the process has ended."""
        if not self._writer.is_closing():
            self._writer.write(frame(messages.encode_message(command)))

    async def receive(self) -> messages.Report | None:
        """Wait for the next report; None if the process has ended."""
        try:
            report: messages.Report = messages.decode_report(await read_frame(self._reader))
        except ChannelClosedError:
            return None
        return report

    async def end(self) -> str:
        """Wait for the process to end, kill it if it does not, and describe how it ended."""
        await asyncio.to_thread(self.process.wait, EXIT_TIMEOUT_S)
        self._writer.close()
        return f"the engine's process {self.process.describe_end()}"


class State(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


class EngineClient:
    """Owns the engine's process and submits requests to it as `Admission` allows."""

    def __init__(
        self, config: Config, limits: Limits, admission: Admission, process: ChildProcess | None = None
    ) -> None:
        """`process`: an engine process that is already started, for the first start."""
        self._process = process
        self.state = State.STARTING
        self.is_draining = False
        """Whether new requests are refused because the server is shutting down."""
        self.cause: str | None = None
        """Why the engine died the last time."""
        self.num_restarts = 0
        self.ready: messages.Ready | None = None
        self.stats = EngineStats()
        self.failed = asyncio.Event()
        """Set when the engine can't be started again: `cause` says why."""
        self.cache_listener: Callable[[messages.CacheChanged], None] | None = None
        """Called when the prefix cache has changed. Set it before `start`."""
        self._admission = admission
        self._config = config
        self._step_timeout = limits.step_timeout
        self._timing = messages.Timing(
            limits.mixed_step_time, limits.prefill_step_time, min(MAX_HEARTBEAT_S, limits.step_timeout / 8)
        )
        self._num_reports = 0
        self._requests: dict[str, EngineRequest] = {}
        """The engine's requests, by id."""
        self._handle: EngineHandle | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    # --- the process ------------------------------------------------------------------------------------

    async def start(self) -> messages.Ready:
        """Load the model. If this first load fails, the error is raised and there is no second try."""
        handle = await self._launch()
        report = await handle.receive()
        if not isinstance(report, messages.Ready):
            end = await handle.end()
            raise EngineError(
                report.error if isinstance(report, messages.Failed) else f"the model was not loaded: {end}"
            )
        self._note_ready(report)
        self._supervisor = asyncio.create_task(self._supervise(handle))
        return report

    async def stop(self) -> None:
        self.state = State.STOPPED
        self._stopping.set()
        if self._handle is not None:
            if self._supervisor is not None:
                self._handle.send(messages.Stop())
                await asyncio.wait({self._supervisor}, timeout=STOP_TIMEOUT_S)
                self._handle.process.kill()  # if it has not ended: it may be loading, or in a long step
                await self._supervisor
            else:  # it is loading
                self._handle.process.kill()
                await self._handle.end()
        self._end_all(shutting_down())

    def check_open(self) -> None:
        """Raise if no request can be served now."""
        if self.is_draining:
            raise shutting_down()
        if self.state is not State.READY:
            raise self.down_error()

    def down_error(self) -> ApiError:
        """The error for a request while there is no engine."""
        because = f": {self.cause}" if self.cause else ""
        if self.state is State.FAILED:
            return unavailable(f"the engine can't be started again{because}", retry_after=60, code="engine_failed")
        return unavailable(f"the engine is {self.state}{because}; try again shortly", retry_after=5)

    def _note_ready(self, report: messages.Ready) -> None:
        self.ready = report
        self.state = State.READY
        self.stats = EngineStats(num_blocks=report.num_blocks, num_free_blocks=report.num_blocks)
        self._admission.set_capacity(report.max_num_seqs, report.max_num_batched_tokens)

    async def _supervise(self, handle: EngineHandle) -> None:
        """Follow the engine until it is told to stop. When it dies, restart it, with a longer delay each time."""
        delay = FIRST_DELAY_S
        while True:
            start_time = now()
            self.cause, is_permanent = await self._follow(handle)
            self.stats = EngineStats()
            if is_permanent and not self._stopping.is_set():
                self.state = State.FAILED
                self._admission.fail_waiting(self.down_error())
                self._end_all(self.down_error())
                self.failed.set()
                return
            while not self._stopping.is_set():
                self.state = State.RESTARTING
                if now() - start_time > STEADY_S:
                    delay = FIRST_DELAY_S
                logger.error("%s; starting it again in %.1f s", self.cause, delay)
                self._admission.fail_waiting(self.down_error())  # it is not known how long the restart takes
                self._end_all(ApiError(500, f"the engine died: {self.cause}", code="engine_died"))
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), delay)
                    return
                delay = min(delay * 2, MAX_DELAY_S)
                self.num_restarts += 1
                try:
                    handle = await self._launch()
                    break
                except OSError as error:
                    self.cause = f"the engine's process can't be started: {error}"
            else:
                return

    async def _launch(self) -> EngineHandle:
        """Start a process and let it load the model."""
        process, self._process = self._process, None
        self._handle = await EngineHandle.start(process)
        self._handle.send(
            messages.Start(messages.config_to_wire(self._config), self._timing, self.cache_listener is not None)
        )
        return self._handle

    async def _follow(self, handle: EngineHandle) -> tuple[str, bool]:
        """Handle reports until the process ends. Returns why it ended, and whether a restart would fail too."""
        failure, is_permanent = None, False
        watcher = asyncio.create_task(self._kill_if_hung(handle))
        while (report := await handle.receive()) is not None:
            self._num_reports += 1
            if isinstance(report, messages.Failed):
                failure, is_permanent = report.error, report.is_permanent
            else:
                self._handle_report(report)
        if watcher.done():
            failure = (
                f"the engine made no progress for {self._step_timeout:g} s and was killed; if its steps can take "
                "longer, raise --limit step_timeout"
            )
        watcher.cancel()
        end = await handle.end()
        return failure or end, is_permanent

    async def _kill_if_hung(self, handle: EngineHandle) -> None:
        """Kill the engine when it has been silent for `step_timeout`, and return. Loading may take any time.

        Silence is counted in wake-ups of this task, not by a clock. So time in which this process did not run (it was
        stopped, the container paused, the machine asleep) does not count.
        """
        interval = self._timing.heartbeat
        num_silent, num_seen = 0, -1
        while num_silent * interval < self._step_timeout:
            await asyncio.sleep(interval)
            is_silent = self.state is State.READY and self._num_reports == num_seen
            num_silent, num_seen = num_silent + 1 if is_silent else 0, self._num_reports
        handle.process.kill()

    # --- requests ---------------------------------------------------------------------------------------

    def enter(self, requests: list[EngineRequest]) -> None:
        """Accept the prompts of one HTTP request, all or none."""
        self.check_open()
        self._admission.enter(requests)
        self._submit_ready()

    def cancel(self, request: EngineRequest, answer: int | None = None) -> None:
        """End a request, or one of its answers, early. One that the engine has ends when the engine reports it."""
        if request.is_ended:
            return
        if request.submit_time is None:
            self._admission.remove(request)
        elif request.request_id in self._requests and self._handle is not None:
            self._handle.send(messages.Abort(request.request_id, answer))

    def fail_all(self, error: ApiError) -> None:
        self._admission.fail_waiting(error)
        for request in self._requests.values():
            request.fail(error)
            self.cancel(request)

    def _submit_ready(self) -> None:
        """Submit the requests that the engine can begin soon."""
        while self.state is State.READY and (request := self._admission.pop_ready()) is not None:
            assert self._handle is not None
            request.submit_time = now()
            salt = request.tenant or None
            try:
                params = messages.params_to_wire(request.params)
                self._handle.send(messages.Submit(request.request_id, request.prompt_token_ids, params, salt))
            except (ValueError, OverflowError) as error:  # a number or text that can't be encoded in a message
                self._end(request, bad_request(f"the request can't be passed on: {error}"))
            else:
                self._requests[request.request_id] = request

    def _handle_report(self, report: messages.Report) -> None:
        if isinstance(report, messages.Stepped):
            time = now()
            for delta in report.deltas:
                self._handle_delta(delta, time)
        elif isinstance(report, messages.Stats):
            self.stats = report.stats
        elif isinstance(report, messages.Rejected):
            if request := self._requests.pop(report.request_id, None):
                self._end(request, ApiError(500 if report.is_bug else 400, report.error))
        elif isinstance(report, messages.CacheChanged):
            if self.cache_listener is not None:
                self.cache_listener(report)
        elif isinstance(report, messages.Ready):
            self._note_ready(report)
        self._submit_ready()

    def _handle_delta(self, delta: AnswerDelta, time: float) -> None:
        request = self._requests.get(delta.request_id)
        if request is None:
            return
        is_first = request.first_time is None
        request.append_delta(delta, time)
        if is_first and request.first_time is not None:
            self._admission.note_first_token(request)
        if request.num_open == 0:
            del self._requests[delta.request_id]
            self._admission.note_end(request)

    def _end_all(self, error: ApiError) -> None:
        """End the requests of an engine that has ended."""
        requests, self._requests = self._requests, {}
        for request in requests.values():
            self._end(request, error)

    def _end(self, request: EngineRequest, error: ApiError) -> None:
        request.fail(error)
        self._admission.note_end(request)
