"""Tools to inspect a running model: hooks on its activations, and functions that compare tensors."""

from infinilm.platforms import require_torch

with require_torch("hooks and tools for tensors"):
    from infinilm.debug.hooks import (
        ALIASES,
        EXPERT_POINTS,
        POINTS,
        STATE_POINTS,
        Callback,
        HookRegistry,
        RequestRows,
        is_wanted,
        names_of,
    )
    from infinilm.debug.tensors import TensorComparison, TensorStats, compare_tensors, tensor_stats

__all__ = [
    "ALIASES",
    "EXPERT_POINTS",
    "POINTS",
    "STATE_POINTS",
    "Callback",
    "HookRegistry",
    "RequestRows",
    "TensorComparison",
    "TensorStats",
    "compare_tensors",
    "is_wanted",
    "names_of",
    "tensor_stats",
]
