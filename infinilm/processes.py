"""Child processes. Each runs a module of this package, has a socket to its parent and ends when the parent ends."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
from threading import Thread, current_thread, main_thread
from time import sleep
from typing import Literal

from infinilm.interrupts import interrupts_held

WATCH_INTERVAL_S = 0.25
"""How often to check whether another process has ended."""
OUTPUT_TAIL_BYTES = 4096
PR_SET_PDEATHSIG = 1


class ChildProcess:
    """A process that runs `python -m module`. It gets one end of a socket pair and its parent's process id.

    The child calls `parent_socket` and `exit_with_parent`. It has its own session, so Ctrl-C in a terminal reaches only
    the parent. `output` says where its stdout and stderr go; "echo" copies them to the parent's `sys.stderr`.
    """

    def __init__(
        self,
        module: str,
        *,
        output: Literal["inherit", "discard", "echo"] = "inherit",
        socket_buffer_bytes: int | None = None,
    ) -> None:
        self.socket, theirs = socket.socketpair()
        self.output_tail = b""
        """The last bytes that were echoed."""
        if socket_buffer_bytes is not None:
            for end in (self.socket, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, socket_buffer_bytes)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, socket_buffer_bytes)
        stdout = {"inherit": None, "discard": subprocess.DEVNULL, "echo": subprocess.PIPE}[output]
        is_main = current_thread() is main_thread()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid()), str(int(is_main))],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.STDOUT if output == "echo" else stdout,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))},
                start_new_session=True,
            )
        self._echo: Thread | None = None
        if output == "echo":
            self._echo = Thread(target=self._echo_output, name="echo", daemon=True)
            self._echo.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_ended(self) -> bool:
        with interrupts_held():  # an interrupt in `poll` can leave the lock in `Popen` locked for ever
            return self._process.poll() is not None

    def kill(self) -> None:
        """Send SIGKILL. Any thread may do this."""
        self._process.kill()

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the end, and kill the process after `timeout_s`.

        Returns the exit code; minus the signal's number if a signal ended it.
        """
        with interrupts_held():  # as above
            try:
                code = self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                code = self._process.wait()
        if self._echo is not None:
            self._echo.join(1.0)  # with a limit: a process that the child started may hold the pipe open
        return code

    def describe_end(self) -> str:
        """How the process ended, once `wait` has returned: "was killed by SIGKILL", "ended with exit code 1"."""
        code = self._process.returncode
        if code < 0:
            hint = "; was the machine out of memory?" if -code == signal.SIGKILL else ""
            return f"was killed by {signal.Signals(-code).name}{hint}"
        lines = self.output_tail.decode(errors="replace").strip().splitlines()
        last = f"; its last words: {lines[-1].strip()[:300]}" if code and lines else ""
        return f"ended with exit code {code}{last}"

    def _echo_output(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            while data := os.read(pipe.fileno(), 1 << 16):
                self.output_tail = (self.output_tail + data)[-OUTPUT_TAIL_BYTES:]
                sys.stderr.write(data.decode(errors="replace"))
                sys.stderr.flush()


# --- in the child -------------------------------------------------------------------------------------------


def parent_socket() -> socket.socket:
    """The socket to the parent of this process, which was started as a `ChildProcess`."""
    return socket.socket(fileno=int(sys.argv[1]))


def exit_with_parent() -> None:
    """End this process when its parent ends, whatever this process is doing.

    The socket does not reliably show the parent's end: other children of the parent may hold copies of it.
    """
    parent, is_main = int(sys.argv[2]), sys.argv[3] == "1"
    if sys.platform == "linux" and is_main:  # the kernel watches the thread that started this process
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    Thread(target=_watch_parent, args=[parent], daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        sleep(WATCH_INTERVAL_S)
    os._exit(1)
