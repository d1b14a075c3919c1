"""One rank, in this process."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from infinilm.errors import EngineError
from infinilm.executor.commands import Command
from infinilm.executor.executor import CacheShape, MeasuredWorkspace, RunnerSettings, StepHandle
from infinilm.executor.memory import free_memory_bytes
from infinilm.executor.step_io import StepInput
from infinilm.interrupts import interrupts_allowed, interrupts_held
from infinilm.layers.formats import DENSE, WeightFormats
from infinilm.models import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

    from infinilm.debug import HookRegistry
    from infinilm.executor.rank_worker import ForwardInput, ForwardOutput


class LocalExecutor:
    """See `Executor`."""

    driver = 0
    """The rank of this process."""

    def __init__(self, worker: Any) -> None:
        """`worker` is a `RankWorker` or a `NativeWorker`."""
        self.free_bytes = free_memory_bytes(worker.device)
        self._worker: Any = worker
        self.info = worker.describe()
        self._lock = Lock()

    @property
    def worker(self) -> Any:
        """This process's rank: a `RankWorker`, or a `NativeWorker`, which runs a model without torch."""
        self.check_health()
        assert self._worker is not None
        return self._worker

    @property
    def cache_bytes(self) -> int:
        num_bytes: int = self.worker.cache_bytes
        return num_bytes

    def call_all(self, command: Command, *arguments: Any) -> list[Any]:
        """Call the worker's method of this name on every rank. Returns the results by rank.

        Only one call runs at a time. Ctrl-C can interrupt it.
        """
        with interrupts_held(), exclusively(self._lock):
            worker = self.worker
            with worker.computing(), interrupts_allowed():
                return [getattr(worker, command)(*arguments)]

    def load(self, config: ModelConfig, max_len: int, source: Path | int, formats: WeightFormats = DENSE) -> None:
        self.call_all(Command.LOAD, config, max_len, source, formats)

    def load_shards(self, shards: "Sequence[Mapping[str, Tensor]]") -> None:
        self.call_all(Command.LOAD_SHARDS, shards)

    def state_dicts(self) -> "list[dict[str, Tensor]]":
        return self.call_all(Command.STATE_DICT)

    def reset_cache(self, shape: CacheShape | None) -> None:
        self.call_all(Command.RESET_CACHE, shape)

    def measure_workspace(self, settings: RunnerSettings) -> MeasuredWorkspace:
        found: list[MeasuredWorkspace] = self.call_all(Command.MEASURE_WORKSPACE, settings)
        return MeasuredWorkspace(max(each.activations for each in found), max(each.libraries for each in found))

    def start_rows(self, settings: RunnerSettings) -> None:
        self.call_all(Command.START_ROWS, settings)
        self.info = self.worker.describe()

    def set_hook_registry(self, registry: "HookRegistry | None") -> None:
        self.worker.registry = registry

    def submit(self, step: StepInput) -> StepHandle:
        submitted: StepHandle = self.call_all(Command.EXECUTE, step, self._hook_patterns())[self.driver]
        return submitted

    def _hook_patterns(self) -> tuple[str, ...]:
        registry = self._worker.registry if self._worker is not None else None
        return registry.patterns() if registry is not None else ()

    def forward(self, given: "ForwardInput") -> "ForwardOutput":
        output: ForwardOutput = self.call_all(Command.FORWARD, given)[self.driver]
        return output

    def check_layers(self) -> list[str]:
        by_rank: list[list[str]] = self.call_all(Command.CHECK_LAYERS)
        return list(dict.fromkeys(name for failing in by_rank for name in failing))

    def computing(self) -> AbstractContextManager[None]:
        threads: AbstractContextManager[None] = self.worker.computing()
        return threads

    def check_health(self) -> None:
        if self._worker is None:
            raise EngineError("the engine was closed; make a new one")

    def shutdown(self) -> None:
        self._worker = None


@contextmanager
def exclusively(lock: Lock) -> Iterator[None]:
    """Hold the lock of an executor, or raise if it is taken."""
    if not lock.acquire(blocking=False):
        raise EngineError(
            "the engine is in the middle of another call; call it from one thread at a time, not from a hook"
        )
    try:
        yield
    finally:
        lock.release()
