"""The low-level engine: one forward pass per call. The caller manages requests, cache and sampling."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from infinilm.cache import CacheConfig, CacheLayout, CacheLimits, PagedKVCacheConfig, StaticKVCacheConfig, layout_of
from infinilm.cache.config import FP8
from infinilm.cache.paged import Cache
from infinilm.checks import check_activation_bits, check_choice, check_flag
from infinilm.config import EXECUTORS
from infinilm.debug import HookRegistry, RequestRows
from infinilm.debug.hooks import attach
from infinilm.distributed.config import DistConfig
from infinilm.errors import EngineError, InvalidTypeError, InvalidValueError, PromptTooLongError
from infinilm.executor.executor import CacheShape
from infinilm.executor.guarantee import find_guarantee
from infinilm.executor.loader import select_devices, start_executor
from infinilm.executor.memory import format_bytes, free_memory_bytes, give_back, is_out_of_memory, token_bytes
from infinilm.executor.rank_worker import ForwardInput
from infinilm.generation import GenerationMixin, GenerationStep, NextTokens
from infinilm.interrupts import Turns, interrupts_allowed, interrupts_held
from infinilm.loading.checkpoint import open_checkpoint
from infinilm.loading.sources import resolve
from infinilm.lowlevel.infer_input import Input as InferInput
from infinilm.lowlevel.infer_input import Output as InferOutput
from infinilm.lowlevel.params import ParamTable
from infinilm.lowlevel.prepare_inputs import PreparedInput, lower
from infinilm.models import ModelConfig
from infinilm.models.auto import ModelChoices, check_fp8_cache, find_eos_token_ids, make_choices, outline_model
from infinilm.models.base import StagedModel
from infinilm.models.registry import FAMILIES
from infinilm.platforms import DeviceType, split_device
from infinilm.sampling import check_uniform, draw_uniform
from infinilm.text.tokenizer import Tokenizer

P = ParamSpec("P")
T = TypeVar("T")

MEMORY_SHARE = 0.9
"""The share of the free memory that a cache may take."""


def _exclusive(method: Callable[Concatenate["InferEngine", P], T]) -> Callable[Concatenate["InferEngine", P], T]:
    """Decorator: the method waits while another thread's call runs. It raises an error if it is called from within
    another call of the same thread, or if the engine is closed or dead."""

    @wraps(method)
    def call(engine: "InferEngine", /, *args: P.args, **kwargs: P.kwargs) -> T:
        with interrupts_held():
            if engine._turns.is_mine:
                raise EngineError(
                    f"{method.__name__}: the engine is in the middle of another call, which this one comes from; call "
                    "it when that has returned, and not from a hook or streamer"
                )
            engine._turns.take(interruptible=True)
            try:
                engine._executor.check_health()
                with interrupts_allowed():
                    return method(engine, *args, **kwargs)
            finally:
                engine._turns.give_back()

    return call


class InferEngine(GenerationMixin):
    """Runs forward passes of a model, on one rank or many.

    `config` is the path of a checkpoint, or a model configuration; weights are then random until you call `load_param`.
    `cache_config` None: there is no cache, and each forward pass attends only to its own input.

    `dtype` None: a configuration's own type; a checkpoint's own type on a GPU, and float32 on a CPU.
    `dtype`, `quantization` and `activation_bits` have the same meaning as in `Config`: on a CPU a GGUF file's matrices
    stay quantised unless you set a `dtype` or quantization="none"; q8 and q4 quantise a checkpoint's matrices while
    they are read.

    `deterministic` and `executor` (where the ranks run) also have the same meaning as in `Config`. The attribute
    `guarantee` is "yes", or the reason why results may depend on what else is computed, as in `LLM.stats()`.

    `generate` uses the cache from its beginning and overwrites its contents. Calls from several threads run one after
    the other, in order. After any error the next call finds the engine as before.
    """

    Input: TypeAlias = InferInput
    Output: TypeAlias = InferOutput

    config: ModelConfig

    def __init__(
        self,
        config: ModelConfig | str | Path,
        distributed_config: DistConfig | None = None,
        device_type: str | torch.device | DeviceType | None = None,
        cache_config: CacheConfig | None = None,
        *,
        dtype: str | torch.dtype | None = None,
        quantization: str | None = None,
        activation_bits: int = 16,
        deterministic: bool | None = None,
        executor: str = "auto",
    ) -> None:
        check_choice("executor", executor, EXECUTORS)
        if deterministic is not None:
            check_flag("deterministic", deterministic)
        check_activation_bits(activation_bits)
        self._dist_config = _check_dist_config(distributed_config)
        if cache_config is not None:
            _check_cache_config(cache_config)
        kind = _device_kind(device_type, self._dist_config)
        devices = select_devices(kind, self._dist_config, "device_type", executor=executor)
        source, choices = self._open(
            config,
            devices,
            dtype=dtype,
            quantization=quantization,
            activation_bits=activation_bits,
            deterministic=deterministic,
        )
        tp_size, num_stages = self._dist_config.tp_size, self._dist_config.pp_size
        outlines = [
            outline_model(self.config, choices.dtype, tp_size, rank, choices.formats, num_stages=num_stages)
            for rank in range(len(devices))
        ]
        self._params = ParamTable(choices.outline, outlines)
        self._held = [cast(StagedModel, part).stage.layers if num_stages > 1 else None for part in outlines]
        self._weight_bytes = max(outline.num_bytes() for outline in outlines)
        self.max_len = self.config.max_context_len()
        self._registry: HookRegistry | None = None
        self._cache_config: CacheConfig | None = None
        self._layout: CacheLayout | None = None
        self._turns = Turns()
        self._kv_dtype = str(choices.kv_dtype).removeprefix("torch.")
        self._executor = start_executor(executor, devices, choices.dtype, choices.attention_backend, num_stages)
        try:
            self._check_room(devices[0])
            with torch.inference_mode(False):  # even if the caller is in it: the threads that read weights are not
                self._executor.load(self.config, self.max_len, source, choices.formats)
            is_ordered = choices.formats.is_ordered or bool(deterministic)
            self.guarantee = str(find_guarantee(self._executor, is_ordered=is_ordered))
            if cache_config is not None:
                self.reset_cache(cache_config)
        except BaseException as error:
            self.close()
            if is_out_of_memory(error):
                give_back(error)
            raise

    def _open(
        self,
        config: ModelConfig | str | Path,
        devices: list[torch.device],
        *,
        dtype: str | torch.dtype | None,
        **settings: Any,
    ) -> tuple[Path | int, ModelChoices]:
        """Read the checkpoint's headers. Returns the source of the weights (path or seed) and the model's choices."""
        self.tokenizer: Tokenizer | None = None
        self._end_ids: tuple[int, ...] | None = None
        if isinstance(config, ModelConfig):
            self.config = config
            dtype = config.dtype if dtype in (None, "auto") else dtype
            return 0, make_choices(config, None, devices[0], self._dist_config.tp_size, dtype=dtype, **settings)
        if not isinstance(config, (str, Path)):
            raise InvalidTypeError(f"config={config!r} must be a ModelConfig or the path of a checkpoint")
        path = resolve(config)
        checkpoint = open_checkpoint(path)
        try:
            self.config = ModelConfig.from_dict(checkpoint.config)
            self.tokenizer = checkpoint.tokenizer()
            self._end_ids = find_eos_token_ids(checkpoint, self.config, self.tokenizer)
            tp_size = self._dist_config.tp_size
            return path, make_choices(self.config, checkpoint, devices[0], tp_size, dtype=dtype, **settings)
        finally:
            checkpoint.close()

    def _check_room(self, device: torch.device) -> None:
        if self._weight_bytes > self._executor.free_bytes:
            raise InvalidValueError(
                f"the model needs {format_bytes(self._weight_bytes)} on {device}, where "
                f"{format_bytes(self._executor.free_bytes)} are free; use more ranks (distributed_config), a smaller "
                "dtype or model, or end other processes"
            )

    # --- weights ----------------------------------------------------------------------------------------

    @_exclusive
    def load_param(self, name: str, tensor: Tensor | npt.NDArray[Any]) -> None:
        """Load a full weight, by its name in a Hugging Face checkpoint; every rank takes its shard.

        Tensors that a checkpoint may hold but the model does not use are ignored, for example the head of a model with
        tied embeddings.
        """
        self._load(self._params.check({name: tensor}, is_complete=False))

    @_exclusive
    def load_params(self, params: Mapping[str, Tensor | npt.NDArray[Any]], strict: bool = True) -> None:
        """Load several weights; with `strict` they must be all of the model's. If any is wrong, none is loaded."""
        check_flag("strict", strict)
        self._load(self._params.check(params, is_complete=strict))

    def _load(self, weights: Mapping[str, Tensor]) -> None:
        for name, weight in weights.items():
            self._executor.load_shards(self._params.cut(name, weight))

    @_exclusive
    def state_dict(self) -> list[dict[str, Tensor]]:
        """Copies of every rank's weights, on the host. A rank's shard has fewer rows (q, k, v, gate, up, embedding and
        head) or columns (o and down) than the full weight. A pipeline stage has only the weights of its layers."""
        return self._executor.state_dicts()

    def state_dict_keyname(self) -> list[str]:
        """The names of all weights."""
        return self._params.names()

    # --- running ----------------------------------------------------------------------------------------

    @_exclusive
    def forward(self, given: InferInput | None = None, /, **fields: Any) -> InferOutput:
        """Compute an `Input`, or the fields of one given as keywords, and draw each request's next token."""
        if given is None:
            given = InferInput(**fields)
        elif fields or not isinstance(given, InferInput):
            raise InvalidTypeError("forward takes one InferEngine.Input, or its fields as keywords")
        return self._forward(given)

    __call__ = forward
    generate = _exclusive(GenerationMixin.generate)

    def _forward(self, given: InferInput) -> InferOutput:
        lowered = lower(given, self._layout, vocab_size=self.config.vocab_size, max_len=self.max_len)
        values = check_uniform(lowered.num_requests, given.temperature, given.top_k, given.top_p, given.random_val)
        ends = np.cumsum(lowered.batch.query_lens)
        rows = np.arange(ends[-1]) if given.return_logits else ends - 1
        registry = self._registry
        if registry is not None:
            registry.begin_step(_rows_of(lowered, all_logits=given.return_logits))
        patterns = registry.patterns() if registry is not None else ()
        with self._executor.computing():  # otherwise torch's sampling threads would spin during the next pass
            result = self._executor.forward(ForwardInput(lowered.batch, rows, self._shape_of(lowered.layout), patterns))
            hidden, logits = result.hidden, result.logits
            samples = draw_uniform(logits[torch.from_numpy(ends - 1)] if given.return_logits else logits, **values)
        if error := next((sample.error for sample in samples.to_host() if sample.error), None):
            raise error
        return InferOutput(
            samples.token_ids.cpu(),
            logits=_ordinary(lowered.restore(logits)) if given.return_logits else None,
            hidden_states=_ordinary(lowered.restore(hidden)) if given.return_hidden_states else None,
        )

    def _start_generation(self, batch_size: int, max_len: int) -> NextTokens:
        limit = self.max_len
        if self._layout is not None:
            if self._layout.max_batch_size is not None and batch_size > self._layout.max_batch_size:
                raise InvalidValueError(
                    f"input_ids has {batch_size} rows, but the cache has max_batch_size={self._layout.max_batch_size}; "
                    "give fewer, or a larger cache with reset_cache"
                )
            blocks_each = self._layout.tables(batch_size).shape[1]
            limit = min(limit, self._layout.max_cache_len or limit, blocks_each * self._layout.block_size)
        if max_len - 1 > limit:
            raise PromptTooLongError(
                f"prompt and max_new_tokens make {max_len} tokens, of which all but the last are computed; the model "
                f"and its cache take {limit} for each of {batch_size} rows; ask for less, or have a larger cache"
            )

        def next_tokens(step: GenerationStep) -> list[int]:
            if self._layout is None:
                output = self._forward(InferInput(input_ids=step.text, **step.sampling))
            else:
                lengths = [step.num_computed] * batch_size
                output = self._forward(InferInput(input_ids=step.new_ids, cache_lengths=lengths, **step.sampling))
            ids: list[int] = output.output_ids.tolist()
            return ids

        return next_tokens

    def _eos_token_ids(self) -> tuple[int, ...]:
        return super()._eos_token_ids() if self._end_ids is None else self._end_ids

    # --- cache ------------------------------------------------------------------------------------------

    @_exclusive
    def reset_cache(self, cache_config: CacheConfig | None = None) -> None:
        """Replace the cache by an empty one of this kind and size; None: `StaticKVCacheConfig()`.

        The previous cache's memory is reused if it suffices. If the new cache is refused, the previous one stays, with
        its contents. If memory runs out unexpectedly, there is no cache afterwards.
        """
        config = StaticKVCacheConfig() if cache_config is None else cache_config
        _check_cache_config(config)
        config = config.unique_copy()
        if isinstance(config, PagedKVCacheConfig) and config.dtype == FP8:
            check_fp8_cache("dtype", self.config, torch.device(self._executor.info.device))
        layout = layout_of(config, self._cache_limits())
        derived: dict[str, Any] = {}
        if isinstance(config, PagedKVCacheConfig):
            derived = {"num_blocks": layout.num_blocks, "max_kv_memory_bytes": None}
        elif isinstance(config, StaticKVCacheConfig):
            derived = {"max_cache_len": layout.max_cache_len}
        for name, value in derived.items():
            object.__setattr__(config, name, value)  # the copy is the engine's own
        kind, settings = config.cache_class(), config.cache_settings()
        _check_cache_class(kind, config, self.config.model_type)
        shape = replace(self._shape_of(layout), cache_class=kind, cache_settings=settings)
        self._cache_config = self._layout = None
        try:
            self._executor.reset_cache(shape)
        except BaseException:
            with suppress(EngineError):  # the engine may be dead, which the first error reports already
                self._executor.reset_cache(None)  # on every rank, even if only some ran out of memory
            raise
        self._cache_config, self._layout = config, layout

    def get_cache_config(self) -> CacheConfig | None:
        """The current cache's configuration, including derived sizes; None: there is no cache."""
        return None if self._cache_config is None else self._cache_config.unique_copy()

    def _cache_limits(self) -> CacheLimits:
        info = self._executor.info

        def most_bytes(dtype: str | None) -> int:
            kind: torch.dtype = getattr(torch, dtype or self._kv_dtype)
            return max(token_bytes(self.config, self._dist_config.tp_size, held, kind) for held in set(self._held))

        device = torch.device(info.device)
        free_bytes = free_memory_bytes(device)
        if device.type == "cpu":
            free_bytes //= info.num_ranks
        # The old cache is freed before the new one is made. On a CPU, pages of it that were never written already count
        # as free, so the sum could be too high; limit it to what was free at the start, unless more is free now.
        held_bytes = self._executor.cache_bytes
        at_start = self._executor.free_bytes - self._weight_bytes
        available = max(free_bytes, min(free_bytes + held_bytes, at_start))
        return CacheLimits(self.max_len, most_bytes, max(int(available * MEMORY_SHARE), held_bytes))

    def _shape_of(self, layout: CacheLayout) -> CacheShape:
        return CacheShape(layout.num_blocks, layout.block_size, layout.dtype or self._kv_dtype)

    # --- the rest ---------------------------------------------------------------------------------------

    def get_dist_config(self) -> DistConfig:
        """A copy of the configuration of ranks and their devices."""
        return _check_dist_config(self._dist_config)

    def set_hook_registry(self, registry: HookRegistry | None) -> None:
        """Let hooks see, and replace, the activations of all later passes; None: remove the hooks."""
        with interrupts_held(), self._turns:
            self._registry = attach(registry, self._registry, self.config.num_hidden_layers)
            self._executor.set_hook_registry(self._registry)

    def close(self) -> None:
        """Stop the ranks and free their memory. Further calls do nothing."""
        self._executor.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<InferEngine: {self._dist_config}>"


def _check_dist_config(distributed_config: DistConfig | None) -> DistConfig:
    if distributed_config is None:
        return DistConfig()
    if not isinstance(distributed_config, DistConfig):
        raise InvalidTypeError(f"distributed_config={distributed_config!r} must be a DistConfig")
    return DistConfig(tp_device_ids=distributed_config.tp_device_ids, pp_size=distributed_config.pp_size)


def _check_cache_config(cache_config: object) -> None:
    if not isinstance(cache_config, CacheConfig):
        raise InvalidTypeError(f"cache_config={cache_config!r} must be a CacheConfig, such as StaticKVCacheConfig()")


def _check_cache_class(kind: object, config: CacheConfig, model_type: str) -> None:
    if not (isinstance(kind, type) and issubclass(kind, Cache)):
        raise InvalidTypeError(f"{type(config).__name__}.cache_class() returned {kind!r}, which is no class of Cache")
    if not kind.only_stores and not getattr(FAMILIES[model_type].builder, "updates_cache", False):
        raise InvalidValueError(
            f"models of model_type={model_type!r} do not call {kind.__name__}.update; use another cache_config, or "
            "have the model call it and set updates_cache = True"
        )


def _device_kind(device_type: str | torch.device | DeviceType | None, dist_config: DistConfig) -> str:
    """The kind of device. The distributed configuration selects among several devices."""
    if device_type is None:
        return "auto"
    if not isinstance(device_type, (str, torch.device)):
        raise InvalidTypeError(f"device_type={device_type!r} must be a string, a torch.device or a DeviceType")
    kind, index = ("auto", None) if device_type == "auto" else split_device(device_type, "device_type")
    if kind != "cpu" and index is not None and dist_config.tp_device_ids != [index]:
        raise InvalidValueError(
            f"device_type={str(device_type)!r} and {dist_config} disagree; "
            f"use device_type={kind!r} and DistConfig(tp_device_ids=[{index}])"
        )
    return kind


def _ordinary(result: Tensor) -> Tensor:
    """A writable tensor: tensors made in inference mode can't be written to outside of it."""
    return result.clone() if result.is_inference() else result


def _rows_of(lowered: PreparedInput, *, all_logits: bool) -> tuple[RequestRows, ...]:
    """For hooks: each request's rows in the tensors of the pass."""
    batch = lowered.batch
    ends = np.cumsum(batch.query_lens).tolist()
    starts = (batch.context_lens - batch.query_lens).tolist()
    return tuple(
        RequestRows(str(i), 0, slice(end - int(batch.query_lens[i]), end), starts[i], end - 1 if all_logits else i)
        for i, end in enumerate(ends)
    )
