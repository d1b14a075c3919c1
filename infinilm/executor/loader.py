"""From settings to a model ready to run: find it, load it, share out the memory."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from threading import Thread
from time import perf_counter

import torch

from infinilm.attention import why_not_native
from infinilm.config import Config
from infinilm.distributed.config import DistConfig
from infinilm.distributed.shard import PackedShard
from infinilm.errors import InvalidValueError
from infinilm.executor.executor import CacheShape, Executor, RunnerSettings
from infinilm.executor.local import LocalExecutor
from infinilm.executor.memory import MemoryLedger, describe_oom, give_back, is_out_of_memory, plan_memory
from infinilm.executor.processes import ProcessExecutor
from infinilm.executor.workspace import estimate_workspace, uses_graphs
from infinilm.kernels.support import has_kernels
from infinilm.layers.formats import WeightFormats
from infinilm.loading.checkpoint import Checkpoint, open_checkpoint
from infinilm.loading.sources import resolve
from infinilm.models import ModelConfig
from infinilm.models.auto import check_fits, choose_dtype, find_default_sampling, find_eos_token_ids
from infinilm.models.cpu import avoid_false_amx
from infinilm.models.quantization import choose_formats, note_dense
from infinilm.sampling_params import SamplingParams
from infinilm.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What the engine runs, and what was measured and decided on the way."""

    executor: Executor
    model_config: ModelConfig
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    memory: MemoryLedger
    default_sampling_params: SamplingParams = SamplingParams()  # noqa: RUF009 (it is frozen)


def load_model(config: Config) -> LoadedModel:
    """Load the checkpoint that the settings name."""
    start_time = perf_counter()
    path = resolve(config.model)
    checkpoint = open_checkpoint(path)
    try:
        loaded = _load(checkpoint, config)
    finally:
        checkpoint.close()
    info = loaded.executor.info
    logger.info(
        "%s: %s on %s in %s, attention by %s, up to %d tokens per request, ready in %.1f s",
        path.name,
        loaded.model_config.model_type,
        info.device if info.num_ranks == 1 else f"{info.num_ranks} x {info.device.partition(':')[0]}",
        info.dtype,
        info.attention,
        loaded.max_model_len,
        perf_counter() - start_time,
    )
    logger.info("%s", loaded.memory)
    return loaded


@dataclass(frozen=True, slots=True)
class _Choices:
    """What is decided from settings and headers, before memory is taken for anything."""

    dtype: torch.dtype
    formats: WeightFormats
    weight_bytes: int
    attention_backend: str
    kv_dtype: torch.dtype


def _choose(
    checkpoint: Checkpoint, config: Config, model_config: ModelConfig, devices: Sequence[torch.device]
) -> _Choices:
    device = devices[0]
    dtype = choose_dtype(config.dtype, model_config, device)
    formats = choose_formats(
        checkpoint, model_config.model_type, quantization=config.quantization, dtype=config.dtype, device=device
    )
    outline = check_fits(checkpoint, model_config, dtype, len(devices), formats)
    weights = outline.weight_targets()
    note_dense(weights, formats)
    is_quantized = any(isinstance(shard, PackedShard) for shard in weights.values())
    attention_backend = select_attention(config, model_config, device, dtype, is_quantized=is_quantized)
    kv_dtype = select_kv_dtype(config, device, dtype, is_half=is_quantized and attention_backend == "native")
    return _Choices(dtype, formats, outline.num_bytes(), attention_backend, kv_dtype)


def _load(checkpoint: Checkpoint, config: Config) -> LoadedModel:
    model_config = ModelConfig.from_dict(checkpoint.config)
    tokenizer = checkpoint.tokenizer()
    distributed = config.distributed or DistConfig(config.tensor_parallel_size)
    devices = select_devices(config.device, distributed)
    longest = select_max_model_len(config, model_config)
    choices = _choose(checkpoint, config, model_config, devices)
    executor: Executor | None = None
    memory: MemoryLedger | None = None
    try:
        executor = start_executor(config.executor, devices, choices.dtype, choices.attention_backend)
        workspace = estimate_workspace(
            config, model_config, choices.dtype, devices[0], max_model_len=longest, num_ranks=len(devices)
        )
        plan = partial(
            plan_memory,
            config,
            model_config,
            device=devices[0],
            kv_dtype=choices.kv_dtype,
            weight_bytes=choices.weight_bytes,
            free_bytes=executor.free_bytes,
            num_ranks=len(devices),
        )
        memory = plan(workspace=workspace, max_model_len=longest)
        if has_kernels(devices[0]):
            from infinilm.kernels.precompile import prepare_compiler  # which needs Triton

            Thread(target=prepare_compiler, daemon=True).start()  # while weights are read
        executor.load(model_config, memory.max_model_len, checkpoint.path, choices.formats)
        settings = RunnerSettings(
            max_num_rows=min(config.max_num_seqs, config.max_num_batched_tokens),
            max_model_len=memory.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=memory.block_size,
            use_graphs=uses_graphs(config, devices[0]),
        )
        if devices[0].type == "cuda":
            measured = workspace.measured(executor.measure_workspace(settings))
            memory = plan(workspace=measured, max_model_len=memory.max_model_len)
        kv_dtype = str(choices.kv_dtype).removeprefix("torch.")
        executor.reset_cache(CacheShape(memory.group_blocks, memory.block_size, kv_dtype))
        executor.start_rows(settings)
    except BaseException as error:
        if executor is not None:
            executor.shutdown()
        if not is_out_of_memory(error):
            raise
        give_back(error)
        raise InvalidValueError(describe_oom("loading the model", error, memory)) from error
    eos_token_ids = find_eos_token_ids(checkpoint, model_config, tokenizer)
    sampling = find_default_sampling(checkpoint)
    return LoadedModel(executor, model_config, tokenizer, eos_token_ids, memory.max_model_len, memory, sampling)


def start_executor(
    kind: str, devices: Sequence[torch.device], dtype: torch.dtype, attention_backend: str = "auto"
) -> Executor:
    """Start a rank on each device; `kind` is `Config.executor`."""
    if devices[0].type == "cpu" and dtype != torch.float32:
        avoid_false_amx()
    if kind == "local" and len(devices) > 1:
        raise InvalidValueError(f"executor='local' runs one rank, not {len(devices)}; use executor='processes'")
    if kind == "local" or (kind == "auto" and len(devices) == 1):
        return LocalExecutor(devices[0], dtype, attention_backend)
    return ProcessExecutor(devices, dtype, attention_backend)


def select_devices(kind: str, distributed: DistConfig) -> list[torch.device]:
    """The device of each rank, of the kind asked for or the best there is. Ranks on a CPU share it."""
    has_cuda = torch.cuda.is_available()
    if kind == "cuda" and not has_cuda:
        raise InvalidValueError("device='cuda': torch finds no CUDA device here; use device='cpu' or 'auto'")
    if kind == "cpu" or not has_cuda:
        return [torch.device("cpu")] * distributed.tp_size
    num_devices = torch.cuda.device_count()
    if missing := [index for index in distributed.tp_device_ids if index >= num_devices]:
        raise InvalidValueError(
            f"tp_device_ids={distributed.tp_device_ids} names {missing}, but there are {num_devices} CUDA devices, "
            "numbered from 0"
        )
    return [torch.device("cuda", index) for index in distributed.tp_device_ids]


def select_attention(
    config: Config, model_config: ModelConfig, device: torch.device, dtype: torch.dtype, *, is_quantized: bool
) -> str:
    """The backend asked for; with `auto` the native library's where it also multiplies with the weights, if it can."""
    if config.attention_backend not in ("auto", "native"):
        return config.attention_backend
    if config.attention_backend == "auto" and not is_quantized:
        return "auto"
    group = model_config.num_attention_heads // model_config.num_key_value_heads
    reason = why_not_native(device, dtype, model_config.head_dim, group)
    if reason is not None and config.attention_backend == "native":
        raise InvalidValueError(
            f"attention_backend='native' can't serve this model: {reason}; use attention_backend='auto'"
        )
    return "native" if reason is None else "auto"


def select_kv_dtype(config: Config, device: torch.device, dtype: torch.dtype, *, is_half: bool) -> torch.dtype:
    """The type of the KV cache: as asked for; with `auto` float16 if `is_half`, else the model's."""
    name = str(dtype).removeprefix("torch.")
    if device.type == "cuda" and config.kv_cache_dtype not in ("auto", name):
        raise InvalidValueError(
            f"kv_cache_dtype={config.kv_cache_dtype!r}: on a GPU the cache has the model's dtype, {name}; use 'auto'"
        )
    if config.kv_cache_dtype != "auto":
        name = config.kv_cache_dtype
    elif is_half:
        name = "float16"
    chosen: torch.dtype = getattr(torch, name)
    return chosen


def select_max_model_len(config: Config, model_config: ModelConfig) -> int:
    """The length asked for, at most what the checkpoint was made for."""
    longest = model_config.max_context_len()
    if config.max_model_len is None:
        return longest
    if config.max_model_len > longest:
        raise InvalidValueError(
            f"max_model_len={config.max_model_len} is more than the checkpoint's {longest} positions; "
            f"use {longest} or less"
        )
    return config.max_model_len
