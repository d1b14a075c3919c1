"""Has grammars tried out in processes that may be killed."""

import json
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import BoundedSemaphore, Lock

from infinilm.errors import EngineError, InvalidValueError
from infinilm.structured.trial_process import TRIAL_S, Verdict, read_frame, write_frame, write_vocabulary
from infinilm.structured.vocabulary import Vocabulary

MAX_PROCESSES = 4
"""A grammar that takes long holds up the others only if there are this many of them."""
START_S = 30.0


class TrialTimeoutError(InvalidValueError):
    """A grammar is not compiled within the time that it has."""


class TrialCancelledError(Exception):
    """The result is no longer needed."""


class Cancellation:
    """Ends a trial from another thread. All methods are thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: TrialProcess | None = None
        self.is_cancelled = False

    def cancel(self) -> None:
        """End the trial that is under way, and refuse to begin one."""
        with self._lock:
            self.is_cancelled = True
            if self._process is not None:
                self._process.interrupt()

    def check(self) -> None:
        """Raise `TrialCancelledError` if it is cancelled."""
        if self.is_cancelled:
            raise TrialCancelledError

    @contextmanager
    def ending(self, process: "TrialProcess") -> Iterator[None]:
        """While inside, `cancel` ends this process."""
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
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "infinilm.structured.trial_process"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))},
                process_group=0,  # a terminal's Ctrl-C is for our process alone
            )
        self._socket.settimeout(START_S)
        self._replies = self._socket.makefile("rb")
        try:
            write_vocabulary(self._socket, vocabulary)
            read_frame(self._replies)
        except BaseException as error:
            self.kill()
            if isinstance(error, (OSError, EOFError)):
                raise EngineError(f"the process that tries out grammars could not be started: {error!r}") from error
            raise

    def try_out(self, grammar: str, limit_s: float) -> Verdict:
        """Judge a grammar. The process may not outlive a bad one: see `is_alive`.

        Raises `TrialTimeoutError` when it takes longer than `limit_s`.
        """
        try:
            self._socket.settimeout(limit_s)
            write_frame(self._socket, grammar.encode())
            return Verdict(*json.loads(read_frame(self._replies)))
        except TimeoutError:
            self.kill()
            raise TrialTimeoutError(f"it takes longer than {limit_s} s to compile; make it simpler") from None
        except (OSError, EOFError):
            self.kill()
            return Verdict("it needs more memory or a deeper stack than a grammar may have; make it simpler")
        except BaseException:
            self.kill()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked again."""
        return self._process.poll() is None

    def interrupt(self) -> None:
        """End it, in the middle of `try_out` by another thread."""
        self._process.kill()

    def kill(self) -> None:
        """End it and wait until it has ended."""
        self._process.kill()
        self._process.wait()
        self._replies.close()
        self._socket.close()


class Trials:
    """Processes for trying out grammars, started when they are needed and then kept. All methods are thread-safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._free = BoundedSemaphore(MAX_PROCESSES)
        self._idle: list[TrialProcess] = []
        self._end = weakref.finalize(self, _kill_all, self._idle)

    def try_out(self, grammar: str, limit_s: float = TRIAL_S, cancellation: Cancellation | None = None) -> Verdict:
        """Judge a grammar.

        Raises `TrialTimeoutError` when it takes longer than `limit_s`, and `TrialCancelledError`.
        """
        cancellation = cancellation or Cancellation()
        with self._free:
            cancellation.check()
            process = self._take()
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
        """Have a process at hand: the next grammar need not wait for its start."""
        with self._free:
            self._keep(self._take())

    def _keep(self, process: TrialProcess) -> None:
        if not self._end.alive:
            process.kill()
        elif process.is_alive:
            self._idle.append(process)

    def _take(self) -> TrialProcess:
        with suppress(IndexError):  # none is left
            while not (process := self._idle.pop()).is_alive:
                process.kill()
            return process
        return TrialProcess(self._vocabulary)

    def close(self) -> None:
        """End the processes, those at work when they have finished."""
        self._end()


def _kill_all(processes: list[TrialProcess]) -> None:
    while processes:
        processes.pop().kill()
