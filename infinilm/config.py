"""The engine's settings: frozen, and checked when created."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from infinilm.cache.config import DTYPES, FP8, check_block_size
from infinilm.checks import (
    check_activation_bits,
    check_choice,
    check_flag,
    check_integer,
    check_real,
    make_numbers_plain,
)
from infinilm.distributed.config import DistConfig
from infinilm.errors import InvalidTypeError, InvalidValueError
from infinilm.platforms import check_device

ATTENTION_BACKENDS = ("auto", "torch", "triton", "native")
QUANTIZATIONS = ("none", "fp8", "int4", "q8", "q4")
EXECUTORS = ("auto", "local", "processes", "ray", "ray-spread")

PRESETS: dict[str, dict[str, Any]] = {
    # A laptop: few rows, and steps short enough that decoding continues during a prefill.
    "cpu": {"device": "cpu", "max_num_seqs": 32, "max_num_batched_tokens": 1024},
    # The smallest footprint that still serves a chat: a short context, little prefill workspace.
    "low-memory": {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "max_model_len": 2048,
        "gpu_memory_utilization": 0.5,
    },
    "single-gpu": {"device": "cuda", "tensor_parallel_size": 1},
    "multi-gpu": {"device": "cuda", "tensor_parallel_size": 2},
    # Many rows and large prefill steps: the most tokens per second over all requests.
    "throughput": {"max_num_seqs": 1024, "max_num_batched_tokens": 32768},
    # Small steps: the shortest wait between two tokens of one request.
    "latency": {"max_num_seqs": 64, "max_num_batched_tokens": 2048},
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of an engine. Measured values (blocks that fit, …) are attributes of the engine."""

    model: str | Path | None = None
    """A Hugging Face directory, a .gguf file, a hub id or an alias. None: the embedded model, `smollm2-135m`."""
    max_num_batched_tokens: int = 16384
    """The most tokens computed in one step, over all requests. Longer prompts are computed in chunks."""
    max_num_seqs: int = 512
    """The most requests computed in one step."""
    max_model_len: int | None = None
    """Tokens of prompt and answer together. None: the checkpoint's maximum, to which larger values are capped."""
    tensor_parallel_size: int = 1
    """Ranks that share each layer."""
    pipeline_parallel_size: int = 1
    """Stages that the layers are divided into, each of `tensor_parallel_size` ranks."""
    gpu_memory_utilization: float = 0.9
    """The share of the memory free at start, on any device, that the engine may use."""
    enforce_eager: bool = False
    """Never capture CUDA graphs. No effect on a CPU."""
    kvcache_block_size: int = 16
    """Tokens per KV cache block: any multiple of 16."""
    num_kvcache_blocks: int | None = None
    """None: as many as fit into memory and are useful."""
    device: str = "auto"
    """auto: a CUDA device if there is one, else the CPU. Others by name, see `docs/devices.md`."""
    dtype: str = "auto"
    """auto: float32 on a CPU, with matrices of 16 bits kept as they are; elsewhere the checkpoint's own. With any other
    value, a CPU converts weights to it, quantised ones too."""
    quantization: str | None = None
    """How matrices are stored. None: as in the checkpoint, see `docs/quantization.md`; on a CPU quantised matrices stay
    quantised if `dtype` is auto. fp8, int4, q8, q4: dense matrices are quantised while they are read. none: all
    matrices are dense.
    """
    activation_bits: int = 16
    """Bits of the activations that quantised matrices are multiplied with on a CPU, 16 or 8. 8: prompts are computed
    faster, and answers are less accurate (`docs/performance.md`). The head always uses 16."""
    kv_cache_dtype: str = "auto"
    """auto: `dtype`; float16 on a CPU whose weights are quantised. fp8: 8-bit floats with a scale for each token and
    head, about half the memory of 16 bits, see `docs/quantization.md`."""
    seed: int = 0
    """Requests without a seed derive theirs from this and their order of arrival."""
    enable_prefix_caching: bool = True
    deterministic: bool | None = None
    """Give a request the same tokens and log-probabilities, bit for bit, whatever else the engine computes and however
    it divides the work. None: only where that costs little: on a CPU unless `dtype` has 16 bits, and for a dense model
    of about 7 billion parameters or more on a Hopper GPU (`docs/determinism.md`). `LLM.stats().guarantee` says whether
    it is met."""
    attention_backend: str = "auto"
    distributed: DistConfig | None = None
    executor: str = "auto"
    """Where ranks run. local: one rank, in this process. processes: each rank but the driver in its own process. ray:
    each rank but the driver in an actor, on as few nodes of a Ray cluster as have room. ray-spread: each rank on its
    own node. auto: local for one rank, else processes."""

    def __post_init__(self) -> None:
        make_numbers_plain(self)
        if self.model is not None and not isinstance(self.model, (str, Path)):
            raise InvalidTypeError(f"model={self.model!r} must be a path, a hub id, an alias or None")
        check_integer("max_num_batched_tokens", self.max_num_batched_tokens, low=1)
        check_integer("max_num_seqs", self.max_num_seqs, low=1)
        if self.max_model_len is not None:
            check_integer("max_model_len", self.max_model_len, low=2)
        check_integer("tensor_parallel_size", self.tensor_parallel_size, low=1)
        check_integer("pipeline_parallel_size", self.pipeline_parallel_size, low=1)
        check_real("gpu_memory_utilization", self.gpu_memory_utilization, low=0.0, high=1.0, above_low=True)
        check_flag("enforce_eager", self.enforce_eager)
        check_block_size("kvcache_block_size", self.kvcache_block_size)
        if self.num_kvcache_blocks is not None:
            check_integer("num_kvcache_blocks", self.num_kvcache_blocks, low=1)
        check_device("device", self.device)
        check_choice("dtype", self.dtype, ("auto", *DTYPES))
        if self.quantization is not None:
            check_choice("quantization", self.quantization, QUANTIZATIONS)
        check_activation_bits(self.activation_bits)
        check_choice("kv_cache_dtype", self.kv_cache_dtype, ("auto", *DTYPES, FP8))
        check_integer("seed", self.seed, low=-(2**63), high=2**64 - 1)
        check_flag("enable_prefix_caching", self.enable_prefix_caching)
        if self.deterministic is not None:
            check_flag("deterministic", self.deterministic)
        check_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        check_choice("executor", self.executor, EXECUTORS)
        self._check_distributed()

    def _check_distributed(self) -> None:
        if self.distributed is not None and not isinstance(self.distributed, DistConfig):
            raise InvalidTypeError(f"distributed={self.distributed!r} must be a DistConfig")
        if self.distributed is None:
            return
        sizes = {"tensor_parallel_size": self.distributed.tp_size, "pipeline_parallel_size": self.distributed.pp_size}
        for name, size in sizes.items():
            if getattr(self, name) not in (1, size):
                raise InvalidValueError(
                    f"{name}={getattr(self, name)} and {self.distributed}, which is {size}, disagree; give one of them"
                )

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> Self:
        """Build from keywords. An unknown one raises an error that names it."""
        _check_known(kwargs)
        return cls(**kwargs)

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Self:
        """Ready-made settings: `LLM(Config.preset("cpu", model=path))`."""
        check_choice("preset", name, tuple(PRESETS))
        return cls.from_kwargs(**{**PRESETS[name], **overrides})

    def replace(self, **changes: Any) -> "Config":
        """A copy with some settings changed."""
        _check_known(changes)
        return replace(self, **changes)


def _check_known(kwargs: dict[str, Any]) -> None:
    known = [field.name for field in fields(Config)]
    if unknown := [name for name in kwargs if name not in known]:
        raise InvalidTypeError(f"unknown setting {unknown[0]!r}; known are: {', '.join(known)}")
