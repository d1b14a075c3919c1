"""GGML's formats on a GPU: matrices stay quantised, their codes, scales and factors in tensors of their own."""

from collections.abc import Sequence
from itertools import accumulate, groupby

import torch
from torch import Tensor, nn

from infinilm.distributed.ggml_blocks import BLOCK_FORMATS
from infinilm.distributed.shard import PackedShard, Shard, ShardRange
from infinilm.kernels.packed_blocks import PackedBlocks, unpack_blocks_torch
from infinilm.kernels.support import has_kernels
from infinilm.layers.formats.unpacked import UnpackedWeight
from infinilm.layers.norm import RMSNorm


class BlockMatrix:
    """One of the matrices of a `BlockWeight`: views of its tensors, which `load` fills."""

    def __init__(self, format: str, parts: Sequence[Tensor]) -> None:
        self.format, self._parts = format, parts

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def load(self, blocks: Tensor, rows: Tensor, /) -> None:
        """See `PackedMatrix`. Blocks are taken apart on the device."""
        device = self._parts[0].device
        found = BLOCK_FORMATS[self.format].rearrange(blocks.to(device))
        for part, new in zip(self._parts, found, strict=True):
            part.view(torch.uint8)[rows.to(device)] = new


class BlockRows(nn.Module):
    """Rows of one format."""

    def __init__(self, format: str, rows: int, columns: int, device: torch.device | str) -> None:
        super().__init__()
        self.format = BLOCK_FORMATS[format]

        def kept(num_bytes: int, kind: torch.dtype) -> nn.Parameter:
            shape = (rows, num_bytes // kind.itemsize)
            return nn.Parameter(torch.empty(shape, dtype=kind, device=device), requires_grad=False)

        code_bytes, scale_bytes, factor_bytes = self.format.sizes(columns)
        self.codes = kept(code_bytes, torch.int32)
        self.scales = kept(scale_bytes, self.format.scale_dtype)
        self.factors = kept(factor_bytes, self.format.factor_dtype) if factor_bytes else None

    def packed(self) -> PackedBlocks:
        """What the kernels take."""
        return PackedBlocks(
            self.codes, self.scales, self.factors, self.format.bits, self.format.group, self.format.middle
        )


class BlockWeight(UnpackedWeight):
    """See `Weight` and `UnpackedWeight`. Matrices below each other that have the same format are multiplied as one."""

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
        super().__init__(dtype, device)
        self.formats, self._num_columns = tuple(formats), columns
        self._places: list[tuple[int, int]] = []  # of each matrix: its run, and its first row there
        self._runs: list[BlockRows] = []
        for format, run in groupby(zip(formats, rows, strict=True), lambda each: each[0]):
            sizes = [size for _, size in run]
            firsts = [0, *accumulate(sizes)]
            self._places += [(len(self._runs), first) for first in firsts[:-1]]
            self._runs.append(BlockRows(format, firsts[-1], columns, device))
        self.runs = nn.ModuleList(self._runs)
        if has_kernels(device):
            from infinilm.kernels.grouped_product import MAX_ROWS
            from infinilm.kernels.ordered_product import keep_order

            self._max_kernel_rows = MAX_ROWS
            if is_ordered:
                keep_order()

    def shards(self, rows: Sequence[ShardRange], columns: ShardRange) -> list[Shard]:
        """See `Weight`."""
        found: list[Shard] = []
        for format, (run, first), own in zip(self.formats, self._places, rows, strict=True):
            parts = [part[first : first + own.length] for part in self._runs[run].parameters()]
            found.append(PackedShard.of(BlockMatrix(format, parts), own, columns))
        return found

    def dequantized(self) -> Tensor:
        """See `UnpackedWeight`."""
        unpack = unpack_blocks_torch
        if self._max_kernel_rows:
            from infinilm.kernels.block_product import unpack_blocks as unpack
        parts = [unpack(run.packed(), self._dtype) for run in self._runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def few_rows(
        self,
        x: Tensor,
        norm: RMSNorm | None,
        *,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        is_gated: bool = False,
    ) -> Tensor:
        """See `UnpackedWeight`."""
        from infinilm.kernels.block_product import block_product

        fused = None if norm is None else (norm.weight, norm.eps)
        if len(self._runs) == 1:
            (run,) = self._runs
            return block_product(x, run.packed(), norm=fused, bias=bias, residual=residual, is_gated=is_gated)
        if norm is not None:
            x = norm(x)
        out, start = x.new_empty(len(x), sum(len(run.codes) for run in self._runs)), 0
        for run in self._runs:
            own = slice(start, start + len(run.codes))
            added = [None if each is None else each[..., own] for each in (bias, residual)]
            block_product(x, run.packed(), bias=added[0], residual=added[1], out=out[:, own])
            start = own.stop
        return self._activation(out) if is_gated else out
