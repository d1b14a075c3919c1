"""Packed matrices of one format, stacked line by line, for the kernels of experts."""

from typing import Any

import torch
from torch import Tensor, nn

from infinilm.distributed.ggml_blocks import BLOCK_FORMATS
from infinilm.distributed.grouped import GroupedFormat
from infinilm.distributed.shard import PackedShard, ShardRange
from infinilm.kernels.packed_lines import PackedLines, unpack_lines_torch
from infinilm.layers.formats.tiled import tile_format


class LinesPart:
    """Some of the lines of `Lines`; `load` fills them."""

    def __init__(self, format: str, matrix: PackedLines, first: int, num_lines: int, step: int = 1) -> None:
        """The part is every `step`-th line from `first` on."""
        self.format, self._first, self._step = format, first, step
        self._matrix, self._num_lines = matrix, num_lines

    @property
    def num_bytes(self) -> int:
        matrix = self._matrix
        return sum(each.nbytes for each in matrix[2:] if each is not None) * self._num_lines // len(matrix.codes)

    def load(self, blocks: Any, rows: Any, /) -> None:
        """See `PackedMatrix`. The device splits rows into codes, scales and zeros."""
        blocks, rows = torch.as_tensor(blocks), torch.as_tensor(rows)
        matrix, device = self._matrix, self._matrix.codes.device
        blocks, lines = blocks.to(device), self._first + self._step * rows.to(device)
        grouped, factors, zeros = GroupedFormat.parse(self.format), None, None
        if grouped is None:
            codes, scales, factors = BLOCK_FORMATS[self.format].take_apart(blocks)
        else:
            codes, scales, zeros = grouped.take_apart(blocks, matrix.inputs)
        if matrix.format.bits == 4:
            codes = codes[:, ::2] | (codes[:, 1::2] << 4)
        matrix.codes[lines] = codes
        for table, values in ((matrix.scales, scales), (matrix.factors, factors)):
            if table is not None and values is not None:
                table[lines] = values.contiguous().view(table.dtype)
        if matrix.zeros is not None and zeros is not None:
            matrix.zeros[lines] = (zeros & 0x0F).to(torch.uint8)

    def dequantize(self, rows: Tensor, out: Tensor, /) -> None:
        """See `PackedMatrix`."""
        lines = self._first + self._step * rows.to(self._matrix.codes.device)
        parts = [None if each is None else each[lines] for each in self._matrix[2:]]
        codes, scales, zeros, factors = parts
        assert codes is not None
        assert scales is not None
        own = self._matrix._replace(codes=codes, scales=scales, zeros=zeros, factors=factors)
        out.copy_(unpack_lines_torch(own, torch.float32))


class Lines(nn.Module):
    """Matrices of one format; each has `rows` lines."""

    def __init__(
        self, format: str, num_matrices: int, rows: int, columns: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self._format, self._dtype = format, dtype
        self._num_matrices, self._rows = num_matrices, rows
        found = PackedLines.empty(tile_format(format), num_matrices * rows, columns, device)
        self.codes = nn.Parameter(found.codes, requires_grad=False)
        self.scales = nn.Parameter(found.scales, requires_grad=False)
        self.zeros = None if found.zeros is None else nn.Parameter(found.zeros, requires_grad=False)
        self.factors = None if found.factors is None else nn.Parameter(found.factors, requires_grad=False)
        self.packed = PackedLines(found.format, columns, self.codes, self.scales, self.zeros, self.factors)

    def shards(self, rows: ShardRange, columns: ShardRange, num_alternating: int = 1) -> list[PackedShard]:
        """One shard for each matrix, with these rows and columns of the full matrix.

        The lines of each `num_alternating` adjacent matrices alternate.
        """
        firsts = [
            index // num_alternating * num_alternating * self._rows + index % num_alternating
            for index in range(self._num_matrices)
        ]
        if num_alternating == 1:
            firsts = list(range(0, self._num_matrices * self._rows, self._rows))
        parts = [LinesPart(self._format, self.packed, first, self._rows, num_alternating) for first in firsts]
        return [PackedShard.of(part, rows, columns) for part in parts]

    def dequantized(self) -> Tensor:
        """All matrices in the model's dtype, `[matrices, rows, columns]`. Each value is rounded once."""
        return unpack_lines_torch(self.packed, self._dtype).view(self._num_matrices, self._rows, -1)
