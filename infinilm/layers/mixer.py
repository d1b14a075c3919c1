"""Mixers, the parts of a decoder layer, and the context in which a forward pass calls them."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from infinilm.attention import AttentionBackend, ForwardBatch
from infinilm.cache.paged import Cache
from infinilm.debug.taps import Taps
from infinilm.distributed.shard import Shard
from infinilm.errors import InvalidValueError
from infinilm.layers.norm import RMSNorm
from infinilm.layers.rotary_embedding import RotaryEmbedding


@dataclass(frozen=True)
class ForwardContext:
    """What all layers of a cache group share in one forward pass."""

    batch: ForwardBatch
    cache: Cache
    backend: AttentionBackend
    plan: Any  # the backend's plan for this batch
    taps: Taps | None  # None: there are no hooks
    _angles: dict[RotaryEmbedding, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def angles(self, rotary: RotaryEmbedding) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the batch's positions, `[T, 1, head_dim]` each, computed once per pass."""
        if rotary not in self._angles:
            self._angles[rotary] = rotary(self.batch.positions)
        return self._angles[rotary]

    def scales_of(self, layer: int) -> dict[str, Tensor]:
        """The scales of a layer's cache as a keyword argument of backends; empty if the cache has no scales."""
        return {"scales": self.cache.scales[layer]} if self.cache.scales else {}

    def update_cache(self, layer: int, kv: Tensor) -> Tensor:
        """Call the cache's own `update` with the new keys and values `[T, 2, kv_heads, head_dim]`.

        Returns the tensor to attend to.
        """
        current = self.cache.layers[layer]
        seen = self.cache.update(layer, kv[:, 0], kv[:, 1], self.batch.slot_mapping)
        if not isinstance(seen, Tensor) or seen.shape != current.shape or seen.dtype != current.dtype:
            found = f"{list(seen.shape)} {seen.dtype}" if isinstance(seen, Tensor) else type(seen).__name__
            raise InvalidValueError(
                f"{type(self.cache).__name__}.update returned {found}; return what the layer attends to, a tensor "
                f"like layers[layer_idx], {list(current.shape)} {current.dtype}"
            )
        return seen


class Mixer(nn.Module):
    """The part of a decoder layer between a norm and the residual: a token mixer or a channel mixer.

    `forward(x, step, residual, norm)` computes `residual + mix(norm(x))` `[T, hidden]`; norm and residual may be None.
    They are arguments so that a mixer can fuse them into its first and last matrix product. The result may reuse the
    residual's memory.
    """

    def __init__(self, layer: int, prefix: str) -> None:
        """`prefix` is the mixer's part of its weights' names in a checkpoint, after the layer's prefix."""
        super().__init__()
        self.layer, self.prefix = layer, prefix

    def forward(
        self, x: Tensor, step: ForwardContext, residual: Tensor | None = None, norm: RMSNorm | None = None
    ) -> Tensor:
        """See the class."""
        raise NotImplementedError

    def weight_targets(self, prefix: str) -> dict[str, Shard]:
        """The weights to load, by their names in a checkpoint; `prefix` is the layer's."""
        raise NotImplementedError
