"""All ranks of an engine, driven as one: rank 0 in this process, the others in processes of their own."""

import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import TypeVar

import torch
from torch import Tensor

from infinilm.debug import HookRegistry
from infinilm.distributed.channel import Channel, ChannelClosedError, Message
from infinilm.distributed.group import CommunicationError, CommunicationGroup, RankInfo, make_store
from infinilm.engine.memory import free_memory_bytes
from infinilm.engine.rank_process import RankSettings, WireError
from infinilm.engine.rank_worker import CacheShape, Command, OnLogits, RankWorker, StepInput
from infinilm.errors import EngineError, WorkerDiedError
from infinilm.models import LlamaConfig
from infinilm.models.registry import describe_registration

T = TypeVar("T")

EXIT_TIMEOUT_S = 5.0
"""How long a rank that is told to stop may take before it is killed."""


class WorkerGroup:
    """The ranks of one engine. Each method runs on all of them and returns when all are done.

    An error on any rank is raised here, as what it was, and all ranks are ready for the next command. If a rank's
    process dies, this and every later call raises `WorkerDiedError`.
    """

    def __init__(self, devices: Sequence[torch.device], dtype: torch.dtype, attention_backend: str = "auto") -> None:
        self.size = len(devices)
        self._lock = Lock()
        self._failure: WorkerDiedError | None = None
        self._peers: list[_Peer] = []
        num_threads = torch.get_num_threads()
        # Ranks on CPUs share the cores.
        threads_each = max(1, num_threads // self.size) if devices[0].type == "cpu" else num_threads
        self._finalizer = weakref.finalize(self, _close, self._peers, num_threads)
        self.free_bytes = free_memory_bytes(devices[0])
        """What the rank with the least memory had before the model was loaded."""
        try:
            store = None
            if self.size > 1:
                torch.set_num_threads(threads_each)
                store, port = make_store()
                self._start_peers(devices, dtype, attention_backend, port, threads_each)
            group = CommunicationGroup(RankInfo(0, self.size, devices[0]), store)
            self.worker = RankWorker(group, dtype, attention_backend)
            self._raise_first(self._receive_all())
        except BaseException:
            self.close()
            raise

    def _start_peers(
        self, devices: Sequence[torch.device], dtype: torch.dtype, attention_backend: str, port: int, num_threads: int
    ) -> None:
        for rank in range(1, self.size):
            self._peers.append(_Peer(rank))
        for peer in self._peers:
            settings = RankSettings(
                peer.rank,
                self.size,
                str(devices[peer.rank]),
                str(dtype).removeprefix("torch."),
                attention_backend,
                port,
                num_threads,
            )
            peer.send(Command.INIT, Message(asdict(settings)))
        free_bytes = [reply.values["free_bytes"] for reply in self._receive_all()]
        self.free_bytes = min([self.free_bytes, *free_bytes])
        if devices[0].type == "cpu":
            self.free_bytes //= self.size

    # --- commands ---------------------------------------------------------------------------------------

    def load_model(self, config: LlamaConfig, max_len: int, source: Path | int) -> None:
        """Build the model on every rank, its weights from a checkpoint or made up from a seed."""
        message = Message(
            {
                "config": config.to_dict(),
                "max_len": max_len,
                "source": source if isinstance(source, int) else str(source.absolute()),
                "registration": describe_registration(config.model_type) if self.size > 1 else None,
            }
        )
        self._on_all(Command.LOAD, lambda: message, lambda: self.worker.load_model(config, max_len, source))

    def load_pieces(self, pieces: Sequence[Mapping[str, Tensor]]) -> None:
        """Put pieces of weights into the model, `pieces[rank]` on each rank."""
        messages = iter([Message(tensors=each) for each in pieces[1:]])
        self._on_all(Command.LOAD, lambda: next(messages), lambda: self.worker.load_pieces(pieces[0]))

    def state_dict(self) -> list[dict[str, Tensor]]:
        """Copies of every rank's weights."""
        own, replies = self._on_all(Command.STATE, Message, self.worker.state_dict)
        return [own, *(dict(reply.tensors) for reply in replies)]

    def reset_cache(self, shape: CacheShape | None) -> None:
        """Have an empty cache of this shape on every rank, or none."""
        message = Message(asdict(shape) if shape else {})
        self._on_all(Command.RESET_CACHE, lambda: message, lambda: self.worker.reset_cache(shape))

    def run(
        self,
        step: StepInput,
        on_logits: OnLogits,
        *,
        shape: CacheShape | None = None,
        input_ids: Tensor | None = None,
        registry: HookRegistry | None = None,
    ) -> Tensor:
        """Compute a step; see `RankWorker.run`."""

        def message() -> Message:
            made = step.to_message()
            return Message({**made.values, "shape": asdict(shape) if shape else None}, made.tensors)

        hidden, _ = self._on_all(
            Command.RUN,
            message,
            lambda: self.worker.run(step, on_logits, shape=shape, input_ids=input_ids, registry=registry),
        )
        return hidden

    def check_alive(self) -> None:
        """Raise if a rank has died or the engine was closed."""
        if self._failure is None and not self._finalizer.alive:
            raise EngineError("the engine was closed; make a new one")
        if self._failure is None:
            for peer in self._peers:
                if peer.process.poll() is not None:
                    self._fail(peer)
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def close(self) -> None:
        """Stop all ranks and give back what they hold. Calling it again does nothing."""
        if hasattr(self, "worker"):
            self.worker.group.leave()
            del self.worker
        self._finalizer()

    # --- how a command is carried out -------------------------------------------------------------------

    def _on_all(self, command: Command, make: Callable[[], Message], own: Callable[[], T]) -> tuple[T, list[Message]]:
        """Have all ranks carry out a command: rank 0's result and the others' replies.

        `make` makes the message for each other rank in turn, `own` is what rank 0 does.
        """
        if not self._lock.acquire(blocking=False):
            raise EngineError(
                "the engine is in the middle of another call; call it from one thread at a time, and not from a hook"
            )
        try:
            self.check_alive()
            if self.size == 1:
                return own(), []
            return self._on_many(command, make, own)
        finally:
            self._lock.release()

    def _on_many(self, command: Command, make: Callable[[], Message], own: Callable[[], T]) -> tuple[T, list[Message]]:
        try:
            for peer in self._peers:
                peer.send(command, make())
            result = own()
        except BaseException as error:
            # Whoever waits for this rank must not wait any longer; then all can meet again.
            self.worker.group.leave()
            replies = self._receive_all()
            self._rejoin()
            if isinstance(error, CommunicationError):
                self._raise_first(replies)
            raise
        replies = self._receive_all()
        if any("error" in reply.values for reply in replies):
            self._rejoin()
            self._raise_first(replies)
        return result, replies

    def _rejoin(self) -> None:
        for peer in self._peers:
            peer.send(Command.REJOIN, Message())
        self.worker.group.rejoin()
        self._raise_first(self._receive_all())

    def _receive_all(self) -> list[Message]:
        replies = []
        for peer in self._peers:
            try:
                replies.append(peer.receive())
            except ChannelClosedError:
                self._fail(peer)
        if self._failure is not None:
            self.close()
            raise self._failure
        return replies

    def _raise_first(self, replies: list[Message]) -> None:
        """Raise what went wrong first: a lost connection is only what came of it on another rank."""
        errors = [
            WireError(**reply.values["error"]).to_exception(rank)
            for rank, reply in enumerate(replies, start=1)
            if "error" in reply.values
        ]
        errors.sort(key=lambda error: isinstance(error, CommunicationError))
        if errors:
            raise errors[0]

    def _fail(self, peer: "_Peer") -> None:
        """Note that a rank has died."""
        if self._failure is None:
            self._failure = WorkerDiedError(
                f"rank {peer.rank} (process {peer.process.pid}) died with exit code {peer.exit_code()}; "
                "the engine can't go on without it, make a new one"
            )


class _Peer:
    """Another rank's process, seen from this one."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "infinilm.engine.rank_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        self._channel = Channel(ours)

    def send(self, command: Command, message: Message) -> None:
        """Give a command. If the process is gone, `receive` will tell."""
        try:
            self._channel.send(Message({"command": command, **message.values}, message.tensors))
        except ChannelClosedError:
            return

    def receive(self) -> Message:
        """Wait for the answer to a command."""
        return self._channel.receive()

    def exit_code(self) -> int:
        """The exit code of a process that has closed its channel; minus the signal's number if one killed it."""
        try:
            return self.process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def stop(self) -> None:
        """Let the process end."""
        self.send(Command.STOP, Message())
        self._channel.close()


def _close(peers: list[_Peer], num_threads: int) -> None:
    """Stop the processes and wait for them; runs at the interpreter's exit at the latest."""
    for peer in peers:
        peer.stop()
    for peer in peers:
        peer.exit_code()
    if peers:
        torch.set_num_threads(num_threads)
    peers.clear()
