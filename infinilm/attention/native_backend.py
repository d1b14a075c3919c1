"""Attention by the native library: on a CPU, in float32, directly on the cache's memory.

For a model of another dtype, queries, keys and values are converted without loss, and the result is rounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from infinilm.kernels import native

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch
    from torch import Tensor

    from infinilm.attention.batch import ForwardBatch

MAX_HEAD_DIM = 512
MAX_GROUP = 64
"""Query heads that share a key-value head."""


class NativeAttention:
    """Attention by the native library. Its plan of a step is the library's own `Step`."""

    name = "native"
    is_ordered = True

    def __init__(self) -> None:
        self._library: Any = native.load()

    def why_not(self, device: torch.device) -> str | None:
        """Why the device can't be served; None if it can."""
        return why_not_native(device)

    def prepare(
        self,
        batch: ForwardBatch,
        *,
        block_size: int,  # noqa: ARG002 - the cache says it
        windows: Collection[int | None],  # noqa: ARG002 - nothing is worked out for them
        dtype: torch.dtype,  # noqa: ARG002 - the library checks it
    ) -> Any:
        """The library's view of the batch."""
        return self._library.Step(
            *native.arrays_of(
                batch.positions.contiguous(), batch.slot_mapping.contiguous(), batch.block_tables.contiguous()
            ),
            np.ascontiguousarray(batch.query_lens),
            np.ascontiguousarray(batch.context_lens),
        )

    def store(self, new: Tensor, cache: Tensor, plan: Any, *, scales: Tensor | None = None) -> None:
        """Write the new tokens' keys and values `[T, 2, kv_heads, head_dim]` into one layer's cache."""
        floats, stored, factors = native.arrays_of(new.float(), _as_bytes(cache), scales)
        self._library.store(floats, stored, plan, factors)

    def attend(
        self,
        query: Tensor,
        cache: Tensor,
        plan: Any,
        *,
        scale: float,
        window: int | None,
        cap: float | None = None,
        sinks: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> Tensor:
        """Attend `query` `[T, heads, head_dim]` to each request's context; returns the same shape."""
        query_floats = query.float()
        out = query_floats.new_empty(query.shape)
        given, stored, result = native.arrays_of(query_floats, _as_bytes(cache), out)
        self._library.attend(given, stored, plan, result, scale, window, cap, *native.arrays_of(sinks, scales))
        return out.to(query.dtype)


def _as_bytes(cache: Tensor) -> Tensor:
    from infinilm.kernels.fp8_cache import as_bytes  # which needs torch

    return as_bytes(cache)


def why_not_native(device: torch.device, head_dim: int = 2, group: int = 1) -> str | None:
    """Why the native library can't attend on this device, with such heads; None if it can.

    `group` is the number of query heads that share a key-value head.
    """
    if device.type != "cpu":
        return f"the native library computes on a CPU, not on {device}"
    if head_dim > MAX_HEAD_DIM or group > MAX_GROUP:
        return (
            f"the native library takes heads of up to {MAX_HEAD_DIM} numbers, and up to {MAX_GROUP} that share one for "
            f"keys and values, not {head_dim} and {group}"
        )
    if native.load() is None:
        return "the native library was not built with the package"
    return None
