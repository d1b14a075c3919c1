"""Ranks on this host: rank 0 in this process, the others in processes of their own."""

import weakref
from collections.abc import Sequence
from dataclasses import asdict
from threading import Lock
from typing import Any

import torch

from infinilm.distributed.channel import Message
from infinilm.distributed.group import CommunicationError, CommunicationGroup, RankInfo, make_store
from infinilm.errors import EngineError, WorkerDiedError
from infinilm.executor.local import LocalExecutor, describe, exclusively
from infinilm.executor.memory import free_memory_bytes
from infinilm.executor.rank_process import RankSettings, WireError
from infinilm.executor.rank_worker import RankWorker
from infinilm.executor.wire import Command, read_reply, write_call
from infinilm.executor.worker_processes import Peers
from infinilm.interrupts import interrupts_allowed, interrupts_held

JOIN_ATTEMPTS = 20
"""How often a rendezvous is tried, on a machine too busy for the ranks to join in time."""


class ProcessExecutor(LocalExecutor):
    """See `Executor`. Rank 0 sends each command to the other ranks and carries it out itself."""

    def __init__(self, devices: Sequence[torch.device], dtype: torch.dtype, attention_backend: str = "auto") -> None:
        self.free_bytes = free_memory_bytes(devices[0])
        self._lock = Lock()
        self._is_whole = True
        """Whether all ranks have done the same so far, and none of them owes a reply."""
        self._num_rendezvous = 0
        store, port = make_store()
        group = CommunicationGroup(RankInfo(0, len(devices), devices[0]), store)
        self._worker = RankWorker(group, dtype, attention_backend)
        self._peers = Peers(on_death=group.abort)
        self._finalizer = weakref.finalize(self, self._peers.close)
        self.info = describe(self._worker)
        try:
            self._start_peers(devices, dtype, attention_backend, port)
        except BaseException:
            self._peers.kill()
            self.shutdown()
            raise

    def _start_peers(
        self, devices: Sequence[torch.device], dtype: torch.dtype, attention_backend: str, port: int
    ) -> None:
        assert self._worker is not None
        num_ranks = len(devices)
        self._peers.start(num_ranks - 1)
        for peer in self._peers.all:
            settings = RankSettings(
                peer.rank,
                num_ranks,
                str(devices[peer.rank]),
                str(dtype).removeprefix("torch."),
                attention_backend,
                port,
                self._worker.num_threads,
            )
            peer.send(Command.INIT, Message(asdict(settings)))
        replies = self._peers.receive()
        _raise_first(replies)
        self.free_bytes = min([self.free_bytes, *(reply.values["free_bytes"] for reply in replies)])
        if devices[0].type == "cpu":
            self.free_bytes //= num_ranks
        self._join()

    def check_health(self) -> None:
        self._peers.check()
        if self._worker is None:
            raise EngineError("the engine was closed; make a new one")

    def shutdown(self) -> None:
        if self._worker is not None and not self._peers.is_fork:
            self._worker.group.close()
            self._worker = None
        self._finalizer()

    # --- how a command is carried out -------------------------------------------------------------------

    def call_all(self, command: Command, *arguments: Any) -> list[Any]:
        """As `LocalExecutor.call_all`; the other ranks get the arguments as messages."""
        with interrupts_held(), exclusively(self._lock):
            try:
                worker = self.worker
                messages = write_call(command, arguments, self.info.num_ranks)
                with worker.computing():
                    return self._send_and_compute(worker, command, messages, arguments)
            except WorkerDiedError:
                self.shutdown()
                raise

    def _send_and_compute(
        self, worker: RankWorker, command: Command, messages: Sequence[Message], arguments: Sequence[Any]
    ) -> list[Any]:
        if not self._is_whole:
            self._recover()
        self._is_whole = False
        try:
            for peer, message in zip(self._peers.all, messages, strict=True):
                peer.send(command, message)
            with interrupts_allowed():
                result = getattr(worker, command)(*arguments)
            replies = self._peers.receive()
            _raise_first(replies)
        except WorkerDiedError:
            raise
        except BaseException as error:
            replies = self._recover()
            if isinstance(error, CommunicationError):
                _raise_first(replies)  # which are nearer to the cause
            raise
        self._is_whole = True
        return [result, *(read_reply(command, reply) for reply in replies)]

    def _recover(self) -> list[Message]:
        """After an error: have all ranks join a new group. Returns how the command that failed ended on each.

        If this is interrupted, the next command begins with it.
        """
        self.worker.group.leave()  # unblocks ranks stuck in a collective
        replies = self._peers.receive()
        self._join()
        return replies

    def _join(self) -> None:
        """Have all ranks join a new group."""
        for attempt in range(JOIN_ATTEMPTS):
            self._num_rendezvous += 1
            for peer in self._peers.all:
                peer.send(Command.JOIN, Message({"rendezvous": self._num_rendezvous}))
            try:
                self.worker.group.join(self._num_rendezvous)
                _raise_first(self._peers.receive())
            except CommunicationError:
                self._peers.receive()
                if attempt == JOIN_ATTEMPTS - 1:
                    raise
            else:
                self._is_whole = True
                return


def _raise_first(replies: Sequence[Message]) -> None:
    """Raise the first cause: on other ranks it shows as a lost connection."""
    errors = [
        WireError(**reply.values["error"]).to_exception(rank)
        for rank, reply in enumerate(replies, start=1)
        if "error" in reply.values
    ]
    errors.sort(key=lambda error: isinstance(error, CommunicationError))
    if errors:
        raise errors[0]
