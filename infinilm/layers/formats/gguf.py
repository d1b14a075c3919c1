"""GGML's formats on a CPU: matrices stay quantised, and the native library computes with them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from infinilm.distributed.shard import PackedShard, Shard, ShardRange
from infinilm.errors import EngineError
from infinilm.kernels import native
from infinilm.kernels.invariant import silu
from infinilm.layers.norm import RMSNorm

GROUP = 32
"""Columns that share a scale in memory."""
PANEL = 16
"""Rows that lie side by side in memory."""


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """One of GGML's formats, and what becomes of it in memory."""

    block_columns: int
    """A rank's piece of a row must be whole blocks of so many columns."""
    group_bytes: int
    """What 32 numbers take in memory, scale included."""


FORMATS = {
    "Q4_0": PackedFormat(32, 18),
    "Q4_1": PackedFormat(32, 20),
    "Q5_0": PackedFormat(32, 22),
    "Q5_1": PackedFormat(32, 24),
    "Q8_0": PackedFormat(32, 34),
    "Q4_K": PackedFormat(256, 20),
    "Q5_K": PackedFormat(256, 24),
    "Q6_K": PackedFormat(256, 28),
}
"""Those that the native library takes."""


@dataclass(frozen=True, slots=True)
class MatrixOutline:
    """A quantised matrix without its memory, for a model that is only an outline."""

    format: str
    rows: int
    columns: int

    @property
    def num_bytes(self) -> int:
        """What it would take."""
        return -(-self.rows // PANEL) * PANEL * self.columns // GROUP * FORMATS[self.format].group_bytes

    def load(self, _blocks: Tensor, _rows: Tensor, /) -> None:
        """Refused: there is no memory to load into."""
        raise EngineError("the outline of a model takes no weights")

    def dequantize(self, _rows: Tensor, _out: Tensor, /) -> None:
        """Refused likewise."""
        raise EngineError("the outline of a model has no weights")


class GGUFWeight:
    """See `Weight`. `matrices` are the native library's, one for each of `formats` and `rows`."""

    def __init__(self, formats: Sequence[str], rows: Sequence[int], columns: int, device: torch.device | str) -> None:
        is_outline = torch.device(device).type == "meta"
        make: Any = MatrixOutline if is_outline else load_library().Matrix
        self.matrices = [make(format, count, columns) for format, count in zip(formats, rows, strict=True)]
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
        self._linear.multiply(x.contiguous(), out, is_added_to)
        return out

    def multiply_gated(self, x: Tensor, norm: RMSNorm | None, bias: Tensor | None = None) -> Tensor:
        """See `Weight`."""
        gate, up = self.multiply(x, bias, norm=norm).chunk(2, dim=-1)
        return silu(gate).mul_(up)

    def look_up(self, rows: Tensor) -> Tensor:
        """See `Weight`."""
        (matrix,) = self.matrices
        out = torch.empty(len(rows), self._num_columns)
        matrix.dequantize(rows.contiguous(), out)
        return out

    def to_native(self, bias: Tensor | None) -> Any:
        """See `Weight`."""
        return load_library().Linear(self.matrices, bias)

    @cached_property
    def _linear(self) -> Any:
        return self.to_native(None)


def load_library() -> Any:
    library = native.load()
    if library is None:
        raise EngineError("the native library, which computes with quantised weights, was not built with the package")
    return library
