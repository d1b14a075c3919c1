"""One rank, in this process."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from infinilm.debug import HookRegistry
from infinilm.distributed.group import CommunicationGroup, RankInfo
from infinilm.errors import EngineError
from infinilm.executor.executor import CacheShape, ExecutorInfo, MeasuredWorkspace, RunnerSettings, StepHandle
from infinilm.executor.memory import free_memory_bytes
from infinilm.executor.model_runner import SubmittedStep
from infinilm.executor.rank_worker import ForwardInput, ForwardOutput, RankWorker
from infinilm.executor.step_io import StepInput
from infinilm.executor.wire import Command
from infinilm.interrupts import interrupts_allowed, interrupts_held
from infinilm.layers.formats import DENSE, WeightFormats
from infinilm.models import ModelConfig
from infinilm.platforms import is_nvidia


def describe(worker: RankWorker) -> ExecutorInfo:
    num_stages = worker.stages.size
    return ExecutorInfo(
        num_ranks=worker.group.size * num_stages,
        num_stages=num_stages,
        device=str(worker.device),
        dtype=str(worker.dtype).removeprefix("torch."),
        attention=worker.backend.name,
        max_in_flight=num_stages + 1 if num_stages > 1 or is_nvidia(worker.device) else 1,
    )


class LocalExecutor:
    """See `Executor`."""

    driver = 0
    """The rank of this process."""

    def __init__(self, device: torch.device, dtype: torch.dtype, attention_backend: str = "auto") -> None:
        self.free_bytes = free_memory_bytes(device)
        group = CommunicationGroup(RankInfo(0, 1, device))
        self._worker: RankWorker | None = RankWorker(group, dtype, attention_backend)
        self.info = describe(self.worker)
        self._lock = Lock()

    @property
    def worker(self) -> RankWorker:
        """This process's rank."""
        self.check_health()
        assert self._worker is not None
        return self._worker

    @property
    def cache_bytes(self) -> int:
        return self.worker.cache_bytes

    def call_all(self, command: Command, *arguments: Any) -> list[Any]:
        """Call the worker's method of this name on every rank, one call at a time. Ctrl-C is let through.

        Returns the results by rank.
        """
        with interrupts_held(), exclusively(self._lock):
            worker = self.worker
            with worker.computing(), interrupts_allowed():
                return [getattr(worker, command)(*arguments)]

    def load(self, config: ModelConfig, max_len: int, source: Path | int, formats: WeightFormats = DENSE) -> None:
        self.call_all(Command.LOAD, config, max_len, source, formats)

    def load_shards(self, shards: Sequence[Mapping[str, Tensor]]) -> None:
        self.call_all(Command.LOAD_SHARDS, shards)

    def state_dicts(self) -> list[dict[str, Tensor]]:
        return self.call_all(Command.STATE_DICT)

    def reset_cache(self, shape: CacheShape | None) -> None:
        self.call_all(Command.RESET_CACHE, shape)

    def measure_workspace(self, settings: RunnerSettings) -> MeasuredWorkspace:
        found: list[MeasuredWorkspace] = self.call_all(Command.MEASURE_WORKSPACE, settings)
        return MeasuredWorkspace(max(each.activations for each in found), max(each.libraries for each in found))

    def start_rows(self, settings: RunnerSettings) -> None:
        self.call_all(Command.START_ROWS, settings)

    def set_hook_registry(self, registry: HookRegistry | None) -> None:
        self.worker.registry = registry

    def submit(self, step: StepInput) -> StepHandle:
        submitted: SubmittedStep = self.call_all(Command.EXECUTE, step, self._hook_patterns())[self.driver]
        return submitted

    def _hook_patterns(self) -> tuple[str, ...]:
        registry = self._worker.registry if self._worker is not None else None
        return registry.patterns() if registry is not None else ()

    def forward(self, given: ForwardInput) -> ForwardOutput:
        output: ForwardOutput = self.call_all(Command.FORWARD, given)[self.driver]
        return output

    def failing_products(self) -> list[str]:
        return self.worker.failing_products()

    def computing(self) -> AbstractContextManager[None]:
        return self.worker.computing()

    def check_health(self) -> None:
        if self._worker is None:
            raise EngineError("the engine was closed; make a new one")

    def shutdown(self) -> None:
        self._worker = None


@contextmanager
def exclusively(lock: Lock) -> Iterator[None]:
    """Hold the lock of an executor, or refuse."""
    if not lock.acquire(blocking=False):
        raise EngineError(
            "the engine is in the middle of another call; call it from one thread at a time, not from a hook"
        )
    try:
        yield
    finally:
        lock.release()
