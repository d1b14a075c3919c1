"""All ranks of an engine, driven as one: rank 0 in this process, the others in processes of their own."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TypeVar

import torch
from torch import Tensor

from infinilm.debug import HookRegistry
from infinilm.distributed.channel import Message
from infinilm.distributed.group import CommunicationError, CommunicationGroup, RankInfo, make_store
from infinilm.errors import EngineError, WorkerDiedError
from infinilm.executor.memory import free_memory_bytes
from infinilm.executor.rank_process import RankSettings, WireError
from infinilm.executor.rank_worker import CacheShape, Command, OnLogits, RankWorker, StepInput
from infinilm.executor.threads import computing_threads, share_of_threads
from infinilm.executor.worker_processes import Peers
from infinilm.interrupts import interrupts_allowed, interrupts_held
from infinilm.layers.formats import DENSE, WeightFormats
from infinilm.models import LlamaConfig
from infinilm.models.registry import describe_registration

T = TypeVar("T")

JOIN_ATTEMPTS = 20
"""How often a rendezvous is tried, on a machine too busy for the ranks to join in time."""


class WorkerGroup:
    """The ranks of one engine. Each method runs on all of them and returns when all are done.

    An error on any rank is raised here, as what it was, and all ranks are ready for the next command. If a rank's
    process dies, this and every later call raises `WorkerDiedError`.
    """

    def __init__(self, devices: Sequence[torch.device], dtype: torch.dtype, attention_backend: str = "auto") -> None:
        self.size = len(devices)
        self.free_bytes = free_memory_bytes(devices[0])
        """What the rank with the least memory had before the model was loaded."""
        self._lock = Lock()
        self._is_whole = True
        """Whether all ranks have done the same so far, and none of them owes a reply."""
        self._num_rendezvous = 0
        self._num_threads = share_of_threads(devices[0], self.size)
        store, port = make_store() if self.size > 1 else (None, 0)
        group = CommunicationGroup(RankInfo(0, self.size, devices[0]), store)
        self._worker: RankWorker | None = RankWorker(group, dtype, attention_backend)
        self._peers = Peers(on_death=group.abort)
        self._finalizer = weakref.finalize(self, self._peers.close)
        if self.size > 1:
            try:
                self._start_peers(devices, dtype, attention_backend, port)
            except BaseException:
                self._peers.kill()
                self.close()
                raise

    def _start_peers(
        self, devices: Sequence[torch.device], dtype: torch.dtype, attention_backend: str, port: int
    ) -> None:
        self._peers.start(self.size - 1)
        for peer in self._peers.all:
            settings = RankSettings(
                peer.rank,
                self.size,
                str(devices[peer.rank]),
                str(dtype).removeprefix("torch."),
                attention_backend,
                port,
                self._num_threads,
            )
            peer.send(Command.INIT, Message(asdict(settings)))
        replies = self._peers.receive()
        _raise_first(replies)
        self.free_bytes = min([self.free_bytes, *(reply.values["free_bytes"] for reply in replies)])
        if devices[0].type == "cpu":
            self.free_bytes //= self.size
        self._join()

    @property
    def worker(self) -> RankWorker:
        """Rank 0."""
        if self._worker is None:
            self._peers.check()
            raise EngineError("the engine was closed; make a new one")
        return self._worker

    # --- commands ---------------------------------------------------------------------------------------

    def load_model(self, config: LlamaConfig, max_len: int, source: Path | int, formats: WeightFormats = DENSE) -> None:
        """Build the model on every rank, its weights from a checkpoint or made up from a seed."""
        message = Message(
            {
                "config": config.to_dict(),
                "max_len": max_len,
                "source": source if isinstance(source, int) else str(source.absolute()),
                "formats": dict(formats.by_name),
                "registration": describe_registration(config.model_type) if self.size > 1 else None,
            }
        )
        self._on_all(Command.LOAD, lambda: message, lambda: self.worker.load_model(config, max_len, source, formats))

    def load_shards(self, pieces: Sequence[Mapping[str, Tensor]]) -> None:
        """Put pieces of weights into the model, `pieces[rank]` on each rank."""
        messages = iter([Message(tensors=each) for each in pieces[1:]])
        self._on_all(Command.LOAD, lambda: next(messages), lambda: self.worker.load_shards(pieces[0]))

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
            # No lambda: if memory runs out, its frame in the traceback would keep all that `on_logits` knows.
            partial(self.worker.run, step, on_logits, shape=shape, input_ids=input_ids, registry=registry),
        )
        return hidden

    def check_alive(self) -> None:
        """Raise if a rank has died or the engine was closed."""
        self._peers.check()
        if self._worker is None:
            raise EngineError("the engine was closed; make a new one")

    def close(self) -> None:
        """Stop all ranks and give back what they hold. Calling it again does nothing."""
        if self._worker is not None and not self._peers.is_fork:
            self._worker.group.close()
            self._worker = None
        self._finalizer()

    # --- how a command is carried out -------------------------------------------------------------------

    def _on_all(self, command: Command, make: Callable[[], Message], own: Callable[[], T]) -> tuple[T, list[Message]]:
        """Have all ranks carry out a command: rank 0's result and the others' replies.

        `make` makes the message for each other rank in turn, `own` is what rank 0 does.
        """
        with interrupts_held():
            if not self._lock.acquire(blocking=False):
                raise EngineError(
                    "the engine is in the middle of another call; call it from one thread at a time, not from a hook"
                )
            try:
                self.check_alive()
                with computing_threads(self._num_threads, self.worker.thread_users):
                    if self.size > 1:
                        return self._on_many(command, make, own)
                    with interrupts_allowed():
                        return own(), []
            except WorkerDiedError:
                self.close()
                raise
            finally:
                self._lock.release()

    def _on_many(self, command: Command, make: Callable[[], Message], own: Callable[[], T]) -> tuple[T, list[Message]]:
        if not self._is_whole:
            self._recover()
        self._is_whole = False
        try:
            for peer in self._peers.all:
                peer.send(command, make())
            with interrupts_allowed():
                result = own()
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
        return result, replies

    def _recover(self) -> list[Message]:
        """After an error: have all ranks join a new group. Returns how the command that failed ended on each.

        If this is broken off, the next command begins with it.
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
    """Raise what went wrong first: a lost connection is only what came of it on another rank."""
    errors = [
        WireError(**reply.values["error"]).to_exception(rank)
        for rank, reply in enumerate(replies, start=1)
        if "error" in reply.values
    ]
    errors.sort(key=lambda error: isinstance(error, CommunicationError))
    if errors:
        raise errors[0]
