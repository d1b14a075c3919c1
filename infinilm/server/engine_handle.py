"""The engine's process as the HTTP process sees it: started, listened to, and how it ended."""

import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Self

from infinilm.server.messages import LENGTH_BYTES, SOCKET_BUFFER_BYTES, Command, Report, decode_report, frame

STDERR_TAIL_BYTES = 4096
EXIT_TIMEOUT_S = 5.0
"""For a process that has closed its end, or was told to stop, to be gone."""


class EngineChild:
    """One run of the engine's process."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._stderr_tail = b""
        self._echo = asyncio.create_task(self._echo_stderr())

    @classmethod
    async def start(cls) -> Self:
        """Start the process, with one end of a socket pair that nobody else has."""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                end.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "infinilm.server.engine_process",
                str(theirs.fileno()),
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the HTTP process
            )
        ours.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=SOCKET_BUFFER_BYTES)
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def send(self, command: Command) -> None:
        """Send a command. It is dropped if the process has ended."""
        if not self._writer.is_closing():
            self._writer.write(frame(command))

    async def receive(self) -> Report | None:
        """Its next report; None when it is gone."""
        try:
            length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "little")
            report: Report = decode_report(await self._reader.readexactly(length))
            return report
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def end(self) -> str:
        """See to it that the process is gone; how it went."""
        try:
            await asyncio.wait_for(self._process.wait(), EXIT_TIMEOUT_S)
        except TimeoutError:
            self.kill()
            await self._process.wait()
        self._writer.close()
        with suppress(TimeoutError):  # a process that outlives it may hold the pipe open
            await asyncio.wait_for(self._echo, 1.0)
        return self._describe_end()

    def kill(self) -> None:
        """End it at once."""
        with suppress(ProcessLookupError):
            self._process.kill()

    def _describe_end(self) -> str:
        code = self._process.returncode or 0
        if code < 0:
            name = signal.Signals(-code).name
            hint = "; was the machine out of memory?" if -code == signal.SIGKILL else ""
            return f"the engine's process was killed by {name}{hint}"
        lines = self._stderr_tail.decode(errors="replace").strip().splitlines()
        last = f"; its last words: {lines[-1].strip()[:300]}" if code and lines else ""
        return f"the engine's process ended with exit code {code}{last}"

    async def _echo_stderr(self) -> None:
        assert self._process.stdout is not None
        while data := await self._process.stdout.read(1 << 16):
            self._stderr_tail = (self._stderr_tail + data)[-STDERR_TAIL_BYTES:]
            sys.stderr.write(data.decode(errors="replace"))
            sys.stderr.flush()
