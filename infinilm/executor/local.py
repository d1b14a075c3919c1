"""One rank, in this process."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from infinilm.debug import HookRegistry
from infinilm.distributed.group import CommunicationGroup, RankInfo
from infinilm.errors import EngineError
from infinilm.executor.executor import CacheShape, ExecutorInfo, MeasuredWorkspace, RunnerSettings
from infinilm.executor.memory import free_memory_bytes
from infinilm.executor.model_runner import SubmittedStep
from infinilm.executor.rank_worker import ForwardInput, ForwardOutput, RankWorker
from infinilm.executor.step_io import StepInput
from infinilm.interrupts import interrupts_allowed, interrupts_held
from infinilm.layers.formats import DENSE, WeightFormats
from infinilm.models import ModelConfig


def describe(worker: RankWorker) -> ExecutorInfo:
    return ExecutorInfo(
        num_ranks=worker.group.size,
        device=str(worker.device),
        dtype=str(worker.dtype).removeprefix("torch."),
        attention=worker.backend.name,
        max_in_flight=2 if worker.device.type == "cuda" else 1,
    )


class LocalExecutor:
    """See `Executor`."""

    def __init__(self, device: torch.device, dtype: torch.dtype, attention_backend: str = "auto") -> None:
        self.free_bytes = free_memory_bytes(device)
        group = CommunicationGroup(RankInfo(0, 1, device))
        self._worker: RankWorker | None = RankWorker(group, dtype, attention_backend)
        self.info = describe(self.worker)
        self._lock = Lock()

    @property
    def worker(self) -> RankWorker:
        """Rank 0."""
        self.check_health()
        assert self._worker is not None
        return self._worker

    @property
    def cache_bytes(self) -> int:
        return self.worker.cache_bytes

    def load(self, config: ModelConfig, max_len: int, source: Path | int, formats: WeightFormats = DENSE) -> None:
        with self._computing() as worker:
            worker.load(config, max_len, source, formats)

    def load_shards(self, shards: Sequence[Mapping[str, Tensor]]) -> None:
        with self._computing() as worker:
            worker.load_shards(shards[0])

    def state_dicts(self) -> list[dict[str, Tensor]]:
        with self._computing() as worker:
            return [worker.state_dict()]

    def reset_cache(self, shape: CacheShape | None) -> None:
        with self._computing() as worker:
            worker.reset_cache(shape)

    def measure_workspace(self, settings: RunnerSettings) -> MeasuredWorkspace:
        with self._computing() as worker:
            return worker.measure_workspace(settings)

    def start_rows(self, settings: RunnerSettings) -> None:
        with self._computing() as worker:
            worker.start_rows(settings)

    def set_hook_registry(self, registry: HookRegistry | None) -> None:
        self.worker.registry = registry

    def submit(self, step: StepInput) -> SubmittedStep:
        with self._computing() as worker:
            registry = worker.registry
            return worker.execute(step, registry.patterns() if registry is not None else ())

    def forward(self, given: ForwardInput) -> ForwardOutput:
        with self._computing() as worker:
            return worker.forward(given)

    def check_health(self) -> None:
        if self._worker is None:
            raise EngineError("the engine was closed; make a new one")

    def shutdown(self) -> None:
        self._worker = None

    @contextmanager
    def _computing(self) -> Iterator[RankWorker]:
        """Compute with this rank's threads, in one call at a time. Ctrl-C is let through."""
        with interrupts_held(), exclusively(self._lock):
            worker = self.worker
            with worker.computing(), interrupts_allowed():
                yield worker


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
