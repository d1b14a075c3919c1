"""Several ranks: the driver in this process, the others in separate processes on this host or on others."""

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from threading import Lock
from typing import Any

import torch

from infinilm.distributed.channel import Message
from infinilm.distributed.group import CommunicationError, CommunicationGroup, make_groups, make_store
from infinilm.errors import EngineError, WorkerDiedError
from infinilm.executor.commands import Command
from infinilm.executor.executor import StepHandle
from infinilm.executor.local import LocalExecutor, exclusively
from infinilm.executor.memory import free_memory_bytes
from infinilm.executor.rank_process import RankSettings, WireError
from infinilm.executor.rank_worker import RankWorker
from infinilm.executor.step_io import StepInput, StepOutput
from infinilm.executor.wire import read_reply, write_call
from infinilm.executor.worker_processes import HostRanks, Peer, Peers, Ranks
from infinilm.interrupts import interrupts_allowed, interrupts_held

JOIN_LIMIT_S = 90.0
"""If the ranks have not joined within this time, the engine gives up and names those that are missing."""
JOIN_ATTEMPTS = 20
"""How often a rendezvous is tried if the machine is too busy for the ranks to join in time."""


class ProcessExecutor(LocalExecutor):
    """See `Executor`. The driver sends each command to the other ranks and carries it out itself.

    Ranks are numbered stage by stage. The driver is the first rank of the last pipeline stage, because that rank
    samples. So grammars, hooks and callers' functions stay in this process.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        dtype: torch.dtype,
        attention_backend: str = "auto",
        num_stages: int = 1,
        ranks: Ranks | None = None,
    ) -> None:
        """`ranks` are processes of this host by default."""
        tp_size = len(devices) // num_stages
        self.driver = tp_size * (num_stages - 1)
        device = devices[self.driver]
        self.free_bytes = free_memory_bytes(device)
        self._lock = Lock()
        self._is_whole = True
        """Whether all ranks have done the same so far, and no reply is outstanding except for waiting steps."""
        self._waiting: deque[_WaitingStep] = deque()
        """Steps that earlier stages compute and this stage has not begun."""
        self._num_rendezvous = 0
        self._ranks = ranks or HostRanks(len(devices))
        own = self._ranks.place(self.driver)
        store, port = make_store(own.host)
        group, stages = make_groups(self.driver, tp_size, num_stages, device, store, host=own.host)
        self._worker = RankWorker(group, dtype, attention_backend, own.num_threads, stages)
        self._peers = Peers(self._ranks, on_death=partial(_abort, group, stages))
        self._finalizer = weakref.finalize(self, self._peers.close)
        self.info = self._worker.describe()
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
        num_stages, num_ranks = self.info.num_stages, self.info.num_ranks
        places = [self._ranks.place(rank) for rank in range(num_ranks)]
        self._peers.start(num_ranks // num_stages, num_stages)
        for peer in self._peers.all:
            place = places[peer.rank]
            settings = RankSettings(
                peer.rank,
                peer.title,
                num_ranks // num_stages,
                num_stages,
                str(devices[peer.rank]),
                str(dtype).removeprefix("torch."),
                attention_backend,
                places[self.driver].host,
                port,
                place.host,
                place.num_threads or self._worker.num_threads,
            )
            peer.send(Command.INIT, Message(asdict(settings)))
        replies = self._peers.receive()
        _raise_first(replies)
        found = {self.driver: self.free_bytes} | {peer.rank: reply.values["free_bytes"] for peer, reply in replies}
        is_shared = devices[0].type == "cpu"
        self.free_bytes = min(
            num_bytes // (places[rank].num_ranks if is_shared else 1) for rank, num_bytes in found.items()
        )
        with self._peers.time_limit(JOIN_LIMIT_S, "join the others"):
            self._join()

    def check_health(self) -> None:
        try:
            self._peers.check()
        except WorkerDiedError:
            if self._lock.acquire(blocking=False):  # else a running call fails, too, and shuts down
                try:
                    self.shutdown()
                finally:
                    self._lock.release()
            raise
        if self._worker is None:
            raise EngineError("the engine was closed; make a new one")

    def shutdown(self) -> None:
        if self._worker is not None and not self._peers.is_fork:
            self._worker.close()
            self._worker = None
        self._finalizer()

    # --- steps ------------------------------------------------------------------------------------------

    def submit(self, step: StepInput) -> StepHandle:
        """Start a step. With pipeline stages on a CPU, earlier stages start now; this stage computes in `result`.

        Hooks see one step at a time: if there are hooks, all stages compute the step in this call. On a GPU this
        returns while the device computes.
        """
        patterns = self._hook_patterns()
        if self.info.num_stages == 1 or patterns or self.info.device != "cpu":
            return super().submit(step)
        with self._calling():
            waiting = _WaitingStep(self, step, self._write(Command.EXECUTE, step, patterns))
            self._send(Command.EXECUTE, waiting.messages, is_in_last_stage=False)
            self._waiting.append(waiting)
            self._is_whole = True
        return waiting

    def compute(self, wanted: "_WaitingStep") -> None:
        """Compute the steps that wait for this stage, up to `wanted`."""
        with self._calling() as worker:
            while wanted.submitted is None:
                if not self._waiting:
                    raise EngineError("a step before this one failed, so this one was dropped")
                self._compute_next(worker)

    def _compute_next(self, worker: RankWorker) -> None:
        waiting = self._waiting.popleft()
        self._send(Command.EXECUTE, waiting.messages, is_in_last_stage=True)
        waiting.submitted = self._complete(worker, Command.EXECUTE, waiting.step)[self.driver]

    # --- how a command is carried out -------------------------------------------------------------------

    def call_all(self, command: Command, *arguments: Any) -> list[Any]:
        """Like `LocalExecutor.call_all`. The other ranks get the arguments as messages."""
        with self._calling() as worker:
            messages = self._write(command, *arguments)
            while self._waiting:
                self._compute_next(worker)
            for is_in_last_stage in (False, True):
                self._send(command, messages, is_in_last_stage=is_in_last_stage)
            return self._complete(worker, command, *arguments)

    @contextmanager
    def _calling(self) -> Iterator[RankWorker]:
        """Allow one call at a time, once all ranks are there and ready. Ctrl-C is held."""
        with interrupts_held(), exclusively(self._lock):
            try:
                worker = self.worker
                with worker.computing():
                    if not self._is_whole:
                        self._recover()
                    yield worker
            except WorkerDiedError:
                self.shutdown()
                raise

    def _write(self, command: Command, *arguments: Any) -> dict[Peer, Message]:
        peers = self._peers.all
        return dict(zip(peers, write_call(command, arguments, [peer.rank for peer in peers]), strict=True))

    def _send(self, command: Command, messages: dict[Peer, Message], *, is_in_last_stage: bool) -> None:
        """Send a command to the ranks of the last stage, or to all others."""
        self._is_whole = False
        for peer, message in messages.items():
            if peer.is_in_last_stage == is_in_last_stage:
                peer.send(command, message)

    def _complete(self, worker: RankWorker, command: Command, *arguments: Any) -> list[Any]:
        """Carry out a sent command here, and wait for the others' replies. Returns the results by rank."""
        try:
            with interrupts_allowed(), self._noting_stage(worker):
                result = getattr(worker, command)(*arguments)
            replies = self._peers.receive()
            _raise_first(replies)
        except WorkerDiedError:
            raise
        except BaseException as error:
            drained = self._recover()
            if isinstance(error, CommunicationError):
                _raise_first(drained)  # these are nearer to the cause
            raise
        self._is_whole = True
        results = [read_reply(command, reply) for _, reply in replies]
        return [*results[: self.driver], result, *results[self.driver :]]

    @contextmanager
    def _noting_stage(self, worker: RankWorker) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self.info.num_stages > 1:
                error.add_note(f"on {worker.stages.title}")
            raise

    def _recover(self) -> list[tuple[Peer, Message]]:
        """After an error, let all ranks join a new group. Returns the replies to the commands that were running.

        If this is interrupted, the next command begins with it.
        """
        self._is_whole = False
        self._waiting.clear()
        self.worker.leave()  # unblocks ranks stuck in a collective
        replies = self._peers.drain()
        self._join()
        return replies

    def _join(self) -> None:
        """Let all ranks join a new group."""
        for _ in range(JOIN_ATTEMPTS):
            self._num_rendezvous += 1
            for peer in self._peers.all:
                peer.send(Command.JOIN, Message({"rendezvous": self._num_rendezvous}))
            failures: list[str] = []
            try:
                self.worker.join(self._num_rendezvous)
            except CommunicationError as error:
                failures.append(str(error))
            replies = self._peers.receive()
            try:
                _raise_first(replies)
            except CommunicationError:
                failures += [
                    f"{peer.title}: {reply.values['error']['message']}" for peer, reply in replies if reply.values
                ]
            if not failures:
                self._is_whole = True
                return
        raise CommunicationError(f"the ranks could not meet: {'; '.join(failures)}")


class _WaitingStep:
    """A step that earlier stages compute now, and the last stage when `result` is called."""

    def __init__(self, executor: ProcessExecutor, step: StepInput, messages: dict[Peer, Message]) -> None:
        self._executor = executor
        self.step = step
        self.messages = messages
        self.submitted: StepHandle | None = None

    def result(self) -> StepOutput:
        """See `StepHandle`."""
        if self.submitted is None:
            self._executor.compute(self)
        assert self.submitted is not None
        return self.submitted.result()


def _abort(*groups: CommunicationGroup) -> None:
    for group in groups:
        group.abort()


def _raise_first(replies: Sequence[tuple[Peer, Message]]) -> None:
    """Raise the cause rather than its effect, which on other ranks is a lost connection."""
    errors = [
        WireError(**reply.values["error"]).to_exception(peer.title)
        for peer, reply in replies
        if "error" in reply.values
    ]
    errors.sort(key=lambda error: isinstance(error, CommunicationError))
    if errors:
        raise errors[0]
