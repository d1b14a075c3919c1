"""Tries out grammars in child processes that can be killed."""

import json
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import BoundedSemaphore, Lock

from infinilm.errors import EngineError, InvalidValueError
from infinilm.framing import ChannelClosedError, FrameSocket
from infinilm.processes import ChildProcess
from infinilm.structured.trial_process import TRIAL_S, Verdict, send_vocabulary
from infinilm.structured.vocabulary import Vocabulary

MAX_PROCESSES = 4  # this many slow grammars at once delay the others
START_S = 30.0


class TrialTimeoutError(InvalidValueError):
    """A grammar was not compiled within its time limit."""


class TrialCancelledError(Exception):
    """The result is no longer needed."""


class Cancellation:
    """Ends a trial from another thread. All methods are thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: TrialProcess | None = None
        self.is_cancelled = False

    def cancel(self) -> None:
        """Kill the process of the current trial, and refuse to begin another trial."""
        with self._lock:
            self.is_cancelled = True
            if self._process is not None:
                self._process.interrupt()

    def check(self) -> None:
        if self.is_cancelled:
            raise TrialCancelledError

    @contextmanager
    def ending(self, process: "TrialProcess") -> Iterator[None]:
        """Inside the block, `cancel` kills this process."""
        with self._lock:
            self.check()
            self._process = process
        try:
            yield
        finally:
            with self._lock:
                self._process = None


class TrialProcess:
    """A process that tries out one grammar after the other."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._process = ChildProcess("infinilm.structured.trial_process", output="discard")
        self._frames = FrameSocket(self._process.socket)
        self._process.socket.settimeout(START_S)
        try:
            send_vocabulary(self._frames, vocabulary)
            self._frames.receive_frame()
        except BaseException as error:
            self.kill()
            if isinstance(error, (TimeoutError, ChannelClosedError)):
                raise EngineError(f"the process that tries out grammars could not be started: {error!r}") from error
            raise

    def try_out(self, grammar: str, limit_s: float) -> Verdict:
        """Judge a grammar. A bad one may end the process: see `is_alive`.

        Raises `TrialTimeoutError` when it takes longer than `limit_s`.
        """
        try:
            self._process.socket.settimeout(limit_s)
            self._frames.send_frame(grammar.encode())
            return Verdict(*json.loads(self._frames.receive_frame()))
        except BaseException as error:
            self.kill()
            if isinstance(error, TimeoutError):
                raise TrialTimeoutError(f"it takes longer than {limit_s} s to compile; make it simpler") from None
            if isinstance(error, ChannelClosedError):
                return Verdict("it needs more memory or a deeper stack than a grammar may have; make it simpler")
            raise

    @property
    def is_alive(self) -> bool:
        return not self._process.has_ended()

    def interrupt(self) -> None:
        """Kill the process while another thread is in `try_out`."""
        self._process.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._frames.close()


class Trials:
    """A pool of trial processes, started on demand and then kept. All methods are thread-safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._free = BoundedSemaphore(MAX_PROCESSES)
        self._idle: list[TrialProcess] = []
        self._end = weakref.finalize(self, _kill_all, self._idle)

    def try_out(self, grammar: str, limit_s: float = TRIAL_S, cancellation: Cancellation | None = None) -> Verdict:
        """Judge a grammar. Raises `TrialTimeoutError` after `limit_s`, and `TrialCancelledError`."""
        cancellation = cancellation or Cancellation()
        with self._free:
            cancellation.check()
            process = self._pop_process()
            try:
                with cancellation.ending(process):
                    verdict = process.try_out(grammar, limit_s)
            finally:
                if cancellation.is_cancelled:
                    process.kill()  # it may be about to end
                self._keep(process)
            cancellation.check()
            return verdict

    def prepare(self) -> None:
        """Start a process if none is idle, so that the next grammar does not wait for it."""
        with self._free:
            self._keep(self._pop_process())

    def _keep(self, process: TrialProcess) -> None:
        if not self._end.alive:
            process.kill()
        elif process.is_alive:
            self._idle.append(process)

    def _pop_process(self) -> TrialProcess:
        with suppress(IndexError):  # none is left
            while not (process := self._idle.pop()).is_alive:
                process.kill()
            return process
        return TrialProcess(self._vocabulary)

    def close(self) -> None:
        """End the processes; a busy one ends after its trial."""
        self._end()


def _kill_all(processes: list[TrialProcess]) -> None:
    while processes:
        processes.pop().kill()
