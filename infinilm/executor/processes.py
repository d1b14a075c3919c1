"""Ranks on this host: rank 0 in this process, the others in processes of their own."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from operator import methodcaller
from pathlib import Path
from threading import Lock
from typing import TypeVar

import torch
from torch import Tensor

from infinilm.debug import HookRegistry
from infinilm.distributed.channel import Message
from infinilm.distributed.group import CommunicationError, CommunicationGroup, RankInfo, make_store
from infinilm.errors import EngineError, WorkerDiedError
from infinilm.executor.executor import CacheShape, MeasuredWorkspace, RunnerSettings
from infinilm.executor.local import describe, exclusively
from infinilm.executor.memory import free_memory_bytes
from infinilm.executor.model_runner import SubmittedStep
from infinilm.executor.rank_process import RankSettings, WireError
from infinilm.executor.rank_worker import ForwardInput, ForwardOutput, RankWorker
from infinilm.executor.step_io import StepInput
from infinilm.executor.wire import Command, write_forward, write_step
from infinilm.executor.worker_processes import Peers
from infinilm.interrupts import interrupts_allowed, interrupts_held
from infinilm.layers.formats import DENSE, WeightFormats
from infinilm.models import ModelConfig
from infinilm.models.registry import describe_registration

T = TypeVar("T")

JOIN_ATTEMPTS = 20
"""How often a rendezvous is tried, on a machine too busy for the ranks to join in time."""


class ProcessExecutor:
    """See `Executor`. Rank 0 sends each command to the other ranks and carries it out itself."""

    def __init__(self, devices: Sequence[torch.device], dtype: torch.dtype, attention_backend: str = "auto") -> None:
        self.free_bytes = free_memory_bytes(devices[0])
        self._lock = Lock()
        self._is_whole = True
        """Whether all ranks have done the same so far, and none of them owes a reply."""
        self._num_rendezvous = 0
        store, port = make_store()
        group = CommunicationGroup(RankInfo(0, len(devices), devices[0]), store)
        self._worker: RankWorker | None = RankWorker(group, dtype, attention_backend)
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

    @property
    def worker(self) -> RankWorker:
        """Rank 0."""
        self.check_health()
        assert self._worker is not None
        return self._worker

    @property
    def cache_bytes(self) -> int:
        return self.worker.cache_bytes

    # --- commands ---------------------------------------------------------------------------------------

    def load(self, config: ModelConfig, max_len: int, source: Path | int, formats: WeightFormats = DENSE) -> None:
        has_peers = self.info.num_ranks > 1
        message = Message(
            {
                "config": config.to_dict(),
                "max_len": max_len,
                "source": source if isinstance(source, int) else str(source.absolute()),
                "formats": dict(formats.by_name),
                "registration": describe_registration(config.model_type) if has_peers else None,
            }
        )
        self._on_all(Command.LOAD, message, methodcaller("load", config, max_len, source, formats))

    def load_shards(self, shards: Sequence[Mapping[str, Tensor]]) -> None:
        messages = [Message(tensors=each) for each in shards[1:]]
        self._on_all(Command.LOAD_SHARDS, messages, methodcaller("load_shards", shards[0]))

    def state_dicts(self) -> list[dict[str, Tensor]]:
        own, replies = self._on_all(Command.STATE_DICT, Message(), methodcaller("state_dict"))
        return [own, *(dict(reply.tensors) for reply in replies)]

    def reset_cache(self, shape: CacheShape | None) -> None:
        message = Message(asdict(shape) if shape else {})
        self._on_all(Command.RESET_CACHE, message, methodcaller("reset_cache", shape))

    def measure_workspace(self, settings: RunnerSettings) -> MeasuredWorkspace:
        measure = methodcaller("measure_workspace", settings)
        own, replies = self._on_all(Command.MEASURE_WORKSPACE, Message(asdict(settings)), measure)
        found = [own, *(MeasuredWorkspace(**reply.values) for reply in replies)]
        return MeasuredWorkspace(max(each.activations for each in found), max(each.libraries for each in found))

    def start_rows(self, settings: RunnerSettings) -> None:
        self._on_all(Command.START_ROWS, Message(asdict(settings)), methodcaller("start_rows", settings))

    def set_hook_registry(self, registry: HookRegistry | None) -> None:
        self.worker.registry = registry

    def submit(self, step: StepInput) -> SubmittedStep:
        registry = self._worker.registry if self._worker is not None else None
        patterns = registry.patterns() if registry is not None else ()
        execute = methodcaller("execute", step, patterns)
        submitted: SubmittedStep = self._on_all(Command.EXECUTE, write_step(step, patterns), execute)[0]
        return submitted

    def forward(self, given: ForwardInput) -> ForwardOutput:
        forward = methodcaller("forward", given)
        output: ForwardOutput = self._on_all(Command.FORWARD, write_forward(given), forward)[0]
        return output

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

    def _on_all(
        self, command: Command, message: Message | Sequence[Message], own: Callable[[RankWorker], T]
    ) -> tuple[T, list[Message]]:
        """Carry out a command on all ranks: the result of `own` with rank 0's worker, and the others' replies.

        `message` goes to all other ranks, or one of several to each.
        """
        with interrupts_held(), exclusively(self._lock):
            try:
                worker = self.worker
                with worker.computing():
                    return self._send_and_compute(command, message, own)
            except WorkerDiedError:
                self.shutdown()
                raise

    def _send_and_compute(
        self, command: Command, message: Message | Sequence[Message], own: Callable[[RankWorker], T]
    ) -> tuple[T, list[Message]]:
        if not self._is_whole:
            self._recover()
        self._is_whole = False
        try:
            for index, peer in enumerate(self._peers.all):
                peer.send(command, message if isinstance(message, Message) else message[index])
            with interrupts_allowed():
                result = own(self.worker)
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
