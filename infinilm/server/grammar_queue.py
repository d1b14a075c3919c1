"""Compiles grammars in threads. Tenants take turns, and aborting a request stops its compilation."""

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
"""The quick thread leaves slower grammars to the patient one. Most grammars take a tenth of this."""


@dataclass(slots=True, eq=False)
class GrammarJob:
    """A request whose grammar is waiting, compiled or refused."""

    request: Submit
    params: SamplingParams
    error: Exception | None = None
    cancellation: Cancellation = field(default_factory=Cancellation)

    @property
    def tenant(self) -> str:
        return self.request.cache_salt or ""


class _TenantQueue:
    """Requests in the order of their arrival; tenants take turns."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[GrammarJob]] = {}
        """By tenant. The first tenant is the next one in turn."""

    def __bool__(self) -> bool:
        return bool(self._queues)

    def push(self, pending: GrammarJob) -> None:
        self._queues.setdefault(pending.tenant, deque()).append(pending)

    def pop(self) -> GrammarJob:
        tenant = next(iter(self._queues))
        queue = self._queues.pop(tenant)
        pending = queue.popleft()
        if queue:
            self._queues[tenant] = queue  # at the end: the other tenants are next
        return pending

    def remove(self, pending: GrammarJob) -> None:
        queue = self._queues.get(pending.tenant, deque())
        if pending in queue:
            queue.remove(pending)
            if not queue:
                del self._queues[pending.tenant]


class GrammarQueue:
    """Requests whose grammar is being compiled. The compiler caches grammars, so compiling one again costs nothing.

    Two threads compile. The quick one gives up after `QUICK_TRIAL_S`; the grammar then waits for the patient one,
    which compiles such grammars first. So a slow grammar delays the others by `QUICK_TRIAL_S` at most.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._pending: dict[str, GrammarJob] = {}
        """The jobs by request id."""
        self._new = _TenantQueue()
        self._slow = _TenantQueue()
        self._done: deque[GrammarJob] = deque()
        self._needs_process = True
        """Whether to start a process that tries out grammars: the last one may have ended."""
        self._is_closed = False
        self._changed = Condition()
        """Guards all of the above."""
        self.bell, self._bell_sender = socket.socketpair()
        """Readable when a grammar is done."""
        self.bell.setblocking(False)
        self._threads = [
            Thread(target=self._compile_all, args=(True,), name="grammars-patient", daemon=True),
            Thread(target=self._compile_all, args=(False,), name="grammars-quick", daemon=True),
            Thread(target=self._keep_process_ready, name="grammars-process", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def add(self, request: Submit, params: SamplingParams) -> None:
        pending = GrammarJob(request, params)
        with self._changed:
            self._pending[request.request_id] = pending
            self._new.push(pending)
            self._changed.notify_all()

    def cancel(self, request_id: str) -> bool:
        """Remove a request and stop compiling its grammar. Returns False if there is no such request."""
        with self._changed:
            pending = self._pending.pop(request_id, None)
            if pending is None:
                return False
            self._new.remove(pending)
            self._slow.remove(pending)
        pending.cancellation.cancel()
        return True

    def pop_compiled(self) -> list[GrammarJob]:
        """Remove and return the requests whose grammars are compiled or refused."""
        try:
            self.bell.recv(4096)
        except BlockingIOError:
            return []
        with self._changed:
            ready, self._done = self._done, deque()
            return [each for each in ready if self._pending.pop(each.request.request_id, None) is not None]

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            cancelled, self._pending = list(self._pending.values()), {}
            self._changed.notify_all()
        for pending in cancelled:
            pending.cancellation.cancel()

    def _compile_all(self, is_patient: bool) -> None:
        while (pending := self._next_pending(is_patient)) is not None:
            self._compile(pending, is_patient)

    def _next_pending(self, is_patient: bool) -> GrammarJob | None:
        with self._changed:
            while not self._is_closed:
                queue = self._slow if is_patient and self._slow else self._new
                if queue:
                    return queue.pop()
                self._changed.wait()
            return None

    def _compile(self, pending: GrammarJob, is_patient: bool) -> None:
        error = None
        try:
            assert pending.params.structured is not None
            limit_s = None if is_patient else QUICK_TRIAL_S
            self._compiler.compile(pending.params.structured, limit_s, pending.cancellation)
        except Exception as failed:
            error = failed
        with self._changed:
            self._needs_process |= error is not None
            if isinstance(error, TrialTimeoutError) and not is_patient and pending.request.request_id in self._pending:
                self._slow.push(pending)
            elif not isinstance(error, TrialCancelledError):
                pending.error = error
                self._done.append(pending)
                self._bell_sender.send(b"!")
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
            except Exception:  # the next request with a grammar gets the error
                logger.exception("the process that tries out grammars can't be started")
