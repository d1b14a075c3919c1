"""Matrices that stay quantised on a GPU, in tiles for the kernels of `tile_product`."""

from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinilm.distributed.ggml_blocks import BLOCK_FORMATS
from infinilm.distributed.grouped import GroupedFormat
from infinilm.distributed.shard import PackedShard, Shard, ShardRange
from infinilm.kernels.support import has_kernels
from infinilm.kernels.tiles import TILE_LINES, TiledMatrix, TileFormat, untile_torch
from infinilm.layers.activation import SiluAndMul
from infinilm.layers.norm import RMSNorm


def tile_format(name: str) -> TileFormat:
    """The tile format of a matrix in a `GroupedFormat` or in one of GGML's formats."""
    grouped = GroupedFormat.parse(name)
    if grouped is not None:
        is_float = grouped.bits == 8 or grouped.is_mxfp4
        zero = 0 if is_float or grouped.has_zeros else 8
        return TileFormat(grouped.bits, grouped.group or 0, is_float, zero, has_zeros=grouped.has_zeros)
    block = BLOCK_FORMATS[name]
    return TileFormat(
        block.bits,
        block.group,
        zero=block.middle,
        has_minimums=block.has_minimums,
        has_factors=block.has_factors,
    )


class TiledPart:
    """One of the matrices of a `TiledWeight`: lines of a `TiledMatrix`; `load` fills them."""

    def __init__(self, format: str, run: "TiledRows", first: int, num_rows: int) -> None:
        self.format, self._matrix, self._order, self._first = format, run.matrix, run.order, first
        self.num_bytes = sum(each.nbytes for each in run.matrix.tensors) * num_rows // run.matrix.lines

    def load(self, blocks: Any, rows: Any, /) -> None:
        """See `PackedMatrix`. The device splits rows into codes, scales and zeros."""
        blocks, rows = torch.as_tensor(blocks), torch.as_tensor(rows)
        matrix, device = self._matrix, self._matrix.codes.device
        lines = self._first + rows.to(device)
        grouped = GroupedFormat.parse(self.format)
        if grouped is None:
            codes, scales, factors = BLOCK_FORMATS[self.format].take_apart(blocks.to(device))
            zeros = None
        else:
            codes, scales, zeros = grouped.take_apart(blocks.to(device), matrix.inputs)
            factors = None
        matrix.load_codes(codes, lines)
        for table, values in ((matrix.scales, scales), (matrix.zeros, zeros), (matrix.factors, factors)):
            if table is not None and values is not None:
                table[:, lines] = values.t()

    def set_input_order(self, order: Any) -> None:
        """See `ReorderedMatrix`. Matrices that are multiplied as one have the same order."""
        assert self._order is not None
        self._order.copy_(torch.from_numpy(order))

    def dequantize(self, rows: Tensor, out: Tensor, /) -> None:
        """See `PackedMatrix`."""
        values = untile_torch(self._matrix, torch.float32)[self._first + rows.to(self._matrix.codes.device)]
        out.copy_(values if self._order is None else values[:, self._order.argsort()])


class TiledRows(nn.Module):
    """Matrices of one format, stacked."""

    def __init__(self, format: str, rows: int, columns: int, device: torch.device | str) -> None:
        super().__init__()
        self.matrix = TiledMatrix.empty(tile_format(format), rows, columns, device)
        for name in ("codes", "scales", "zeros", "factors"):
            tensor = getattr(self.matrix, name)
            setattr(self, name, None if tensor is None else nn.Parameter(tensor, requires_grad=False))
        grouped = GroupedFormat.parse(format)
        self.order: nn.Parameter | None = None
        """The input of each column of the matrix, int32 `[columns]`; None: columns are in the order of inputs."""
        if grouped is not None and grouped.order:
            self.order = nn.Parameter(torch.arange(columns, dtype=torch.int32, device=device), requires_grad=False)

    def reorder(self, x: Tensor) -> Tensor:
        """Inputs `[T, columns]` in the matrix's order of columns."""
        return x if self.order is None else x.index_select(1, self.order)


class TiledWeight(nn.Module):
    """See `Weight`. Adjacent matrices with the same format are multiplied as one. If inputs are reordered, all matrices
    have the same format.

    For few rows, or any number of rows if `is_ordered` (see `WeightFormats`), a kernel unpacks a matrix while it
    multiplies. Otherwise a matrix is unpacked before each product. Inputs have the model's dtype.
    """

    def __init__(
        self,
        formats: Sequence[str],
        rows: Sequence[int],
        columns: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        is_ordered: bool = False,
    ) -> None:
        super().__init__()
        self.formats, self.dtype, self.in_features = tuple(formats), dtype, columns
        self.out_features = sum(rows)
        self._is_ordered = is_ordered
        self._places: list[tuple[int, int]] = []  # for each matrix its run, and its first row there
        self._runs: list[TiledRows] = []
        for format, run in groupby(zip(formats, rows, strict=True), lambda each: each[0]):
            firsts = [0, *accumulate(size for _, size in run)]
            self._places += [(len(self._runs), first) for first in firsts[:-1]]
            self._runs.append(TiledRows(format, firsts[-1], columns, device))
        self.runs = nn.ModuleList(self._runs)
        self._activation = SiluAndMul(device)
        self._has_kernels, self._max_kernel_rows = False, 0
        if has_kernels(device):
            from infinilm.kernels.tile_product import MAX_ROWS, can_multiply

            self._has_kernels = can_multiply(dtype, self._runs[0].matrix.codes.device)
            self._max_kernel_rows = MAX_ROWS if self._has_kernels else 0

    @property
    def num_bytes(self) -> int:
        """See `Weight`."""
        return sum(part.nbytes for part in self.parameters())

    def shards(self, rows: Sequence[ShardRange], columns: ShardRange) -> list[Shard]:
        """See `Weight`."""
        return [
            PackedShard.of(TiledPart(format, self._runs[run], first, own.length), own, columns)
            for format, (run, first), own in zip(self.formats, self._places, rows, strict=True)
        ]

    def dequantized(self) -> Tensor:
        """All matrices in the model's dtype, `[rows, columns]`. Each value is rounded once.

        If inputs are reordered, so are the columns; see `TiledRows.order`.
        """
        unpack = untile_torch
        if self._has_kernels:
            from infinilm.kernels.tile_product import untile as unpack
        parts = [unpack(run.matrix, self.dtype) for run in self._runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def multiply(
        self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, norm: RMSNorm | None = None
    ) -> Tensor:
        """See `Weight`."""
        if self._uses_kernel(x):
            return self._multiply_tiles(x, bias, residual, norm)
        if norm is not None:
            x = norm(x)
        product = F.linear(self._runs[0].reorder(x), self.dequantized(), bias)
        return product if residual is None else residual.add_(product)

    def multiply_gated(self, x: Tensor, norm: RMSNorm | None, bias: Tensor | None = None) -> Tensor:
        """See `Weight`."""
        (run, *others), has_tiles = self._runs, self._runs[0].matrix.lines % (2 * TILE_LINES) == 0
        if bias is None and self._uses_kernel(x) and not others and has_tiles:
            return self._product(x, run, norm, is_gated=True)
        activated: Tensor = self._activation(self.multiply(x, bias, norm=norm))
        return activated

    def look_up(self, rows: Tensor) -> Tensor:
        """See `Weight`."""
        return F.embedding(rows, self.dequantized())

    def _uses_kernel(self, x: Tensor) -> bool:
        return len(x) <= self._max_kernel_rows or (self._is_ordered and self._has_kernels)

    def _product(self, x: Tensor, run: TiledRows, norm: RMSNorm | None, **options: Any) -> Tensor:
        from infinilm.kernels.tile_gemv import can_multiply_one, tile_gemv
        from infinilm.kernels.tile_product import tile_product

        if run.order is not None:
            x, norm = run.reorder(x if norm is None else norm(x)), None
        fused = None if norm is None else (norm.weight, norm.eps)
        if len(x) == 1 and not self._is_ordered and can_multiply_one(run.matrix.format, x.dtype):
            return tile_gemv(x, run.matrix, norm=fused, **options)
        return tile_product(x, run.matrix, norm=fused, is_ordered=self._is_ordered, **options)

    def _multiply_tiles(self, x: Tensor, bias: Tensor | None, residual: Tensor | None, norm: RMSNorm | None) -> Tensor:
        if len(self._runs) == 1:
            return self._product(x, self._runs[0], norm, bias=bias, residual=residual)
        if norm is not None:
            x = norm(x)
        out, start = x.new_empty(len(x), sum(run.matrix.lines for run in self._runs)), 0
        for run in self._runs:
            own = slice(start, start + run.matrix.lines)
            added = [None if each is None else each[..., own] for each in (bias, residual)]
            self._product(x, run, None, bias=added[0], residual=added[1], out=out[:, own])
            start = own.stop
        return out
