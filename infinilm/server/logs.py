"""Logging that never fails and never blocks: text for stderr is queued, and a thread writes it.

A full disk, a closed pipe or a pipe without a reader must not affect requests. The queue is bounded: text that does
not fit, or that can't be written, is dropped and counted.
"""

import atexit
import io
import logging
import os
import re
import secrets
import select
import sys
import time
from collections import deque
from contextvars import ContextVar
from threading import Condition, Thread

MAX_QUEUED_CHARS = 4 << 20
EXIT_FLUSH_S = 1.0
"""How long a process that ends waits for queued text to be written."""
NO_REQUEST = "-"
STDERR_FD = 2

request_id: ContextVar[str] = ContextVar("request_id", default=NO_REQUEST)
"""The id of the HTTP request that the current task serves. Log lines and the header `x-request-id` carry it."""

_SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def choose_request_id(given: bytes | None) -> str:
    """The client's id if it is short and plain, else a new one."""
    if given is not None and _SANE_ID.fullmatch(given):
        return given.decode("ascii")
    return secrets.token_hex(8)


class QueuedStream(io.TextIOBase):
    """A text stream that a thread writes to a file descriptor. `write` never raises and never waits for the file."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, fd: int, max_chars: int = MAX_QUEUED_CHARS) -> None:
        self._fd = fd
        self._max_chars = max_chars
        self._queue: deque[str] = deque()
        self._num_chars = 0
        """Characters that are queued or being written."""
        self._num_unreported = 0
        self.num_dropped = 0
        """Lines that were not written."""
        self._changed = Condition()
        Thread(target=self._run, name="log-writer", daemon=True).start()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def fileno(self) -> int:
        return self._fd

    def write(self, text: str) -> int:
        """Queue text, or drop it if the queue is full."""
        if not isinstance(text, str):  # libraries test by this whether a stream is for text or bytes
            raise TypeError(f"write takes text, not {type(text).__name__}")
        with self._changed:
            if self._num_chars + len(text) > self._max_chars:
                self._count_dropped(text)
            elif text:
                self._queue.append(text)
                self._num_chars += len(text)
                self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """Do nothing: the thread writes as soon as it can. To wait for it, use `wait_written`."""

    def wait_written(self, timeout: float) -> bool:
        """Wait until all text is written; False if that takes longer than `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_chars == 0, timeout)

    def _count_dropped(self, text: str) -> None:
        num_lines = max(1, text.count("\n"))
        self.num_dropped += num_lines
        self._num_unreported += num_lines

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                text = "".join(self._queue)
                self._queue.clear()
                num_unreported, self._num_unreported = self._num_unreported, 0
            note = f"[{num_unreported} log lines were dropped]\n" if num_unreported else ""
            is_written = self._write_all((text + note).encode(errors="backslashreplace"))
            with self._changed:
                if not is_written:
                    self._num_unreported += num_unreported
                    self._count_dropped(text)
                self._num_chars -= len(text)
                self._changed.notify_all()

    def _write_all(self, data: bytes) -> bool:
        """Write all data. Returns False on an error. Blocks as long as the file does."""
        view = memoryview(data)
        try:
            while view:
                try:
                    view = view[os.write(self._fd, view) :]
                except BlockingIOError:
                    select.select([], [self._fd], [])
        except OSError:
            return False
        return True


class LogFormatter(logging.Formatter):
    """`time level logger [request id] message`, in UTC. Control characters of the message are escaped."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        """The first line; a traceback follows it."""
        message = _CONTROL_CHARACTERS.sub(lambda found: repr(found.group())[1:-1], record.message)
        return f"{record.asctime} {record.levelname} {record.name} [{request_id.get()}] {message}"

    def usesTime(self) -> bool:  # noqa: N802 (logging's name)
        return True


def install_logging() -> None:
    """Make `sys.stderr` a `QueuedStream` and log to it, until the process ends.

    All text that Python code writes to `sys.stderr` is queued: logs, warnings, tracebacks, progress. If `sys.stderr`
    is not a file (a test captures it), nothing changes.
    """
    _open_standard_fds()
    if isinstance(sys.stderr, QueuedStream):
        return
    try:
        fd = sys.stderr.fileno() if sys.stderr is not None else STDERR_FD
    except io.UnsupportedOperation:
        return
    stream = QueuedStream(fd)
    sys.stderr = stream
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LogFormatter())
    logging.getLogger().addHandler(handler)
    logging.captureWarnings(True)
    atexit.register(stream.wait_written, EXIT_FLUSH_S)


def _open_standard_fds() -> None:
    """Open the null device for closed standard files. Otherwise a socket could get such a number, and receive logs."""
    for fd in range(STDERR_FD + 1):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one


def num_dropped_lines() -> int:
    """Log lines of this process that were not written."""
    return sys.stderr.num_dropped if isinstance(sys.stderr, QueuedStream) else 0
