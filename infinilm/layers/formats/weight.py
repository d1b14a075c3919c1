"""What a weight format does; the layers know no more of it than this."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from infinilm.distributed.shard import Shard, ShardRange
from infinilm.layers.norm import RMSNorm


class Weight(Protocol):
    """Matrices with the same input, kept one below the other and multiplied as one: `[rows, columns]`."""

    @property
    def num_bytes(self) -> int:
        """What they take in memory."""

    def shards(self, rows: Sequence[ShardRange], columns: ShardRange) -> list[Shard]:
        """Where to load to: one shard for each matrix, which holds these rows and columns of the whole."""

    def multiply(
        self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, norm: RMSNorm | None = None
    ) -> Tensor:
        """`x` `[T, columns]`, after the `norm`, to `[T, rows]`, to which `bias` `[rows]` and `residual` are added.

        The residual's memory may become the result's.
        """

    def multiply_gated(self, x: Tensor, norm: RMSNorm | None, bias: Tensor | None = None) -> Tensor:
        """`silu(gate) * up` of two matrices, gate and up, and the normed `x`: `[T, rows / 2]`."""

    def look_up(self, rows: Tensor) -> Tensor:
        """Some `rows` `[n]` of the only matrix, in the type that is computed in: `[n, columns]`."""
