"""Weights that stay quantised in memory: which of them, and what is done with them by the native library."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from infinilm.distributed.shard import Piece
from infinilm.errors import EngineError
from infinilm.kernels import native

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
class WeightFormats:
    """In which of `FORMATS` matrices are to stay quantised, by their names in a checkpoint."""

    by_name: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    """Of the names that are asked for."""

    def below(self, prefix: str) -> "WeightFormats":
        """The same for a part of the model, whose names go on after `prefix`."""
        return WeightFormats(self.by_name, self.prefix + prefix)

    def find(self, names: Sequence[str], columns: Piece) -> list[str] | None:
        """The formats of matrices that are multiplied as one; None if they can't all stay quantised.

        Each must have a format, and this rank's `columns` of it must be whole blocks.
        """
        formats = [self.by_name.get(self.prefix + name) for name in names]
        found = [
            format
            for format in formats
            if format is not None
            and columns.start % FORMATS[format].block_columns == 0
            and columns.length % FORMATS[format].block_columns == 0
        ]
        return found if len(found) == len(formats) else None


DENSE = WeightFormats()
"""All matrices are plain ones."""


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


class PackedWeight:
    """Quantised matrices with the same number of columns, one below the other: `[rows, columns]`.

    `matrices` are the native library's, one for each of `formats` and `rows`.
    """

    def __init__(self, formats: Sequence[str], rows: Sequence[int], columns: int, device: torch.device | str) -> None:
        is_outline = torch.device(device).type == "meta"
        make: Any = MatrixOutline if is_outline else _library().Matrix
        self.matrices = [make(format, count, columns) for format, count in zip(formats, rows, strict=True)]
        self.num_rows, self.num_columns = sum(rows), columns

    @property
    def num_bytes(self) -> int:
        """What the matrices take."""
        return sum(matrix.num_bytes for matrix in self.matrices)

    def linear(self, bias: Tensor | None = None) -> Any:
        """The native library's layer of these matrices."""
        return _library().Linear(self.matrices, bias)

    def multiply(self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """`x` `[T, columns]` to `[T, rows]`, to which `bias` `[rows]` and `residual` `[T, rows]` are added.

        The residual's memory may become the result's.
        """
        if residual is not None:
            out = (residual if bias is None else residual + bias).contiguous()
        else:
            out = x.new_empty(len(x), self.num_rows) if bias is None else bias.repeat(len(x), 1)
        is_added_to = residual is not None or bias is not None
        self._linear.multiply(x.contiguous(), out, is_added_to)
        return out

    def look_up(self, rows: Tensor) -> Tensor:
        """Some rows `[n]` of the only matrix, as floats: `[n, columns]`."""
        (matrix,) = self.matrices
        out = torch.empty(len(rows), self.num_columns)
        matrix.dequantize(rows.contiguous(), out)
        return out

    @cached_property
    def _linear(self) -> Any:
        return self.linear()


def _library() -> Any:
    library = native.load()
    if library is None:
        raise EngineError("the native library, which computes with quantised weights, was not built with the package")
    return library
