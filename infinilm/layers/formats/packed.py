"""GGML's formats, and their sizes in the native library's memory. This module needs no torch."""

from dataclasses import dataclass

from infinilm.errors import EngineError

GROUP = 32
"""Columns that share a scale in memory."""
PANEL = 16
"""Rows that are interleaved in memory."""


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """One of GGML's formats, and its size in memory."""

    block_columns: int
    """The columns of a block. A rank's part of a row must be whole blocks."""
    group_bytes: int
    """The bytes of 32 numbers in memory, including the scale."""


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
"""The formats that the native library takes."""


@dataclass(frozen=True, slots=True)
class MatrixOutline:
    """A quantised matrix without memory, for a model that is only an outline."""

    format: str
    rows: int
    columns: int
    activation_bits: int = 16

    @property
    def num_bytes(self) -> int:
        """The bytes that the matrix would take."""
        return -(-self.rows // PANEL) * PANEL * self.columns // GROUP * FORMATS[self.format].group_bytes

    def load(self, _blocks: object, _rows: object, /) -> None:
        """Refused: there is no memory to load into."""
        raise EngineError("the outline of a model takes no weights")

    def dequantize(self, _rows: object, _out: object, /) -> None:
        """Refused: there are no values."""
        raise EngineError("the outline of a model has no weights")
