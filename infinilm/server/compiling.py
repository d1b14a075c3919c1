"""Grammars are compiled in threads: whoever sends one that takes long holds up nobody but himself."""

import logging
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

from infinilm.sampling_params import SamplingParams
from infinilm.server.messages import Submit
from infinilm.structured.compiler import GrammarCompiler

logger = logging.getLogger(__name__)

NUM_THREADS = 2


@dataclass(frozen=True, slots=True)
class Compiled:
    """A request whose grammar is ready, or the reason why there is none."""

    request: Submit
    params: SamplingParams
    error: Exception | None


class GrammarQueue:
    """Requests whose grammar is being compiled. The compiler keeps what it made, so that asking again costs nothing."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammars")
        self._waiting: set[str] = set()
        self._done: SimpleQueue[Compiled] = SimpleQueue()
        self.bell, self._bell_rope = socket.socketpair()
        """Can be read from when something is done."""
        self.bell.setblocking(False)
        self._threads.submit(self._prepare)

    def add(self, request: Submit, params: SamplingParams) -> None:
        """Begin with a request's grammar."""
        self._waiting.add(request.request_id)
        future = self._threads.submit(self._run, request, params)
        future.add_done_callback(self._ring)

    def cancel(self, request_id: str) -> bool:
        """Forget a request; False if its grammar is not being compiled."""
        is_waiting = request_id in self._waiting
        self._waiting.discard(request_id)
        return is_waiting

    def take(self) -> list[Compiled]:
        """The requests that are ready."""
        try:
            self.bell.recv(4096)
        except BlockingIOError:
            return []
        ready = [self._done.get() for _ in range(self._done.qsize())]
        found = [each for each in ready if each.request.request_id in self._waiting]
        self._waiting -= {each.request.request_id for each in found}
        return found

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, request: Submit, params: SamplingParams) -> None:
        error = None
        try:
            assert params.structured is not None
            self._compiler.compile(params.structured)
        except Exception as failed:
            error = failed
        self._done.put(Compiled(request, params, error))
        if error is not None:
            self._threads.submit(self._prepare)  # the process that tried it out may not have outlived it

    def _prepare(self) -> None:
        try:
            self._compiler.prepare()
        except Exception:  # whoever asks for a form will be told
            logger.exception("the process that tries out grammars can't be started")

    def _ring(self, future: "Future[None]") -> None:  # noqa: ARG002
        self._bell_rope.send(b"!")
