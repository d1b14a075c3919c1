"""How much memory there is, what takes it, and how many KV blocks fit into the rest."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from infinilm.cache.paged import PagedKVCache
from infinilm.config import Config
from infinilm.errors import InvalidValueError
from infinilm.layers.linear import kv_heads_per_rank
from infinilm.models import LlamaConfig

# A CPU's memory is shared with everything else on the machine. Unless a size is asked for, the KV cache
# takes as much as the weights do, within these bounds.
MIN_CPU_KV_BYTES, MAX_CPU_KV_BYTES = 1 << 30, 4 << 30


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """Where the memory goes. Made once at start and printed."""

    device: str
    num_ranks: int
    """The figures are those of each rank."""
    free_bytes: int
    """Free before the weights were loaded."""
    weight_bytes: int
    workspace_bytes: int
    """An estimate of the largest step's activations and logits."""
    kv_bytes: int
    block_bytes: int
    num_blocks: int
    block_size: int
    limited_by: str
    """What decided the number of blocks."""

    def __str__(self) -> str:
        tokens = self.num_blocks * self.block_size
        ranks = f", on each of {self.num_ranks} ranks" if self.num_ranks > 1 else ""
        return (
            f"memory on {self.device}{ranks}: {format_bytes(self.free_bytes)} free at start; "
            f"weights {format_bytes(self.weight_bytes)}, workspace up to {format_bytes(self.workspace_bytes)}, "
            f"KV cache {format_bytes(self.kv_bytes)} = {self.num_blocks} blocks x {self.block_size} tokens "
            f"= {tokens} tokens ({self.limited_by})"
        )


def format_bytes(count: float) -> str:
    """A size for people: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def free_memory_bytes(device: torch.device) -> int:
    """Memory that can be had without pushing anything else out."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():  # not Linux: half of all memory is a guess that leaves room for the rest
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        available = min(available, int(limit.read_text()) - int(used.read_text()))
    return max(available, 0)


def estimate_workspace(config: Config, model_config: LlamaConfig, dtype: torch.dtype) -> int:
    """Bytes for a layer's widest activations of a full step, and for each row's logits with the sampler's copy."""
    num_tokens = config.max_num_batched_tokens
    num_rows = min(config.max_num_seqs, num_tokens)
    widest = 2 * model_config.intermediate_size + 4 * model_config.hidden_size
    return num_tokens * widest * dtype.itemsize + 2 * num_rows * model_config.vocab_size * 4


def plan_memory(
    config: Config,
    model_config: LlamaConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    weight_bytes: int,
    free_bytes: int,
    max_model_len: int,
    num_ranks: int = 1,
) -> MemoryLedger:
    """Choose the number of KV blocks: as asked, or what fits and can be of use. Bytes are those of one rank."""
    block_size = config.kvcache_block_size
    blocks_per_seq = -(-max_model_len // block_size)
    block_bytes = PagedKVCache.bytes_per_block(
        model_config.num_hidden_layers,
        block_size,
        kv_heads_per_rank(model_config.num_key_value_heads, num_ranks),
        model_config.head_dim,
        dtype,
    )
    workspace_bytes = estimate_workspace(config, model_config, dtype)
    budget = int(free_bytes * config.gpu_memory_utilization) - weight_bytes - workspace_bytes
    if config.num_kvcache_blocks is not None:
        num_blocks, limited_by = config.num_kvcache_blocks, "num_kvcache_blocks"
        if num_blocks * block_bytes > free_bytes - weight_bytes:
            raise InvalidValueError(
                f"num_kvcache_blocks={num_blocks} needs {format_bytes(num_blocks * block_bytes)}, but of "
                f"{format_bytes(free_bytes)} free memory the weights take {format_bytes(weight_bytes)}; "
                "lower num_kvcache_blocks"
            )
    else:
        limits = {
            f"gpu_memory_utilization={config.gpu_memory_utilization}": budget // block_bytes,
            "all that max_num_seqs and max_model_len can use": config.max_num_seqs * blocks_per_seq,
        }
        if device.type == "cpu":
            usual = min(max(weight_bytes, MIN_CPU_KV_BYTES // num_ranks), MAX_CPU_KV_BYTES // num_ranks)
            limits["what is usual on a CPU; set num_kvcache_blocks for more"] = usual // block_bytes
        limited_by, num_blocks = min(limits.items(), key=lambda item: item[1])
    if num_blocks < 1:
        raise InvalidValueError(
            f"no memory is left for a KV cache: {format_bytes(free_bytes)} free x gpu_memory_utilization="
            f"{config.gpu_memory_utilization}, weights {format_bytes(weight_bytes)}, workspace "
            f"{format_bytes(workspace_bytes)}. Raise gpu_memory_utilization, lower max_num_batched_tokens, "
            "use a smaller dtype or model, or end other processes"
        )
    return MemoryLedger(
        str(device),
        num_ranks,
        free_bytes,
        weight_bytes,
        workspace_bytes,
        num_blocks * block_bytes,
        block_bytes,
        num_blocks,
        block_size,
        limited_by,
    )
