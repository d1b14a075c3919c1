"""Matrices of 8-bit floats on a GPU that multiplies 8-bit floats. Inputs are rounded to 8-bit floats, too."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinilm.distributed.grouped import GroupedFormat
from infinilm.distributed.shard import PackedShard, Shard, ShardRange
from infinilm.kernels.support import has_kernels
from infinilm.layers.norm import RMSNorm


def can_round(format: str, rows: Sequence[int], columns: int, dtype: torch.dtype, device: torch.device | str) -> bool:
    """Whether a device multiplies such matrices with rounded inputs."""
    parsed = GroupedFormat.parse(format)
    if parsed is None or not parsed.rounds_inputs or dtype == torch.float32 or not has_kernels(device):
        return False
    from infinilm.kernels.rounded_product import LEAST_CAPABILITY, SIZE_STEP

    is_aligned = sum(rows) % SIZE_STEP == 0 and columns % SIZE_STEP == 0
    return is_aligned and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


class RoundedPart:
    """One of the matrices of a `RoundedWeight`; `load` fills it."""

    def __init__(self, format: str, codes: Tensor, scales: Tensor) -> None:
        self.format, self._codes, self._scales = format, codes, scales

    @property
    def num_bytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes

    def load(self, blocks: Any, rows: Any, /) -> None:
        """See `PackedMatrix`."""
        blocks, rows = torch.as_tensor(blocks), torch.as_tensor(rows)
        format, device = GroupedFormat.parse(self.format), self._codes.device
        assert format is not None
        codes, scales, _ = format.take_apart(blocks.to(device), self._codes.shape[1])
        self._codes.view(torch.uint8)[rows.to(device)] = codes
        self._scales[rows.to(device)] = scales[:, 0]

    def dequantize(self, rows: Tensor, out: Tensor, /) -> None:
        """See `PackedMatrix`."""
        own = rows.to(self._codes.device)
        out.copy_(self._codes.view(torch.uint8)[own].view(torch.float8_e4m3fn).float() * self._scales[own, None])


class RoundedWeight(nn.Module):
    """See `Weight`. Each row of the matrix has one scale.

    Inputs are rounded only if there are several rows of them; each row then has its own scale.
    """

    def __init__(
        self, format: str, rows: Sequence[int], columns: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.format, self._dtype = format, dtype
        self._firsts = [0, *accumulate(rows)]
        num_rows = self._firsts.pop()
        codes = torch.empty(num_rows, columns, dtype=torch.float8_e4m3fn, device=device)
        scales = torch.empty(num_rows, dtype=torch.float32, device=device)
        self.codes, self.scales = (nn.Parameter(each, requires_grad=False) for each in (codes, scales))

    @property
    def num_bytes(self) -> int:
        """See `Weight`."""
        return self.codes.nbytes + self.scales.nbytes

    def shards(self, rows: Sequence[ShardRange], columns: ShardRange) -> list[Shard]:
        """See `Weight`."""
        found: list[Shard] = []
        for first, own in zip(self._firsts, rows, strict=True):
            part = slice(first, first + own.length)
            found.append(PackedShard.of(RoundedPart(self.format, self.codes[part], self.scales[part]), own, columns))
        return found

    def multiply(
        self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, norm: RMSNorm | None = None
    ) -> Tensor:
        """See `Weight`."""
        return self._product(x, norm, bias=bias, residual=residual)

    def multiply_gated(self, x: Tensor, norm: RMSNorm | None, bias: Tensor | None = None) -> Tensor:
        """See `Weight`."""
        return self._product(x, norm, bias=bias, is_gated=True)

    def _product(self, x: Tensor, norm: RMSNorm | None, **options: Any) -> Tensor:
        from infinilm.kernels.gemv import gemv
        from infinilm.kernels.rounded_product import rounded_product

        fused = None if norm is None else (norm.weight, norm.eps)
        if len(x) == 1:
            return gemv(x, self.codes.view(torch.uint8), scales=self.scales, norm=fused, **options)
        return rounded_product(x, self.codes, self.scales, norm=fused, **options)

    def look_up(self, rows: Tensor) -> Tensor:
        """See `Weight`."""
        return (F.embedding(rows, self.codes.float()) * self.scales[rows, None]).to(self._dtype)
