"""The processes of an engine's other ranks, as rank 0 sees them."""

import os
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Lock, Thread

from infinilm.distributed.channel import Channel, Message
from infinilm.errors import EngineError, WorkerDiedError
from infinilm.executor.wire import Command
from infinilm.framing import ChannelClosedError
from infinilm.interrupts import interrupts_allowed, interrupts_held
from infinilm.processes import WATCH_INTERVAL_S, ChildProcess

EXIT_TIMEOUT_S = 5.0
"""A rank that was told to stop is killed after this time."""


class Peer:
    """One other rank. It answers each command with one reply."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.is_busy = False
        """Whether a reply is outstanding."""
        self.reply = Message()
        """The latest."""
        self.process = ChildProcess("infinilm.executor.rank_process")
        self._channel = Channel(self.process.socket)

    def send(self, command: Command, message: Message) -> None:
        """Send a command. If the process has ended, `receive` reports it."""
        with interrupts_held():  # the other half of a message would be read as the next
            with suppress(ChannelClosedError):
                self._channel.send(Message({"command": command, **message.values}, message.tensors))
            self.is_busy = True

    def receive(self) -> None:
        """Wait for the reply to the last command, unless it has been received."""
        if not self.is_busy:
            return
        with interrupts_held():
            with interrupts_allowed():
                self._channel.wait()
            self.reply = self._channel.receive()
            self.is_busy = False

    def kill(self) -> None:
        """Kill the process, and end any wait for its reply."""
        self.process.kill()
        self._channel.hang_up()

    def close(self) -> None:
        self.send(Command.STOP, Message())
        self._channel.close()


class Peers:
    """All other ranks. If one dies, the others are killed, so that rank 0 waits for none of them.

    Then `on_death` is called, in another thread.
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
        """Whether this process is a fork of the one that started the ranks. A fork must not use them."""
        return bool(self.all) and os.getpid() != self._owner

    def start(self, num_peers: int) -> None:
        """Start the processes of ranks 1 to `num_peers`."""
        for rank in range(1, num_peers + 1):
            self.all.append(Peer(rank))
        if self.all:
            Thread(target=self._watch, name="infinilm-watch", daemon=True).start()

    def receive(self) -> list[Message]:
        for peer in list(self.all):
            try:
                peer.receive()
            except ChannelClosedError:
                self._fail(peer)
                self.check()
                raise EngineError("the engine was closed in the middle of a call") from None
        return [peer.reply for peer in self.all]

    def check(self) -> None:
        if self.is_fork:
            raise EngineError(
                f"the engine's ranks belong to process {self._owner}, and this is a fork of it; make an engine here"
            )
        for peer in list(self.all):
            if peer.process.has_ended():
                self._fail(peer)
        if self.failure is not None:
            raise WorkerDiedError(self.failure)

    def kill(self) -> None:
        for peer in list(self.all):
            peer.kill()

    def close(self) -> None:
        """Tell all processes to end and wait for them. Runs at the interpreter's exit at the latest."""
        if self.is_fork:
            return
        with interrupts_held():
            self._is_closed.set()
            for peer in self.all:
                peer.close()
            for peer in self.all:
                peer.process.wait(EXIT_TIMEOUT_S)
            self.all.clear()

    def _fail(self, peer: Peer) -> None:
        with self._lock:
            if self.failure is None and not self._is_closed.is_set():
                exit_code = peer.process.wait(EXIT_TIMEOUT_S)
                self.failure = (
                    f"rank {peer.rank} (process {peer.process.pid}) died with exit code {exit_code}; "
                    "the engine can't go on without it, make a new one"
                )
                self.kill()

    def _watch(self) -> None:
        """Rank 0 may be waiting for one rank when another dies."""
        while not self._is_closed.wait(WATCH_INTERVAL_S):
            for peer in list(self.all):
                if peer.process.has_ended():
                    self._fail(peer)
                    self._on_death()
                    return
