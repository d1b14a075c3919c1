"""Has grammars tried out in processes that may be killed."""

import os
import socket
import subprocess
import sys
import weakref
from contextlib import suppress
from threading import BoundedSemaphore

from infinilm.errors import EngineError
from infinilm.structured.trial_process import TRIAL_S, read_frame, write_frame, write_vocabulary
from infinilm.structured.vocabulary import Vocabulary

MAX_PROCESSES = 4
"""A grammar that takes long holds up the others only if there are this many of them."""
START_S = 30.0


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
        self._socket.settimeout(TRIAL_S)

    def try_out(self, grammar: str) -> str:
        """What is wrong with a grammar, if anything. The process may not outlive a bad one: see `is_alive`."""
        try:
            write_frame(self._socket, grammar.encode())
            return read_frame(self._replies).decode()
        except TimeoutError:
            self.kill()
            return f"it takes longer than {TRIAL_S} s to compile; make it simpler"
        except (OSError, EOFError):
            self.kill()
            return "it needs more memory or a deeper stack than a grammar may have; make it simpler"
        except BaseException:
            self.kill()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked again."""
        return self._process.poll() is None

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

    def try_out(self, grammar: str) -> str:
        """What is wrong with a grammar, if anything."""
        with self._free:
            process = self._take()
            verdict = process.try_out(grammar)
            self._keep(process)
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
