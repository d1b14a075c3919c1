"""Measures memory, plans its use and the number of KV blocks, and handles its running out."""

import os
import sys
import traceback
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from infinilm.cache.specs import (
    AttentionSpec,
    CacheSpec,
    StateSpec,
    blocks_per_row,
    bytes_per_block,
    group_layers,
    kv_heads_per_rank,
)
from infinilm.config import Config
from infinilm.errors import InvalidValueError, OutOfMemoryError
from infinilm.executor.executor import MeasuredWorkspace
from infinilm.kernels.delta_chunk import CHUNK
from infinilm.models import ModelConfig
from infinilm.models.stages import Stage
from infinilm.platforms import HostDevice, free_device_bytes

if TYPE_CHECKING:
    import numpy as np
    import torch

    Device = torch.device | HostDevice
    DType = torch.dtype | np.dtype[Any]

# A CPU's memory is shared with everything else on the machine. Unless a size is set, the KV cache takes as much
# as the weights, within these bounds.
MIN_CPU_KV_BYTES, MAX_CPU_KV_BYTES = 1 << 30, 4 << 30

STATE_SHARE = 4
"""One block in so many has a state of recurrent layers. A running text needs a few states; the rest hold prefixes."""

MAX_BLOCKS = 1 << 48
"""More than any memory holds."""

_TAKE_LESS = "lower max_num_batched_tokens, max_num_seqs or max_model_len, use a smaller dtype or model"
_SIGNS_OF_OUT_OF_MEMORY = ("out of memory", "cannot allocate memory", "status_alloc_failed")
"""Parts of the messages of the driver and the allocators, of the operating system, and of CUDA's libraries."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """A rank's memory besides weights and KV cache, at most, in bytes. `executor/workspace.py` estimates it."""

    activations: int
    """For a step of `max_num_batched_tokens`, with the logits of `max_num_seqs` rows."""
    attention: int = 0
    """What decode attention keeps on a GPU for `max_num_seqs` rows."""
    graphs: int = 0
    """CUDA graphs of small steps."""
    libraries: int = 0
    """What CUDA's libraries keep, and the code on the device."""
    per_position: int = 0
    """For each token of `max_model_len`: angles, block tables and, for long prompts, one layer's keys and values."""

    def measured(self, found: MeasuredWorkspace) -> "Workspace":
        """The same with measured figures in place of estimates."""
        return replace(self, activations=found.activations, attention=0, libraries=found.libraries)

    def total(self, max_model_len: int) -> int:
        """The sum, for texts of up to `max_model_len` tokens."""
        return self.activations + self.attention + self.graphs + self.libraries + self.per_position * max_model_len


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """The blocks of one group of layers."""

    window: int | None
    block_bytes: int
    most_blocks: int | None
    """The most that `max_num_seqs` rows can use at once; None: no limit."""
    blocks_per_row: int | None
    """So many blocks are enough for a text of any length; None: a row needs blocks for the whole text."""
    holds_states: bool = False
    """Whether a block holds the state of recurrent layers, which is as large as the keys of many tokens."""

    def num_blocks(self, count: int) -> int:
        """The number of its blocks if groups without a window have `count`."""
        if self.holds_states and self.blocks_per_row is not None:
            count = min(count, max(count // STATE_SHARE, 2 * self.blocks_per_row))
        return count if self.most_blocks is None else min(count, self.most_blocks)

    def num_bytes(self, count: int) -> int:
        """The memory that these blocks take."""
        return (self.num_blocks(count) + self.holds_states) * self.block_bytes


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """What the memory is used for. Made once at the start and logged."""

    device: str
    num_ranks: int
    """The figures are for each rank, or for each rank of the `stage`."""
    free_bytes: int
    """Free before the weights were loaded."""
    utilization: float
    """The share of the free memory that may be used."""
    weight_bytes: int
    workspace: Workspace
    groups: tuple["GroupMemory", ...]
    num_blocks: int
    """Blocks of each group of layers. Groups with a sliding window need no more than their `most_blocks`."""
    block_size: int
    max_model_len: int
    """The longest text that was asked for and that fits into the cache."""
    limited_by: str
    """What decided the number of blocks."""
    stage: str = ""
    """Which pipeline stage, if there are several."""

    @property
    def allowed_bytes(self) -> int:
        """The memory that weights, workspace and cache may take together."""
        return int(self.free_bytes * self.utilization)

    @property
    def kv_bytes(self) -> int:
        """The memory that the KV cache takes."""
        return sum(group.num_bytes(self.num_blocks) for group in self.groups)

    @property
    def block_bytes(self) -> int:
        """The memory that one block takes over all layers."""
        return sum(group.block_bytes for group in self.groups)

    @property
    def group_blocks(self) -> list[int]:
        """The number of blocks of each group."""
        return [group.num_blocks(self.num_blocks) for group in self.groups]

    @property
    def total_bytes(self) -> int:
        """The most memory that weights, workspace and cache take together."""
        return self.weight_bytes + self.workspace.total(self.max_model_len) + self.kv_bytes

    def __str__(self) -> str:
        workspace = self.workspace
        items = {
            "weights": self.weight_bytes,
            "intermediate results": workspace.activations,
            "attention": workspace.attention,
            "CUDA graphs": workspace.graphs,
            "CUDA libraries": workspace.libraries,
            f"positions of {self.max_model_len:,} tokens": workspace.per_position * self.max_model_len,
        }
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in items.items() if size)
        ranks = f", on each of {self.num_ranks} ranks" if self.num_ranks > 1 else ""
        ranks = f", on each rank of {self.stage}" if self.stage else ranks
        return (
            f"memory on {self.device}{ranks}: {format_bytes(self.free_bytes)} free at start, of which "
            f"{self.utilization:.0%} may be used (gpu_memory_utilization): {format_bytes(self.allowed_bytes)}. Used at "
            f"most: {format_bytes(self.total_bytes)}: {listed}, conversations (KV cache) {format_bytes(self.kv_bytes)} "
            f"for {self.num_blocks * self.block_size:,} tokens in {self.num_blocks:,} blocks; "
            f"their number is decided by {self.limited_by}{self._windowed()}"
        )

    def _windowed(self) -> str:
        """The numbers of blocks of layers with a sliding window and of recurrent layers, if they have their own."""
        if len(self.groups) == 1:
            return ""
        counts = zip(self.groups, self.group_blocks, strict=True)
        return "".join(
            f", {count:,} states" if group.holds_states else f", {count:,} blocks for windows of {group.window}"
            for group, count in counts
            if group.window
        )

    def longest_text(self, num_blocks: int, max_model_len: int) -> int:
        """The longest text that so many blocks allow, up to `max_model_len`."""
        if all(group.blocks_per_row is not None and num_blocks >= group.blocks_per_row for group in self.groups):
            return max_model_len
        return min(max_model_len, num_blocks * self.block_size)


def rank_specs(model_config: ModelConfig, num_ranks: int) -> list[CacheSpec]:
    """The cache spec of each layer on one rank."""
    return [_of_rank(spec, num_ranks) for spec in model_config.cache_specs()]


def _of_rank(spec: CacheSpec, num_ranks: int) -> CacheSpec:
    if isinstance(spec, AttentionSpec):
        return replace(spec, num_kv_heads=kv_heads_per_rank(spec.num_kv_heads, num_ranks))
    if isinstance(spec, StateSpec):
        return StateSpec(tuple((shape[0] // num_ranks, *shape[1:]) for shape in spec.shapes))
    return spec


def token_bytes(model_config: ModelConfig, tp_size: int, held: range | None, dtype: "DType") -> int:
    """The bytes that one token takes in the KV cache of a rank that holds the layers `held`, or all."""
    groups = group_layers(rank_specs(model_config, tp_size), held)
    return sum(bytes_per_block(group, 1, dtype) for group in groups)


def context_bytes(model_config: ModelConfig, num_tokens: int, dtype: "DType") -> int:
    """The bytes that a text of `num_tokens` tokens takes in the KV cache, over all ranks.

    Layers with a sliding window keep their window. Recurrent layers keep one state for a text of any length.
    """
    groups = group_layers(model_config.cache_specs())
    return sum(
        bytes_per_block(group, 1, dtype)
        * (1 if isinstance(group.spec, StateSpec) else min(group.spec.window or num_tokens, num_tokens))
        for group in groups
    )


def format_bytes(count: float) -> str:
    """A human-readable size: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def free_memory_bytes(device: "Device") -> int:
    """Memory that can be allocated without pushing anything else out."""
    if device.type != "cpu":
        return free_device_bytes(cast("torch.device", device))
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():  # not Linux: half of all memory is a guess that leaves room for the rest
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        available = min(available, int(limit.read_text()) - int(used.read_text()))
    return max(available, 0)


def plan_memory(
    config: Config,
    model_config: ModelConfig,
    *,
    device: "Device",
    kv_dtype: "DType",
    weight_bytes: int,
    workspace: Workspace,
    free_bytes: int,
    max_model_len: int,
    tp_size: int = 1,
    stage: Stage | None = None,
) -> MemoryLedger:
    """Choose the number of KV blocks: the number asked for, or as many as fit and can be used.

    Bytes are those of one rank. `tp_size` is the number of ranks in each pipeline stage.
    """
    stage = stage or Stage.whole(model_config.num_hidden_layers)
    without_cache = MemoryLedger(
        device=str(device),
        num_ranks=tp_size * stage.count,
        free_bytes=free_bytes,
        utilization=config.gpu_memory_utilization,
        weight_bytes=weight_bytes,
        workspace=workspace,
        groups=_plan_groups(config, model_config, stage, kv_dtype, tp_size),
        num_blocks=0,
        block_size=find_block_size(config, model_config),
        max_model_len=0,
        limited_by="the other parts, which leave no memory for any",
        stage=str(stage) if stage.count > 1 else "",
    )
    left = without_cache.allowed_bytes - without_cache.total_bytes

    def num_bytes(count: int) -> int:
        """The memory of so many blocks, and of the positions of the longest text they allow."""
        longest = without_cache.longest_text(count, max_model_len)
        return sum(group.num_bytes(count) for group in without_cache.groups) + longest * workspace.per_position

    most_blocks = _most(num_bytes, left)
    if most_blocks < 1:
        raise InvalidValueError(
            f"no memory is left for a KV cache; raise gpu_memory_utilization, {_TAKE_LESS}, or end other processes. "
            f"{without_cache}"
        )
    num_blocks, limited_by = _choose_blocks(config, device, without_cache, most_blocks, max_model_len)
    length = without_cache.longest_text(num_blocks, max_model_len)
    ledger = replace(without_cache, num_blocks=num_blocks, max_model_len=length, limited_by=limited_by)
    if num_blocks > most_blocks:
        raise InvalidValueError(
            f"num_kvcache_blocks={num_blocks} needs {format_bytes(ledger.kv_bytes)}, which is more than is left; "
            f"lower it to {most_blocks} or less, raise gpu_memory_utilization, or {_TAKE_LESS}. {ledger}"
        )
    return ledger


def plan_stages(plans: Sequence[MemoryLedger]) -> list[MemoryLedger]:
    """The plans of all pipeline stages, each with as many blocks as the fullest stage, which comes first."""
    least = min(plans, key=lambda plan: (plan.num_blocks, plan.max_model_len))
    others = [
        replace(plan, num_blocks=least.num_blocks, max_model_len=least.max_model_len, limited_by=least.stage)
        for plan in plans
        if plan is not least
    ]
    return [least, *others]


def find_block_size(config: Config, model_config: ModelConfig) -> int:
    """The tokens of a block: `kvcache_block_size`, rounded up to a multiple of `CHUNK` if layers are recurrent.

    A state is kept at the end of every block, and takes as much memory as the keys of many tokens.
    """
    is_recurrent = any(isinstance(spec, StateSpec) for spec in model_config.cache_specs())
    return -(-config.kvcache_block_size // CHUNK) * CHUNK if is_recurrent else config.kvcache_block_size


def _plan_groups(
    config: Config, model_config: ModelConfig, stage: Stage, kv_dtype: "DType", tp_size: int
) -> tuple[GroupMemory, ...]:
    block_size = find_block_size(config, model_config)
    groups = group_layers(rank_specs(model_config, tp_size), stage.layers)
    are_all_windowed = all(group.spec.window is not None for group in groups)
    planned = []
    for group in groups:
        most_blocks = per_row = None
        if group.spec.window is not None:
            per_row = blocks_per_row(group.spec.window, block_size)
            # Add the tokens of the steps in flight: up to one more step than there are stages. Don't limit the number
            # that a user has set.
            step_blocks = -(-config.max_num_batched_tokens // block_size)
            most_blocks = config.max_num_seqs * per_row + (stage.count + 1) * step_blocks
            if are_all_windowed and config.num_kvcache_blocks is not None:
                most_blocks = None
        planned.append(
            GroupMemory(
                group.spec.window,
                bytes_per_block(group, block_size, kv_dtype),
                most_blocks,
                per_row,
                isinstance(group.spec, StateSpec),
            )
        )
    return tuple(planned)


def _most(num_bytes: Callable[[int], int], available: int) -> int:
    """The largest count that takes no more than `available`. `num_bytes` must not decrease."""
    return bisect_right(range(MAX_BLOCKS), available, key=num_bytes) - 1


def _choose_blocks(
    config: Config, device: "Device", ledger: MemoryLedger, most_blocks: int, max_model_len: int
) -> tuple[int, str]:
    """The number of KV blocks, and what decided it."""
    if config.num_kvcache_blocks is not None:
        return config.num_kvcache_blocks, "num_kvcache_blocks"
    blocks_per_seq = -(-max_model_len // ledger.block_size)
    limits = {
        f"gpu_memory_utilization={config.gpu_memory_utilization}": most_blocks,
        "what max_num_seqs and max_model_len can use": max(
            group.num_blocks(config.max_num_seqs * blocks_per_seq) for group in ledger.groups
        ),
    }
    if device.type == "cpu":
        least, most = MIN_CPU_KV_BYTES // ledger.num_ranks, MAX_CPU_KV_BYTES // ledger.num_ranks
        usual = min(max(ledger.weight_bytes, least), most)
        usual_blocks = _most(lambda count: sum(group.num_bytes(count) for group in ledger.groups), usual)
        limits["what is usual on a CPU (set num_kvcache_blocks for more)"] = max(usual_blocks, 1)
    limited_by, num_blocks = min(limits.items(), key=lambda item: item[1])
    return num_blocks, limited_by


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, says that a device has no memory left."""
    while error is not None:
        names = [kind.__name__ for kind in type(error).__mro__]  # torch has an error of that name, too
        if "OutOfMemoryError" in names or "MemoryError" in names:
            return True
        if isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS_OF_OUT_OF_MEMORY):
            return True
        error = error.__cause__
    return False


def give_back(error: BaseException) -> None:
    """After running out of memory, free what the failed attempt holds, while its error is still being handled.

    These are the tensors in the frames of the error's traceback, which keeps its lines, and torch's cached memory.
    """
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__
    if (torch := sys.modules.get("torch")) is not None:
        torch.cuda.empty_cache()


def explain_oom(error: BaseException, ledger: MemoryLedger) -> BaseException:
    """The error to report for a step. If memory ran out, frees what the step holds and names settings that help."""
    if not is_out_of_memory(error):
        return error
    give_back(error)
    return OutOfMemoryError(describe_oom("a step", error, ledger))


def describe_oom(what: str, error: BaseException, ledger: MemoryLedger | None) -> str:
    """The message for `what` that ran out of memory. `ledger` is None if memory ran out before it was made."""
    cause = str(error).partition("\n")[0]
    if ledger is None:
        return f"{what} ran out of memory before anything was loaded; end other processes on the device. {cause}"
    cache_setting = "num_kvcache_blocks" if ledger.limited_by == "num_kvcache_blocks" else "gpu_memory_utilization"
    return (
        f"{what} ran out of memory; lower {cache_setting} for a smaller KV cache, max_num_batched_tokens or "
        f"max_num_seqs for smaller steps, or max_model_len. {cause} ({ledger})"
    )
