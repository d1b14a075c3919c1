"""GGML's formats on a CPU: matrices stay quantised, and the native library multiplies them."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from infinilm.distributed.shard import PackedShard, Shard, ShardRange
from infinilm.kernels.invariant import silu
from infinilm.kernels.native import arrays_of, load_library
from infinilm.layers.formats.packed import MatrixOutline
from infinilm.layers.norm import RMSNorm


class GGUFWeight:
    """See `Weight`. `matrices` are the native library's, one for each of `formats` and `rows`; None: make them."""

    def __init__(
        self,
        formats: Sequence[str],
        rows: Sequence[int],
        columns: int,
        device: torch.device | str,
        matrices: list[Any] | None = None,
        *,
        activation_bits: int = 16,
    ) -> None:
        if matrices is None:
            is_outline = torch.device(device).type == "meta"
            make: Any = MatrixOutline if is_outline else load_library().Matrix
            matrices = [
                make(format, count, columns, activation_bits) for format, count in zip(formats, rows, strict=True)
            ]
        self.matrices = matrices
        self._num_rows, self._num_columns = sum(rows), columns

    @property
    def num_bytes(self) -> int:
        """See `Weight`."""
        return sum(matrix.num_bytes for matrix in self.matrices)

    def shards(self, rows: Sequence[ShardRange], columns: ShardRange) -> list[Shard]:
        """See `Weight`."""
        return [PackedShard.of(matrix, own, columns) for matrix, own in zip(self.matrices, rows, strict=True)]

    def multiply(
        self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, norm: RMSNorm | None = None
    ) -> Tensor:
        """See `Weight`."""
        if norm is not None:
            x = norm(x)
        if residual is not None:
            out = (residual if bias is None else residual + bias).contiguous()
        else:
            out = x.new_empty(len(x), self._num_rows) if bias is None else bias.repeat(len(x), 1)
        is_added_to = residual is not None or bias is not None
        self.native.multiply(*arrays_of(x.contiguous(), out), is_added_to)
        return out

    def multiply_gated(self, x: Tensor, norm: RMSNorm | None, bias: Tensor | None = None) -> Tensor:
        """See `Weight`."""
        gate, up = self.multiply(x, bias, norm=norm).chunk(2, dim=-1)
        return silu(gate).mul_(up)

    def look_up(self, rows: Tensor) -> Tensor:
        """See `Weight`."""
        (matrix,) = self.matrices
        out = torch.empty(len(rows), self._num_columns)
        matrix.dequantize(*arrays_of(rows.contiguous(), out))
        return out

    @cached_property
    def native(self) -> Any:
        """The native library's layer of these matrices."""
        return load_library().Linear(self.matrices, None)
