"""The interface of weight formats; layers use nothing else of them."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from infinilm.distributed.shard import Shard, ShardRange
from infinilm.layers.norm import RMSNorm


class Weight(Protocol):
    """Matrices with the same input, stacked as `[rows, columns]` and multiplied as one."""

    @property
    def num_bytes(self) -> int:
        """Their bytes in memory."""

    def shards(self, rows: Sequence[ShardRange], columns: ShardRange) -> list[Shard]:
        """The shards to load: one for each matrix, with these rows and columns of the full matrix."""

    def multiply(
        self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, norm: RMSNorm | None = None
    ) -> Tensor:
        """`x` `[T, columns]`, after the `norm`, to `[T, rows]`, plus `bias` `[rows]` and `residual`.

        The result may reuse the residual's memory.
        """

    def multiply_gated(self, x: Tensor, norm: RMSNorm | None, bias: Tensor | None = None) -> Tensor:
        """`silu(gate) * up` for the two matrices gate and up and the normed `x`. Returns `[T, rows / 2]`."""

    def look_up(self, rows: Tensor) -> Tensor:
        """The `rows` `[n]` of the only matrix, in the model's dtype: `[n, columns]`."""
