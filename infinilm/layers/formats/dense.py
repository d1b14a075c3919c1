"""Dense matrices, in the model's dtype or, on a CPU, in a 16-bit type."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinilm.distributed.shard import Shard, ShardRange, WeightShard
from infinilm.kernels.invariant import NARROW, PIECE, TILE, is_native, multiply, pad_rows
from infinilm.kernels.support import has_kernels
from infinilm.layers.activation import SiluAndMul
from infinilm.layers.norm import RMSNorm

MAX_KERNEL_ROWS = 8
"""Up to this many rows of `x`, our kernels multiply small matrices faster than the libraries do."""
SMALL_MATRIX_BYTES = 16 << 20
"""The largest small matrix. For larger ones our kernels are faster only for a single row."""
# With these numbers of rows, a CPU's float32 product with a matrix that has its outputs first copies the whole matrix,
# which takes longer than the product. A batch of products with narrow strips of the matrix avoids the copy.
COPIED_ROWS = range(4, 16)
STRIP = 64


class DenseWeight(nn.Module):
    """See `Weight`. With `is_table` rows are also looked up. `is_ordered`: see `WeightFormats`.

    With a `half` the weight has that 16-bit type, and the native library converts it to float32 while multiplying.
    """

    def __init__(
        self,
        rows: Sequence[int],
        columns: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        is_table: bool = False,
        is_ordered: bool = False,
        half: str | None = None,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        """The type of inputs and results."""
        self._firsts = [0, *accumulate(rows)]
        num_rows = self._firsts.pop()
        self.is_native = (is_ordered or half is not None) and is_native(device, dtype)
        """Whether the native library multiplies. Its order of sums depends neither on other rows nor on threads."""
        self._pads_rows = is_ordered and not self.is_native and torch.device(device).type == "cpu"
        self.is_piecewise = False
        """On a CPU: multiply `PIECE` rows at a time, because the library's order of sums depends on their number."""
        self._is_odd = self._pads_rows and num_rows < NARROW and num_rows % TILE != 0
        # A CPU multiplies few rows faster with the input dimension first, unlike in checkpoints.
        self._is_input_first = torch.device(device).type == "cpu" and not is_table
        shape = (columns, num_rows) if self._is_input_first else (num_rows, columns)
        kept = dtype if half is None else getattr(torch, half)
        self.weight = nn.Parameter(torch.empty(shape, dtype=kept, device=device), requires_grad=False)
        self._matrix = self.weight if self._is_input_first else self.weight.t()  # [columns, rows]
        self._activation = SiluAndMul(device)
        self._max_kernel_rows = 0
        self._is_ordered = is_ordered
        if has_kernels(device):
            self._max_kernel_rows = MAX_KERNEL_ROWS if self.weight.nbytes <= SMALL_MATRIX_BYTES else 1
            if is_ordered:
                from infinilm.kernels.ordered_product import keep_order, max_rows

                self._max_kernel_rows = max_rows(num_rows, columns, dtype)
                keep_order()

    @property
    def in_features(self) -> int:
        """The columns of the matrix in the checkpoint's layout."""
        return self._matrix.shape[0]

    @property
    def out_features(self) -> int:
        """The rows of the matrix in the checkpoint's layout."""
        return self._matrix.shape[1]

    @property
    def num_bytes(self) -> int:
        """See `Weight`."""
        return self.weight.nbytes

    def shards(self, rows: Sequence[ShardRange], columns: ShardRange) -> list[Shard]:
        """See `Weight`."""
        matrix = self._matrix.t()
        return [
            WeightShard.of(matrix[first : first + own.length], own, columns)
            for first, own in zip(self._firsts, rows, strict=True)
        ]

    def multiply(
        self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, norm: RMSNorm | None = None
    ) -> Tensor:
        """See `Weight`."""
        if len(x) <= self._max_kernel_rows:
            return self._few_rows(x, bias=bias, residual=residual, norm=norm)
        if norm is not None:
            x = norm(x)
        if self.is_native:
            return multiply(x, self.weight, bias, residual, is_table=not self._is_input_first)
        if self._pads_rows:
            return self._invariant_product(x, bias, residual)
        if residual is not None and self._is_ordered:
            return residual.add_(self._product(x, bias, None))  # some library kernels add before they round
        return self._product(x, bias, residual)

    def _invariant_product(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        size = PIECE if self.is_piecewise else TILE
        padded, rest = pad_rows(x, size), None if residual is None else pad_rows(residual, size)
        if not self.is_piecewise:
            return self._product(padded, bias, rest)[: len(x)]
        out = x.new_empty(len(padded), self.out_features)
        for start in range(0, len(padded), size):
            piece = slice(start, start + size)
            out[piece] = self._product(padded[piece], bias, None if rest is None else rest[piece])
        return out[: len(x)]

    def _product(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        if residual is not None:
            return (residual if bias is None else residual + bias).addmm_(x, self._matrix)
        if self._is_odd:
            product = torch.mm(x, F.pad(self._matrix, (0, -self._matrix.shape[1] % TILE)))[:, : self._matrix.shape[1]]
            return product if bias is None else product + bias
        if bias is not None:
            return torch.addmm(bias, x, self._matrix)
        num_rows = self._matrix.shape[1]
        is_cpu_table = not self._is_input_first and x.device.type == "cpu"
        if is_cpu_table and len(x) in COPIED_ROWS and num_rows % STRIP == 0:
            return self._by_strips(x)
        return torch.mm(x, self._matrix)

    def _few_rows(self, x: Tensor, *, norm: RMSNorm | None, **options: Any) -> Tensor:
        fused = None if norm is None else (norm.weight, norm.eps)
        if self._is_ordered:
            from infinilm.kernels.ordered_product import ordered_product

            return ordered_product(x, self.weight, norm=fused, **options)
        from infinilm.kernels.gemv import gemv

        return gemv(x, self.weight, norm=fused, **options)

    def _by_strips(self, x: Tensor) -> Tensor:
        strips = self.weight.view(-1, STRIP, self.weight.shape[1]).transpose(1, 2)
        product = torch.bmm(x.expand(len(strips), -1, -1), strips)  # [strips, n, STRIP]
        return product.transpose(0, 1).reshape(len(x), -1)

    def multiply_gated(self, x: Tensor, norm: RMSNorm | None, bias: Tensor | None = None) -> Tensor:
        """See `Weight`."""
        if len(x) <= self._max_kernel_rows and bias is None:
            return self._few_rows(x, norm=norm, is_gated=True)
        activated: Tensor = self._activation(self.multiply(x, bias, norm=norm))
        return activated

    def look_up(self, rows: Tensor) -> Tensor:
        """See `Weight`."""
        return F.embedding(rows, self.weight).to(self.dtype)
