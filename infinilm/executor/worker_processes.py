"""The processes of an engine's other ranks, as rank 0 sees them."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Lock, Thread

from infinilm.distributed.channel import Channel, ChannelClosedError, Message
from infinilm.errors import EngineError, WorkerDiedError
from infinilm.executor.rank_process import WATCH_INTERVAL_S
from infinilm.executor.wire import Command
from infinilm.interrupts import interrupts_allowed, interrupts_held

EXIT_TIMEOUT_S = 5.0
"""How long a rank that is told to stop may take before it is killed."""


class Peer:
    """One other rank. It answers each command with one reply."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.is_busy = False
        """Whether it owes a reply."""
        self.reply = Message()
        """The latest."""
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "infinilm.executor.rank_process", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))},
                process_group=0,  # a terminal's Ctrl-C is for the engine's process alone
            )
        self._channel = Channel(ours)

    def send(self, command: Command, message: Message) -> None:
        """Give a command. If the process is gone, `receive` will tell."""
        with interrupts_held():  # half a message would be taken for the beginning of the next
            with suppress(ChannelClosedError):
                self._channel.send(Message({"command": command, **message.values}, message.tensors))
            self.is_busy = True

    def receive(self) -> None:
        """Wait for the reply that is owed, if one is."""
        if not self.is_busy:
            return
        with interrupts_held():
            with interrupts_allowed():
                self._channel.wait()
            self.reply = self._channel.receive()
            self.is_busy = False

    def exit_code(self) -> int:
        """The exit code of a process that is about to end; minus the signal's number if one killed it."""
        with interrupts_held():  # one at the wrong moment leaves the process's lock locked for ever
            try:
                return self.process.wait(EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                return self.process.wait()

    def has_ended(self) -> bool:
        """Whether the process is gone."""
        with interrupts_held():  # as above
            return self.process.poll() is not None

    def kill(self) -> None:
        """End the process at once, and any wait for its reply."""
        self.process.kill()
        self._channel.hang_up()

    def close(self) -> None:
        """Let the process end."""
        self.send(Command.STOP, Message())
        self._channel.close()


class Peers:
    """All other ranks. If one dies, the rest is killed: rank 0 must wait for none of them any more.

    `on_death` is called then, in a thread of its own.
    """

    def __init__(self, on_death: Callable[[], None]) -> None:
        self._on_death = on_death
        self.all: list[Peer] = []
        self.failure: str | None = None
        """Which rank died, and how."""
        self._owner = os.getpid()
        self._lock = Lock()
        self._is_closed = Event()

    @property
    def is_fork(self) -> bool:
        """Whether this process is a fork of the one that the ranks belong to, and must not touch them."""
        return bool(self.all) and os.getpid() != self._owner

    def start(self, num_peers: int) -> None:
        """Start the processes of ranks 1 to `num_peers`."""
        for rank in range(1, num_peers + 1):
            self.all.append(Peer(rank))
        if self.all:
            Thread(target=self._watch, name="infinilm-watch", daemon=True).start()

    def receive(self) -> list[Message]:
        """Wait for all replies."""
        for peer in list(self.all):
            try:
                peer.receive()
            except ChannelClosedError:
                self._fail(peer)
                self.check()
                raise EngineError("the engine was closed in the middle of a call") from None
        return [peer.reply for peer in self.all]

    def check(self) -> None:
        """Raise if a rank has died."""
        if self.is_fork:
            raise EngineError(
                f"the engine's ranks belong to process {self._owner}, and this is a fork of it; make an engine here"
            )
        for peer in list(self.all):
            if peer.has_ended():
                self._fail(peer)
        if self.failure is not None:
            raise WorkerDiedError(self.failure)

    def kill(self) -> None:
        """End all processes at once."""
        for peer in list(self.all):
            peer.kill()

    def close(self) -> None:
        """Let all processes end, and wait until they have. Runs at the interpreter's exit at the latest."""
        if self.is_fork:
            return
        with interrupts_held():
            self._is_closed.set()
            for peer in self.all:
                peer.close()
            for peer in self.all:
                peer.exit_code()
            self.all.clear()

    def _fail(self, peer: Peer) -> None:
        with self._lock:
            if self.failure is None and not self._is_closed.is_set():
                self.failure = (
                    f"rank {peer.rank} (process {peer.process.pid}) died with exit code {peer.exit_code()}; "
                    "the engine can't go on without it, make a new one"
                )
                self.kill()

    def _watch(self) -> None:
        """Rank 0 may be waiting for one rank when another dies."""
        while not self._is_closed.wait(WATCH_INTERVAL_S):
            for peer in list(self.all):
                if peer.has_ended():
                    self._fail(peer)
                    self._on_death()
                    return
