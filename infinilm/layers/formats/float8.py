"""Matrices that stay 8-bit floats on a CPU. The native library decodes them while it multiplies."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from infinilm.distributed.grouped import GroupedFormat
from infinilm.distributed.shard import PackedShard, Shard, ShardRange
from infinilm.errors import CheckpointError
from infinilm.kernels.invariant import multiply
from infinilm.kernels.native import float_matrix
from infinilm.layers.activation import SiluAndMul
from infinilm.layers.norm import RMSNorm

_NO_NUMBER = 0x7F
"""The code of NaN, without the sign bit."""


class Float8Part:
    """One of the matrices of a `Float8Weight`; `load` fills it."""

    def __init__(self, format: str, codes: Tensor, scales: Tensor) -> None:
        self.format, self._codes, self._scales = format, codes, scales

    @property
    def num_bytes(self) -> int:
        """See `PackedMatrix`."""
        return self._codes.nbytes + self._scales.nbytes

    def load(self, blocks: Any, rows: Any, /) -> None:
        """See `PackedMatrix`."""
        format = GroupedFormat.parse(self.format)
        assert format is not None
        codes, scales, _ = format.take_apart(torch.as_tensor(blocks), len(self._codes))
        if ((codes & _NO_NUMBER) == _NO_NUMBER).any():
            raise CheckpointError(
                "has 8-bit floats that stand for no number (codes 127 and 255), which the native library does not "
                "decode; the file may be damaged; quantization='none' reads it"
            )
        own = torch.as_tensor(rows)
        self._codes[:, own], self._scales[:, own] = codes.t(), scales.t()

    def as_native(self) -> Any | None:
        """The native library's matrix in the same memory; None if the library does not support its size."""
        return float_matrix(self._codes, self._scales)

    def dequantize(self, rows: Tensor, out: Tensor, /) -> None:
        """See `PackedMatrix`."""
        values = self._codes[:, rows].view(torch.float8_e4m3fn).float()
        out.copy_((values * self._scales[:, rows].repeat_interleave(len(values) // len(self._scales), 0)).t())


class Float8Weight(nn.Module):
    """See `Weight`. Results are float32, and a row's result does not depend on other rows."""

    def __init__(self, format: str, rows: Sequence[int], columns: int, *, device: torch.device | str) -> None:
        super().__init__()
        parsed = GroupedFormat.parse(format)
        assert parsed is not None
        self.format = format
        self._firsts = [0, *accumulate(rows)]
        num_rows = self._firsts.pop()
        codes = torch.empty(columns, num_rows, dtype=torch.uint8, device=device)
        scales = torch.empty(columns // (parsed.group or columns), num_rows, device=device)
        self.codes, self.scales = (nn.Parameter(each, requires_grad=False) for each in (codes, scales))
        self._activation = SiluAndMul(device)

    @property
    def num_bytes(self) -> int:
        """See `Weight`."""
        return self.codes.nbytes + self.scales.nbytes

    def shards(self, rows: Sequence[ShardRange], columns: ShardRange) -> list[Shard]:
        """See `Weight`."""
        found: list[Shard] = []
        for first, own in zip(self._firsts, rows, strict=True):
            part = slice(first, first + own.length)
            matrix = Float8Part(self.format, self.codes[:, part], self.scales[:, part])
            found.append(PackedShard.of(matrix, own, columns))
        return found

    def multiply(
        self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, norm: RMSNorm | None = None
    ) -> Tensor:
        """See `Weight`."""
        return multiply(x if norm is None else norm(x), self.codes, bias, residual, scales=self.scales)

    def multiply_gated(self, x: Tensor, norm: RMSNorm | None, bias: Tensor | None = None) -> Tensor:
        """See `Weight`."""
        activated: Tensor = self._activation(self.multiply(x, bias, norm=norm))
        return activated

    def look_up(self, rows: Tensor) -> Tensor:
        """See `Weight`."""
        out = torch.empty(len(rows), len(self.codes))
        Float8Part(self.format, self.codes, self.scales).dequantize(rows, out)
        return out
