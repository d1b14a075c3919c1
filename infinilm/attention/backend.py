"""The interface of attention backends. The torch backend is the reference that all others are checked against."""

from collections.abc import Collection
from typing import Any, Protocol

import torch

from infinilm.attention.batch import ForwardBatch


class AttentionBackend(Protocol):
    """Attention over a paged KV cache, for any mix of prefill chunks and decode rows.

    A step calls `prepare` once and then, for each layer, `store` and `attend` with the plan it returned.
    """

    name: str
    is_ordered: bool
    """Whether a token's bits must not depend on the other tokens. Most backends have a fixed order anyway."""

    def why_not(self, device: torch.device) -> str | None:
        """Why this backend can't serve the device; None if it can."""

    def prepare(
        self, batch: ForwardBatch, *, block_size: int, windows: Collection[int | None], dtype: torch.dtype
    ) -> Any:
        """Make the plan of a step: what the layers need to know of the batch.

        `windows` are those that `attend` will be called with, `dtype` is the queries'. A plan in which every request
        has one new token may set `has_prompts = False`, which makes storing cheaper.
        """

    def store(self, new: torch.Tensor, cache: torch.Tensor, plan: Any, *, scales: torch.Tensor | None = None) -> None:
        """Write the new tokens' keys and values `[T, 2, kv_heads, head_dim]` into one layer's cache
        `[blocks, block_size, 2, kv_heads, head_dim]`. A cache of 8-bit floats has `scales` (`kernels/fp8_cache.py`)."""

    def attend(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        plan: Any,
        *,
        scale: float,
        window: int | None,
        cap: float | None = None,
        sinks: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend `query` `[T, heads, head_dim]` to each request's own context, causally and, with a
        `window`, to the last `window` tokens only. Returns `[T, heads, head_dim]`.

        With a `cap`, scores are `cap * tanh(score / cap)`. `sinks` `[heads]` float32 is for each head the score of a
        key that every token sees, with a value of zeros. `scales` are the cache's, as in `store`.
        """
