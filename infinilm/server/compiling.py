"""Grammars are compiled in threads. Tenants take turns, and a request that is aborted takes no more time."""

import logging
import socket
from collections import deque
from dataclasses import dataclass, field
from threading import Condition, Thread

from infinilm.sampling_params import SamplingParams
from infinilm.server.messages import Submit
from infinilm.structured.compiler import GrammarCompiler
from infinilm.structured.grammar_sandbox import Cancellation, TrialCancelledError, TrialTimeoutError

logger = logging.getLogger(__name__)

QUICK_TRIAL_S = 0.3
"""The quick thread leaves what takes longer to the patient one. Most grammars take a tenth of it."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A request whose grammar is ready, or the reason why there is none."""

    request: Submit
    params: SamplingParams
    error: Exception | None


@dataclass(slots=True, eq=False)
class _Job:
    """A request whose grammar is to be compiled."""

    request: Submit
    params: SamplingParams
    cancellation: Cancellation = field(default_factory=Cancellation)

    @property
    def tenant(self) -> str:
        return self.request.cache_salt or ""


class _TenantQueue:
    """Jobs in the order of their arrival, the tenants in turn."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[_Job]] = {}
        """The tenant whose turn it is comes first."""

    def __bool__(self) -> bool:
        return bool(self._queues)

    def push(self, job: _Job) -> None:
        self._queues.setdefault(job.tenant, deque()).append(job)

    def pop(self) -> _Job:
        tenant = next(iter(self._queues))
        queue = self._queues.pop(tenant)
        job = queue.popleft()
        if queue:
            self._queues[tenant] = queue  # at the end: the others come first
        return job

    def remove(self, job: _Job) -> None:
        queue = self._queues.get(job.tenant, deque())
        if job in queue:
            queue.remove(job)
            if not queue:
                del self._queues[job.tenant]


class GrammarQueue:
    """Requests whose grammar is being compiled. The compiler keeps what it made, so that asking again costs nothing.

    Two threads compile. The quick one gives up after `QUICK_TRIAL_S`; the grammar then waits for the patient one,
    which takes such grammars first. So a slow grammar delays the others by that much at most.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._jobs: dict[str, _Job] = {}
        """Those not done, by request id."""
        self._new = _TenantQueue()
        self._slow = _TenantQueue()
        self._done: deque[Compiled] = deque()
        self._needs_process = True
        """Whether a process that tries out grammars is to be started: the last one may be gone."""
        self._is_closed = False
        self._changed = Condition()
        """Guards all of the above."""
        self.bell, self._bell_rope = socket.socketpair()
        """Can be read from when something is done."""
        self.bell.setblocking(False)
        self._threads = [
            Thread(target=self._compile_jobs, args=(True,), name="grammars-patient", daemon=True),
            Thread(target=self._compile_jobs, args=(False,), name="grammars-quick", daemon=True),
            Thread(target=self._keep_process_ready, name="grammars-process", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def add(self, request: Submit, params: SamplingParams) -> None:
        """Begin with a request's grammar."""
        job = _Job(request, params)
        with self._changed:
            self._jobs[request.request_id] = job
            self._new.push(job)
            self._changed.notify_all()

    def cancel(self, request_id: str) -> bool:
        """Forget a request and stop compiling its grammar; False if it is not being compiled."""
        with self._changed:
            job = self._jobs.pop(request_id, None)
            if job is None:
                return False
            self._new.remove(job)
            self._slow.remove(job)
        job.cancellation.cancel()
        return True

    def take(self) -> list[Compiled]:
        """The requests that are ready."""
        try:
            self.bell.recv(4096)
        except BlockingIOError:
            return []
        with self._changed:
            ready, self._done = self._done, deque()
            return [each for each in ready if self._jobs.pop(each.request.request_id, None) is not None]

    def close(self) -> None:
        """End the threads."""
        with self._changed:
            self._is_closed = True
            jobs, self._jobs = list(self._jobs.values()), {}
            self._changed.notify_all()
        for job in jobs:
            job.cancellation.cancel()

    def _compile_jobs(self, is_patient: bool) -> None:
        while (job := self._next_job(is_patient)) is not None:
            self._compile(job, is_patient)

    def _next_job(self, is_patient: bool) -> _Job | None:
        with self._changed:
            while not self._is_closed:
                queue = self._slow if is_patient and self._slow else self._new
                if queue:
                    return queue.pop()
                self._changed.wait()
            return None

    def _compile(self, job: _Job, is_patient: bool) -> None:
        error = None
        try:
            assert job.params.structured is not None
            limit_s = None if is_patient else QUICK_TRIAL_S
            self._compiler.compile(job.params.structured, limit_s, job.cancellation)
        except Exception as failed:
            error = failed
        with self._changed:
            self._needs_process |= error is not None
            if isinstance(error, TrialTimeoutError) and not is_patient and job.request.request_id in self._jobs:
                self._slow.push(job)
            elif not isinstance(error, TrialCancelledError):
                self._done.append(Compiled(job.request, job.params, error))
                self._bell_rope.send(b"!")
            self._changed.notify_all()

    def _keep_process_ready(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._needs_process or self._is_closed)
                if self._is_closed:
                    return
                self._needs_process = False
            try:
                self._compiler.prepare()
            except Exception:  # the sender of the next grammar will be told
                logger.exception("the process that tries out grammars can't be started")
