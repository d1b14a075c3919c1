"""Quantised matrices as the kernels of `tile_product` read them: codes in tiles, scales of adjacent lines side by side.

A matrix instruction takes 64 lines of 16 inputs at a time; each of 128 threads has eight of these numbers in registers.
Codes are stored in that order, 16 bytes per thread, thread after thread. So a thread loads the codes that it
multiplies, and nothing is moved between threads. A chunk is what 128 threads load at once: 64 lines of 64 inputs with 4
bits, or of 32 inputs with 8 bits.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

TILE_LINES = 64
CHUNK_BYTES = 2048
# The digits of a code's line and input, highest first: line = tile, warp 4, half 2, place 8; input = chunk, step, half
# 2, lane 4, pair 2. Their order in memory: tile, chunk, warp, place, lane, step, then within a word as in `load_codes`.
_LANES = (4, 2, 8)


@dataclass(frozen=True, slots=True)
class TileFormat:
    """`value = (code - zero) * scale + minimum`."""

    bits: int
    """4 or 8."""
    group: int
    """Inputs that share a scale; 0: whole lines."""
    is_float: bool = False
    """Whether codes are 8-bit floats (e4m3), or 4-bit floats (e2m1), which are not stored in tiles."""
    zero: int = 0
    """The zero of all codes, if groups have no zeros of their own."""
    has_zeros: bool = False
    has_minimums: bool = False
    has_factors: bool = False
    """Whether scales and minimums are small integers, with one factor per 256 inputs."""

    @property
    def chunk(self) -> int:
        """Inputs that are loaded at once. A line consists of whole chunks."""
        return 256 // self.bits

    @property
    def has_tiles(self) -> bool:
        """Whether the format can be stored in tiles: the kernels need groups that divide a chunk, or the reverse."""
        if self.is_float and self.bits == 4:
            return False
        return self.group == 0 or self.chunk % self.group == 0 or self.group % self.chunk == 0

    @property
    def scales_in_word(self) -> int:
        """Groups whose scales are in one 32-bit word."""
        return 1 if not self.has_factors else 2 if self.has_minimums else 4


class TiledMatrix(NamedTuple):
    """A matrix `[lines, inputs]`. Its tensors have room for lines up to a multiple of `TILE_LINES`."""

    format: TileFormat
    lines: int
    inputs: int
    codes: Tensor
    """int32, in the order described above."""
    scales: Tensor
    """`[groups, lines]`, or `[1, lines]`: float32. With minimums int32: two float16. With factors int32
    `[groups / 2 or 4, lines]`: bytes, the scales and minimums of two groups, or the scales of four groups."""
    zeros: Tensor | None
    """`[groups, lines]` int32: a 4-bit zero in each half."""
    factors: Tensor | None
    """`[inputs / 256, lines]`: float32, or with minimums two float16 in an int32."""

    @classmethod
    def empty(cls, format: TileFormat, lines: int, inputs: int, device: torch.device | str) -> "TiledMatrix":
        padded = -(-lines // TILE_LINES) * TILE_LINES
        groups = inputs // format.group if format.group else 1

        def table(rows: int, kind: torch.dtype) -> Tensor:
            return torch.zeros(rows, padded, dtype=kind, device=device)

        kind = torch.int32 if format.has_minimums or format.has_factors else torch.float32
        return cls(
            format,
            lines,
            inputs,
            torch.zeros(padded * inputs * format.bits // 32, dtype=torch.int32, device=device),
            table(groups // format.scales_in_word, kind),
            table(groups, torch.int32) if format.has_zeros else None,
            table(inputs // 256, torch.int32 if format.has_minimums else torch.float32) if format.has_factors else None,
        )

    @property
    def tensors(self) -> list[Tensor]:
        return [each for each in self[3:] if each is not None]

    def load_codes(self, codes: Tensor, rows: Tensor) -> None:
        """Store codes, uint8 `[n, inputs]`, in lines `rows` `[n]`."""
        warp, half, place = _split(rows % TILE_LINES, _LANES)
        columns = codes.view(len(codes), self.inputs // self.format.chunk, -1, 2, 4, 2)  # chunk, step, half, lane, pair
        if self.format.bits == 4:  # byte pair · 2 + half of lines has both halves of inputs
            found = (columns[:, :, :, 0] | (columns[:, :, :, 1] << 4)).permute(0, 1, 3, 2, 4)  # chunk lane step pair
            self._bytes()[rows // TILE_LINES, :, warp, place, :, :, :, half] = found
        else:
            found = columns.permute(0, 1, 4, 2, 3, 5)  # chunk, lane, step, half, pair
            self._bytes()[rows // TILE_LINES, :, warp, place, :, :, :, :, half] = found

    def all_codes(self) -> Tensor:
        """All codes, uint8 `[lines, inputs]`."""
        stored = self._bytes()
        if self.format.bits == 4:
            stored = torch.stack((stored & 15, stored >> 4), dim=6)
        ordered = stored.permute(0, 2, 8, 3, 1, 5, 6, 4, 7)
        return ordered.reshape(-1, self.inputs)[: self.lines]

    def _bytes(self) -> Tensor:
        """A view of the codes: tile, chunk, warp, place, lane, step, (half of inputs,) pair, half of lines."""
        steps = (4,) if self.format.bits == 4 else (2, 2)
        chunks = self.inputs // self.format.chunk
        return self.codes.view(torch.uint8).view(-1, chunks, 4, 8, 4, *steps, 2, 2)

    def all_scales(self) -> tuple[Tensor, Tensor | None]:
        """Scales and minimums, float32 `[lines, groups]`."""
        format = self.format
        words = self.scales.t().reshape(-1)
        if not format.has_factors:
            if not format.has_minimums:
                return words.view(-1, len(self.scales))[: self.lines], None
            pairs = words.view(torch.float16).float().view(-1, len(self.scales), 2)[: self.lines]
            return pairs[:, :, 0], pairs[:, :, 1]
        assert self.factors is not None
        shape, groups = (-1, len(self.factors), 2 if format.has_minimums else 1), 256 // format.group
        factors = self.factors.t().reshape(-1)
        factors = (factors.view(torch.float16) if format.has_minimums else factors).float().view(shape)
        numbers = words.view(torch.uint8 if format.has_minimums else torch.int8).float()
        pairs = numbers.view(len(factors), -1, shape[2]) * factors.repeat_interleave(groups, dim=1)
        pairs = pairs[: self.lines]
        return pairs[:, :, 0], pairs[:, :, 1] if format.has_minimums else None


def _split(numbers: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    """The digits of numbers in these bases, highest first."""
    digits = []
    for size in reversed(sizes):
        digits.append(numbers % size)
        numbers = numbers // size
    return digits[::-1]


def untile_torch(matrix: TiledMatrix, dtype: torch.dtype) -> Tensor:
    """The matrix `[lines, inputs]`, each value rounded once."""
    format = matrix.format
    codes = matrix.all_codes()
    values = codes.view(torch.float8_e4m3fn).float() if format.is_float else codes.float()
    scales, minimums = matrix.all_scales()
    values = values.view(*scales.shape, -1)
    if matrix.zeros is not None:
        values = values - (matrix.zeros.t()[: matrix.lines] & 15).float().unsqueeze(2)
    elif not format.is_float:
        values = values - format.zero
    values = values * scales.unsqueeze(2)
    return (values if minimums is None else values + minimums.unsqueeze(2)).flatten(1).to(dtype)
