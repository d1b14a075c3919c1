"""Matrices that stay quantised on a GPU: 8-bit floats or 4-bit integers, with scales for groups of columns."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from infinilm.distributed.grouped import GroupedFormat, unpack_codes
from infinilm.distributed.shard import PackedShard, Shard, ShardRange
from infinilm.kernels.support import has_kernels
from infinilm.layers.formats.unpacked import UnpackedWeight
from infinilm.layers.norm import RMSNorm


class GroupedMatrix:
    """One of the matrices of a `GroupedWeight`: views of its tensors, which `load` fills."""

    def __init__(self, format: GroupedFormat, parts: Sequence[Tensor], columns: int) -> None:
        self.format = format.name
        self._parts, self._sizes = parts, format.sizes(columns)

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def load(self, blocks: Tensor, rows: Tensor, /) -> None:
        """See `PackedMatrix`. A row's bytes are its codes, its scales and its zeros."""
        start = 0
        for part, size in zip(self._parts, self._sizes, strict=False):  # there may be no zeros
            part.view(torch.uint8)[rows.to(part.device)] = blocks[:, start : start + size].to(part.device)
            start += size


class GroupedWeight(UnpackedWeight):
    """See `Weight` and `UnpackedWeight`. All matrices have one format."""

    def __init__(
        self,
        format: str,
        rows: Sequence[int],
        columns: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        is_ordered: bool = False,
    ) -> None:
        super().__init__(dtype, device)
        parsed = GroupedFormat.parse(format)
        assert parsed is not None
        self.format, self._num_columns = parsed, columns
        self._firsts = [0, *accumulate(rows)]
        num_rows = self._firsts.pop()
        code_bytes, scale_bytes, zero_bytes = parsed.sizes(columns)
        code_dtype = torch.uint8 if parsed.bits == 4 else torch.float8_e4m3fn

        def kept(num_columns: int, kind: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_rows, num_columns, dtype=kind, device=device), requires_grad=False)

        self.codes = kept(code_bytes, code_dtype)
        self.scales = kept(scale_bytes // parsed.scale_dtype.itemsize, parsed.scale_dtype)
        self.zeros = kept(zero_bytes, torch.uint8) if zero_bytes else None
        self._unpacks_in_kernel = False
        if has_kernels(device):
            from infinilm.kernels import grouped_product, ordered_product

            self._unpacks_in_kernel = grouped_product.can_unpack(self.codes.device, parsed.bits)
            self._max_kernel_rows = (grouped_product if self._unpacks_in_kernel else ordered_product).MAX_ROWS
            if is_ordered:
                ordered_product.keep_order()

    def shards(self, rows: Sequence[ShardRange], columns: ShardRange) -> list[Shard]:
        """See `Weight`."""
        found: list[Shard] = []
        for first, own in zip(self._firsts, rows, strict=True):
            parts = [part[first : first + own.length] for part in self.parameters()]
            found.append(PackedShard.of(GroupedMatrix(self.format, parts, self._num_columns), own, columns))
        return found

    def dequantized(self) -> Tensor:
        """See `UnpackedWeight`."""
        codes = self.codes if self.format.bits == 8 else unpack_codes(self.codes)
        exact = codes.to(self._dtype).view(*self.scales.shape, -1)
        if self.format.bits == 4:
            exact -= 8 if self.zeros is None else self.zeros.to(self._dtype).unsqueeze(2)
        return torch.mul(exact, self.scales.float().unsqueeze(2), out=torch.empty_like(exact)).flatten(1)

    def few_rows(self, x: Tensor, norm: RMSNorm | None, **options: Any) -> Tensor:
        """See `UnpackedWeight`."""
        from infinilm.kernels.grouped_product import grouped_product
        from infinilm.kernels.ordered_product import ordered_product

        fused = None if norm is None else (norm.weight, norm.eps)
        if self._unpacks_in_kernel:
            return grouped_product(x, self.codes, self.scales, self.zeros, norm=fused, **options)
        return ordered_product(x, self.dequantized(), norm=fused, **options)
