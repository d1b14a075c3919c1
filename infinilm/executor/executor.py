"""The executor: what engines need of the ranks that run a model, wherever these live. No torch here."""

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
    """Of the cache in which the largest steps are measured."""


@dataclass(frozen=True, slots=True)
class MeasuredWorkspace:
    """What the largest steps took on a GPU besides weights and cache, in bytes."""

    activations: int
    libraries: int
    """Memory that torch does not know of: code on the device, and what CUDA's libraries keep."""


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """How the model runs, for logs and reports."""

    num_ranks: int
    """Over all pipeline stages."""
    device: str
    """The driver's: `cpu`, `cuda:0`, …"""
    dtype: str
    attention: str
    """The attention backend."""
    max_in_flight: int
    """Steps to keep submitted. A GPU computes one while the next is planned and the output of the last is read.
    Pipeline stages compute one each."""
    num_stages: int = 1
    """Pipeline stages."""
    max_run_steps: int = 1
    """Decode steps that are computed at a time while nothing else is to be done."""
    is_native: bool = False
    """Whether the native library computes all layers, without torch."""
    graph_tokens: int = 0
    """Once rows are started: steps with prompts are CUDA graphs up to so many tokens, and larger ones wait for the
    host's launches. 0: they take the device longer, or there are no graphs."""


class StepHandle(Protocol):
    """A submitted step."""

    def result(self) -> StepOutput:
        """The step's output. Waits for the device."""
        ...


class Executor(Protocol):
    """The ranks of one engine. Each method runs on all of them.

    An error on any rank is raised here, with its own type, and all ranks are ready for the next call. If a rank dies,
    this and every later call raises `WorkerDiedError`.
    """

    info: ExecutorInfo
    free_bytes: int
    """Memory that the rank with the least of it had before the model was loaded."""

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
        """Make an empty KV cache on every rank, or drop the one there is."""
        ...

    def measure_workspace(self, settings: RunnerSettings) -> MeasuredWorkspace:
        """Compute the largest steps, on a GPU, and measure what they take on the rank that needs the most."""
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
        """Run one forward pass whose caller manages the cache itself."""
        ...

    def check_layers(self) -> list[str]:
        """Try every rank's layers with different numbers of rows. See `self_check`.

        Returns what gives a token other bits for what is computed beside it on some rank, as text.
        """
        ...

    def computing(self) -> "AbstractContextManager[None]":
        """Compute with rank 0's threads, as its steps do, in the caller's code."""
        ...

    def check_health(self) -> None:
        """Raise if a rank has died or the executor was shut down."""
        ...

    def shutdown(self) -> None:
        """Stop all ranks and release their memory. Calling it again does nothing."""
        ...
