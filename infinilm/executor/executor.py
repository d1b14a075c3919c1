"""The executor: an engine's interface to the ranks that run its model, wherever they run. Needs no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from infinilm.executor.step_io import StepInput, StepOutput

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import Tensor

    from infinilm.cache.paged import Cache
    from infinilm.debug import HookRegistry
    from infinilm.executor.rank_worker import ForwardInput, ForwardOutput
    from infinilm.layers.formats import WeightFormats
    from infinilm.models import ModelConfig


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The size of the KV cache; the same on all ranks."""

    num_blocks: int | list[int]
    """One number for all groups of layers, or one for each."""
    block_size: int
    dtype: str
    cache_class: "type[Cache] | None" = None
    """None: `PagedKVCache`."""
    cache_settings: Mapping[str, Any] = field(default_factory=dict)
    """The class's keyword arguments besides sizes."""


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """The sizes of the rows that a `ModelRunner` keeps."""

    max_num_rows: int
    max_model_len: int
    max_num_batched_tokens: int
    block_size: int
    use_graphs: bool
    kv_dtype: str
    """The dtype of the cache in which the largest steps are measured."""


@dataclass(frozen=True, slots=True)
class MeasuredWorkspace:
    """GPU memory that the largest steps took besides weights and cache, in bytes."""

    activations: int
    libraries: int
    """Memory that torch does not count: code on the device, and what CUDA's libraries keep."""


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """How the model runs, for logs and reports."""

    num_ranks: int
    """The ranks of all pipeline stages."""
    device: str
    """The driver's device: `cpu`, `cuda:0`, …"""
    dtype: str
    attention: str
    """The attention backend."""
    max_in_flight: int
    """The number of steps to keep in flight. A GPU computes one while the host plans the next and reads the output of
    the last. Pipeline stages compute one each."""
    num_stages: int = 1
    """Pipeline stages."""
    max_run_steps: int = 1
    """The most decode steps that are computed in one call while there is no other work."""
    is_native: bool = False
    """Whether the native library computes all layers, without torch."""
    graph_tokens: int = 0
    """Known once rows are started. Steps with prompts of up to this many tokens are CUDA graphs, and larger ones wait
    for the host's kernel launches. 0: larger ones take the device longer than the host, or there are no graphs."""


class StepHandle(Protocol):
    """A submitted step."""

    def result(self) -> StepOutput:
        """The step's output. Waits for the device."""
        ...


class Executor(Protocol):
    """The ranks of one engine. Each method runs on all of them.

    An error on any rank is raised in the engine's process with its own type, and all ranks are ready for the next call.
    If a rank dies, this and every later call raises `WorkerDiedError`.
    """

    info: ExecutorInfo
    free_bytes: int
    """Free memory before the model was loaded, on the rank with the least."""

    @property
    def cache_bytes(self) -> int:
        """Memory that the KV cache holds on each rank."""
        ...

    def load(self, config: "ModelConfig", max_len: int, source: "Path | int", formats: "WeightFormats") -> None:
        """Build the model on every rank, with weights from a checkpoint or random ones from a seed."""
        ...

    def load_shards(self, shards: "Sequence[Mapping[str, Tensor]]") -> None:
        """Copy weights into the model: `shards[rank]` on each rank."""
        ...

    def state_dicts(self) -> "list[dict[str, Tensor]]":
        """Copies of every rank's weights, on the host."""
        ...

    def reset_cache(self, shape: CacheShape | None) -> None:
        """Make an empty KV cache on every rank; None: only drop the old one."""
        ...

    def measure_workspace(self, settings: RunnerSettings) -> MeasuredWorkspace:
        """Compute the largest steps on a GPU, and measure their memory on the rank that needs the most."""
        ...

    def start_rows(self, settings: RunnerSettings) -> None:
        """Make every rank ready for `submit`."""
        ...

    def set_hook_registry(self, registry: "HookRegistry | None") -> None:
        """Let hooks see the activations of all later steps."""
        ...

    def submit(self, step: StepInput) -> StepHandle:
        """Start a step. On a GPU this returns while the device still computes."""
        ...

    def forward(self, given: "ForwardInput") -> "ForwardOutput":
        """Run one forward pass. The caller manages the cache."""
        ...

    def check_layers(self) -> list[str]:
        """Try every rank's layers with different numbers of rows. See `self_check`.

        Returns the names of layers in which, on some rank, a token's bits depend on the other tokens of a step.
        """
        ...

    def computing(self) -> "AbstractContextManager[None]":
        """Let the caller's code compute with the driver's threads, as its steps do."""
        ...

    def check_health(self) -> None:
        """Raise if a rank has died or the executor was shut down."""
        ...

    def shutdown(self) -> None:
        """Stop all ranks and release their memory. Calling it again does nothing."""
        ...
