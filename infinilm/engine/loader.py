"""From settings to a model ready to run: find it, load it, share out the memory."""

import logging
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from infinilm.attention import select_backend
from infinilm.cache.paged import PagedKVCache
from infinilm.config import Config
from infinilm.engine.cpu import avoid_false_amx
from infinilm.engine.memory import MemoryLedger, plan_memory
from infinilm.engine.model_runner import ModelRunner
from infinilm.errors import CheckpointError, InvalidValueError
from infinilm.loading.checkpoint import Checkpoint, open_checkpoint
from infinilm.loading.sources import resolve
from infinilm.loading.tokenizer import Tokenizer
from infinilm.loading.weights import check_shapes, load_weights
from infinilm.models import LlamaConfig, create_model

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What the engine runs, and what was measured and decided on the way."""

    runner: ModelRunner
    model_config: LlamaConfig
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    memory: MemoryLedger


def load_model(config: Config) -> LoadedModel:
    """Load the checkpoint that the settings name."""
    start_time = perf_counter()
    _check_single_rank(config)
    path = resolve(config.model)
    checkpoint = open_checkpoint(path)
    try:
        loaded = _load(checkpoint, config)
    finally:
        checkpoint.close()
    runner = loaded.runner
    logger.info(
        "%s: %s on %s in %s, attention by %s, up to %d tokens per request, ready in %.1f s",
        path.name,
        loaded.model_config.model_type,
        runner.device,
        str(runner.cache.dtype).removeprefix("torch."),
        runner.backend.name,
        loaded.max_model_len,
        perf_counter() - start_time,
    )
    logger.info("%s", loaded.memory)
    return loaded


def _load(checkpoint: Checkpoint, config: Config) -> LoadedModel:
    # Everything is decided from the headers, before memory is taken for anything.
    model_config = LlamaConfig.from_dict(checkpoint.config)
    tokenizer = checkpoint.tokenizer()
    device = select_device(config)
    dtype = select_dtype(config, model_config, device)
    backend = select_backend(config.attention_backend, device)
    longest = select_max_model_len(config, model_config)
    weight_bytes = _check_fits(checkpoint, model_config, dtype)
    memory = plan_memory(
        config, model_config, device=device, dtype=dtype, weight_bytes=weight_bytes, max_model_len=longest
    )
    max_model_len = min(longest, memory.num_blocks * memory.block_size)

    if device.type == "cpu" and dtype != torch.float32:
        avoid_false_amx()
    model = create_model(model_config, max_len=max_model_len, dtype=dtype, device=device)
    load_weights(model.weight_targets(), checkpoint, is_ignorable=model.is_ignorable)
    cache = PagedKVCache(
        model_config.num_hidden_layers,
        memory.num_blocks,
        memory.block_size,
        model_config.num_key_value_heads,
        model_config.head_dim,
        dtype=dtype,
        device=device,
    )
    max_num_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
    runner = ModelRunner(model, cache, backend, max_num_rows=max_num_rows, max_model_len=max_model_len)
    eos_token_ids = _eos_token_ids(checkpoint, model_config, tokenizer)
    return LoadedModel(runner, model_config, tokenizer, eos_token_ids, max_model_len, memory)


def _check_single_rank(config: Config) -> None:
    num_ranks = config.distributed.tp_size if config.distributed else config.tensor_parallel_size
    if num_ranks > 1:
        raise InvalidValueError(
            f"tensor_parallel_size={num_ranks}: this version runs on one device; use tensor_parallel_size=1"
        )


def select_device(config: Config) -> torch.device:
    """The device asked for, or the best there is."""
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise InvalidValueError("device='cuda': torch finds no CUDA device here; use device='cpu' or 'auto'")
    if config.device == "cpu" or not has_cuda:
        return torch.device("cpu")
    index = config.distributed.tp_device_ids[0] if config.distributed else 0
    if index >= torch.cuda.device_count():
        raise InvalidValueError(
            f"tp_device_ids={[index]}: there are {torch.cuda.device_count()} CUDA devices, numbered from 0"
        )
    return torch.device("cuda", index)


def select_dtype(config: Config, model_config: LlamaConfig, device: torch.device) -> torch.dtype:
    """The type asked for; else float32 on a CPU, where it is both exact and fast, and the checkpoint's on a GPU."""
    name = config.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else model_config.dtype or "bfloat16"
    dtype: Any = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def select_max_model_len(config: Config, model_config: LlamaConfig) -> int:
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


def _check_fits(checkpoint: Checkpoint, model_config: LlamaConfig, dtype: torch.dtype) -> int:
    """Compare the model that the config describes with the tensors there are. Returns the bytes it will take."""
    num_tensors = len(checkpoint.shapes())
    if model_config.num_hidden_layers > num_tensors:
        raise CheckpointError(
            f"{checkpoint.path}: num_hidden_layers={model_config.num_hidden_layers}, but there are only "
            f"{num_tensors} tensors; the config and the weights do not belong together"
        )
    outline = create_model(model_config, max_len=1, dtype=dtype, device="meta")
    shapes = {name: tuple(target.shape) for name, target in outline.weight_targets().items()}
    check_shapes(shapes, checkpoint, is_ignorable=outline.is_ignorable)
    return outline.num_bytes()


def _eos_token_ids(checkpoint: Checkpoint, model_config: LlamaConfig, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Every id that ends an answer: those of the generation config and of the model's own."""
    found: dict[int, None] = {}
    for ids in (checkpoint.generation_config.get("eos_token_id"), model_config.eos_token_id):
        for token_id in ids if isinstance(ids, list) else [ids]:
            if isinstance(token_id, int) and 0 <= token_id < model_config.vocab_size:
                found[token_id] = None
    if not found and tokenizer is not None and tokenizer.eos_token_id is not None:
        found[tokenizer.eos_token_id] = None
    return tuple(found)
