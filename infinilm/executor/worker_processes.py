"""The processes of an engine's other ranks, as the driver sees them."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Event, Lock, Thread, Timer
from typing import Protocol

from infinilm.distributed.channel import Channel, Message
from infinilm.distributed.group import LOOPBACK, rank_title
from infinilm.errors import EngineError, WorkerDiedError
from infinilm.executor.commands import Command
from infinilm.framing import ChannelClosedError
from infinilm.interrupts import interrupts_allowed, interrupts_held
from infinilm.processes import WATCH_INTERVAL_S, ChildProcess

EXIT_TIMEOUT_S = 5.0
"""A rank that was told to stop is killed after this time."""


class RankProcess(Protocol):
    """A process that runs one rank, with a socket to the driver. The interface follows `ChildProcess`."""

    socket: socket.socket

    def has_ended(self) -> bool: ...
    def kill(self) -> None: ...
    def wait(self, timeout_s: float | None = None) -> object:
        """Wait for the end, and kill the process after `timeout_s`."""

    def describe_death(self, title: str) -> str:
        """How the rank called `title` died."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs."""

    num_ranks: int
    """Ranks of this engine on the same machine, which share its memory and cores."""
    host: str = LOOPBACK
    """The address at which other ranks reach it."""
    node: str | None = None
    """The machine's name in errors, if it is not this one."""
    num_threads: int | None = None
    """None: its share of the driver's threads."""


class Ranks(Protocol):
    """Places and starts the ranks of one engine, as processes of this host or somewhere else."""

    def place(self, rank: int) -> Place: ...
    def start(self, rank: int) -> RankProcess: ...
    def close(self) -> None:
        """Release what is left when all ranks have ended. Calling it again does nothing."""


class _RankChild(ChildProcess):
    def describe_death(self, title: str) -> str:
        return f"{title} (process {self.pid}) died with exit code {self.wait(EXIT_TIMEOUT_S)}"


class HostRanks:
    """See `Ranks`. Processes of this host."""

    def __init__(self, num_ranks: int) -> None:
        self._place = Place(num_ranks)

    def place(self, rank: int) -> Place:  # noqa: ARG002
        return self._place

    def start(self, rank: int) -> RankProcess:  # noqa: ARG002
        return _RankChild("infinilm.executor.rank_process")

    def close(self) -> None:
        return


class Peer:
    """One other rank. It answers each command with one reply, in order."""

    def __init__(self, rank: int, title: str, process: RankProcess, *, is_in_last_stage: bool) -> None:
        self.rank = rank
        self.title = title
        """Its number, its pipeline stage if there are several, and its node if that is not the driver's."""
        self.is_in_last_stage = is_in_last_stage
        self.num_owed = 0
        """The number of outstanding replies."""
        self.process = process
        self._channel = Channel(self.process.socket)

    def send(self, command: Command, message: Message) -> None:
        """Send a command. If the process has ended, `receive` reports it."""
        with interrupts_held():  # the rank would read half a message as the next one
            with suppress(ChannelClosedError):
                self._channel.send(Message({"command": command, **message.values}, message.tensors))
            self.num_owed += 1

    def receive(self) -> Message:
        """Wait for the next reply."""
        with interrupts_held():
            with interrupts_allowed():
                self._channel.wait()
            reply = self._channel.receive()
            self.num_owed -= 1
            return reply

    def kill(self) -> None:
        """Kill the process, and end any wait for its reply."""
        self.process.kill()
        self._channel.hang_up()

    def close(self) -> None:
        self.send(Command.STOP, Message())
        self._channel.close()


class Peers:
    """All other ranks. If one dies, the others are killed, so that the driver waits for none of them.

    Then `on_death` is called, in another thread.
    """

    def __init__(self, ranks: Ranks, on_death: Callable[[], None]) -> None:
        self._ranks = ranks
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

    def start(self, tp_size: int, num_stages: int) -> None:
        """Start all ranks but the first of the last stage, in order."""
        for rank in range(tp_size * num_stages):
            first_of_last = tp_size * (num_stages - 1)
            if rank != first_of_last:
                title, node = rank_title(rank, tp_size, num_stages), self._ranks.place(rank).node
                title = f"{title} on node {node}" if node else title
                self.all.append(Peer(rank, title, self._ranks.start(rank), is_in_last_stage=rank > first_of_last))
        if self.all:
            Thread(target=self._watch, name="infinilm-watch", daemon=True).start()

    def receive(self) -> list[tuple[Peer, Message]]:
        """The next reply of each peer."""
        return [(peer, self._receive(peer)) for peer in list(self.all)]

    def drain(self) -> list[tuple[Peer, Message]]:
        """All outstanding replies."""
        replies: list[tuple[Peer, Message]] = []
        for peer in list(self.all):
            while peer.num_owed:
                replies.append((peer, self._receive(peer)))
        return replies

    def _receive(self, peer: Peer) -> Message:
        try:
            return peer.receive()
        except ChannelClosedError:
            self._fail(peer)
            self.check()
            raise EngineError("the engine was closed in the middle of a call") from None

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
            self._ranks.close()

    @contextmanager
    def time_limit(self, seconds: float, task: str) -> Iterator[None]:
        """Give up on ranks that still owe a reply after this time, and name them."""
        timer = Timer(seconds, self._give_up, [seconds, task])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _give_up(self, seconds: float, task: str) -> None:
        with self._lock:
            late = ", ".join(peer.title for peer in self.all if peer.num_owed)
            if self.failure is None and not self._is_closed.is_set():
                self.failure = f"{late or 'the driver'} could not {task} within {seconds:g} s; the engine gave up"
                self.kill()
        self._on_death()

    def _fail(self, peer: Peer) -> None:
        with self._lock:
            if self.failure is None and not self._is_closed.is_set():
                death = peer.process.describe_death(peer.title)
                self.failure = f"{death}; the engine can't go on without it, make a new one"
                self.kill()

    def _watch(self) -> None:
        """Watch all ranks: the driver may be waiting for one when another dies."""
        while not self._is_closed.wait(WATCH_INTERVAL_S):
            for peer in list(self.all):
                if peer.process.has_ended():
                    self._fail(peer)
                    self._on_death()
                    return
