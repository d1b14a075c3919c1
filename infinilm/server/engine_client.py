"""The engine as the HTTP process sees it: jobs go in, deltas come back; it is started again when it dies or hangs."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum

from infinilm.config import Config
from infinilm.engine.stats import EngineStats
from infinilm.errors import EngineError
from infinilm.server.api_errors import ApiError, bad_request, shutting_down, unavailable
from infinilm.server.engine_handle import EngineChild
from infinilm.server.jobs import Job, now
from infinilm.server.messages import (
    Abort,
    Delta,
    Failed,
    Ready,
    Rejected,
    Report,
    Start,
    Stats,
    Stepped,
    Stop,
    Submit,
    Timing,
    config_to_wire,
    params_to_wire,
)
from infinilm.server.settings import Limits

logger = logging.getLogger(__name__)

FIRST_DELAY_S, MAX_DELAY_S = 0.5, 60.0
STOP_TIMEOUT_S = 5.0
STEADY_S = 60.0
"""An engine that ran for so long has earned a quick restart."""
MAX_HEARTBEAT_S = 1.0


class State(StrEnum):
    """How the engine is."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


class EngineClient:
    """Owns the engine's process. `on_start`, `on_end` and `on_change` are callbacks of the admission."""

    def __init__(self, config: Config, limits: Limits) -> None:
        self.state = State.STARTING
        self.cause: str | None = None
        """Why the engine died the last time."""
        self.num_restarts = 0
        self.ready: Ready | None = None
        self.stats = EngineStats()
        self.on_start: Callable[[Job], None] = _ignore
        """The engine has drawn a job's first token."""
        self.on_end: Callable[[Job], None] = _ignore
        """A job has ended, one way or another."""
        self.on_change: Callable[[], None] = lambda: None
        """The engine has become ready, or has died."""
        self.failed = asyncio.Event()
        """Set when the engine can't be started again: `cause` says why."""
        self._config = config
        self._step_timeout = limits.step_timeout
        self._timing = Timing(
            limits.mixed_step_time, limits.prefill_step_time, min(MAX_HEARTBEAT_S, limits.step_timeout / 8)
        )
        self._num_reports = 0
        self._jobs: dict[str, Job] = {}
        self._child: EngineChild | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    # --- the process ------------------------------------------------------------------------------------

    async def start(self) -> Ready:
        """Load the model. If that fails the first time there is no second: the error says why."""
        child = await self._launch()
        report = await child.receive()
        if not isinstance(report, Ready):
            end = await child.end()
            raise EngineError(report.error if isinstance(report, Failed) else f"the model was not loaded: {end}")
        self._be_ready(report)
        self._supervisor = asyncio.create_task(self._supervise(child))
        return report

    async def stop(self) -> None:
        """End the process, and with it all jobs."""
        self.state = State.STOPPED
        self._stopping.set()
        if self._supervisor is not None and self._child is not None:
            self._child.send(Stop())
            await asyncio.wait({self._supervisor}, timeout=STOP_TIMEOUT_S)
            self._child.kill()  # if it is still there: it may be loading, or in a long step
            await self._supervisor
        elif self._child is not None:  # in the middle of loading
            self._child.kill()
            await self._child.end()
        self._end_all(shutting_down())

    @property
    def pid(self) -> int | None:
        """The engine's process."""
        return self._child.pid if self._child is not None else None

    def down_error(self) -> ApiError:
        """What to tell a request while there is no engine."""
        because = f": {self.cause}" if self.cause else ""
        if self.state is State.FAILED:
            return unavailable(f"the engine can't be started again{because}", retry_after=60, code="engine_failed")
        return unavailable(f"the engine is {self.state}{because}; try again shortly", retry_after=5)

    def _be_ready(self, report: Ready) -> None:
        self.ready = report
        self.state = State.READY
        self.stats = EngineStats(num_blocks=report.num_blocks, num_free_blocks=report.num_blocks)
        self.on_change()

    async def _supervise(self, child: EngineChild) -> None:
        """Follow the engine until it is told to stop; whenever it dies, start it again, a little later each time."""
        delay = FIRST_DELAY_S
        while True:
            start_time = now()
            self.cause, is_permanent = await self._follow(child)
            self.stats = EngineStats()  # what it had is gone with it
            if is_permanent and not self._stopping.is_set():
                self._fail()
                return
            while not self._stopping.is_set():
                self.state = State.RESTARTING
                if now() - start_time > STEADY_S:
                    delay = FIRST_DELAY_S
                logger.error("%s; starting it again in %.1f s", self.cause, delay)
                self.on_change()
                self._end_all(ApiError(500, f"the engine died: {self.cause}", code="engine_died"))
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), delay)
                    return
                delay = min(delay * 2, MAX_DELAY_S)
                self.num_restarts += 1
                try:
                    child = await self._launch()
                    break
                except OSError as error:
                    self.cause = f"the engine's process can't be started: {error}"
            else:
                return

    async def _launch(self) -> EngineChild:
        """Start a process, and have it load the model."""
        self._child = await EngineChild.start()
        self._child.send(Start(config_to_wire(self._config), self._timing))
        return self._child

    def _fail(self) -> None:
        """Give the engine up: another start would fail the same way."""
        self.state = State.FAILED
        self.on_change()
        self._end_all(self.down_error())
        self.failed.set()

    async def _follow(self, child: EngineChild) -> tuple[str, bool]:
        """Take in reports until there are no more; why that is, and whether another start would fail the same way."""
        failure, is_permanent = None, False
        watcher = asyncio.create_task(self._kill_if_hung(child))
        while (report := await child.receive()) is not None:
            self._num_reports += 1
            if isinstance(report, Failed):
                failure, is_permanent = report.error, report.is_permanent
            else:
                self._take(report)
        if watcher.done():
            failure = (
                f"the engine made no progress for {self._step_timeout:g} s and was killed; if its steps can take "
                "longer, raise --limit step_timeout"
            )
        watcher.cancel()
        end = await child.end()
        return failure or end, is_permanent

    async def _kill_if_hung(self, child: EngineChild) -> None:
        """Return once the engine was silent for `step_timeout`, after killing it. Loading may take any time.

        Silence is counted in waking intervals of this task. So time in which this process did not run itself (it was
        stopped, the container paused, the machine asleep) does not count.
        """
        interval = self._timing.heartbeat
        num_silent, num_seen = 0, -1
        while num_silent * interval < self._step_timeout:
            await asyncio.sleep(interval)
            is_silent = self.state is State.READY and self._num_reports == num_seen
            num_silent, num_seen = num_silent + 1 if is_silent else 0, self._num_reports
        child.kill()

    # --- jobs -------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Hand a job to the engine."""
        if self._child is None or self.state is not State.READY:
            self._end(job, self.down_error())
            return
        job.submit_time = now()
        try:
            salt = job.tenant or None
            self._child.send(Submit(job.request_id, job.prompt_token_ids, params_to_wire(job.params), salt))
        except (ValueError, OverflowError) as error:  # a number or text that no message can hold
            self._end(job, bad_request(f"the request can't be passed on: {error}"))
            return
        self._jobs[job.request_id] = job

    def abort(self, job: Job, answer: int | None = None) -> None:
        """End a job that the engine has, or one of its answers. It is over once the engine says so."""
        if job.request_id in self._jobs and self._child is not None:
            self._child.send(Abort(job.request_id, answer))

    def _take(self, report: Report) -> None:
        if isinstance(report, Stepped):
            time = now()
            for delta in report.deltas:
                self._take_delta(delta, time)
        elif isinstance(report, Stats):
            self.stats = report.stats
        elif isinstance(report, Rejected):
            if job := self._jobs.pop(report.request_id, None):
                self._end(job, ApiError(500 if report.is_bug else 400, report.error))
        elif isinstance(report, Ready):
            self._be_ready(report)

    def _take_delta(self, delta: Delta, time: float) -> None:
        job = self._jobs.get(delta.request_id)
        if job is None:
            return
        is_first = job.first_time is None
        if delta.error is not None:
            job.fail(ApiError(500, f"the engine gave the request up: {delta.error}", code="engine_error"))
        job.take(delta, time)
        if is_first and job.first_time is not None:
            self.on_start(job)
        if job.num_open == 0:
            del self._jobs[delta.request_id]
            self._end(job, None)

    def fail_all(self, error: ApiError) -> None:
        """End all jobs with an error."""
        for job in self._jobs.values():
            job.fail(error)
            self.abort(job)

    def _end_all(self, error: ApiError) -> None:
        """The engine is gone, and its jobs with it."""
        jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            self._end(job, error)

    def _end(self, job: Job, error: ApiError | None) -> None:
        if error is not None:
            job.fail(error)
        job.is_ended = True
        self.on_end(job)


def _ignore(job: Job) -> None:
    pass
