"""Quantised matrices stored line by line, which the kernels of `experts` unpack, and the torch twin of unpacking."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from infinilm.kernels.tiles import TileFormat

_FLOATS4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class PackedLines(NamedTuple):
    """A matrix `[lines, inputs]`: `value = (code - zero) * scale + minimum`."""

    format: TileFormat
    inputs: int
    codes: Tensor
    """uint8 `[lines, inputs * bits / 8]`; the first of two 4-bit codes is in the lower half."""
    scales: Tensor
    """`[lines, groups]`: float32; int8, multiplied by factors; or, for 4-bit floats, uint8: exponents of 2, plus 127.

    With minimums, each scale is followed by its minimum: int32, a pair of float16; or int16, a pair of uint8,
    multiplied by factors.
    """
    zeros: Tensor | None
    """uint8 `[lines, groups]`."""
    factors: Tensor | None
    """`[lines, inputs / 256]`: float32, or int32, a pair of float16."""

    @classmethod
    def empty(cls, format: TileFormat, lines: int, inputs: int, device: torch.device | str) -> "PackedLines":
        groups = inputs // (format.group or inputs)
        kinds = (torch.int8, torch.int16) if format.has_factors else (torch.float32, torch.int32)
        kind = torch.uint8 if is_float4(format) else kinds[format.has_minimums]

        def table(columns: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(lines, columns, dtype=dtype, device=device)

        return cls(
            format,
            inputs,
            table(inputs * format.bits // 8, torch.uint8),
            table(groups, kind),
            table(groups, torch.uint8) if format.has_zeros else None,
            table(inputs // 256, torch.int32 if format.has_minimums else torch.float32) if format.has_factors else None,
        )

    @property
    def group(self) -> int:
        return self.format.group or self.inputs

    def words(self) -> Tensor:
        """The codes as kernels read them: int32, or 8-bit floats."""
        is_fp8 = self.format.is_float and self.format.bits == 8
        return self.codes.view(torch.float8_e4m3fn if is_fp8 else torch.int32)

    def options(self, block_in: int) -> dict[str, Any]:
        """The compile-time arguments of kernels with blocks of `block_in` inputs."""
        run = block_in if self.group == self.inputs else min(self.group & -self.group, block_in)
        sizes = {"IN": self.inputs, "BITS": self.format.bits, "GROUP": self.group, "RUN": run}
        return {**sizes, "MIDDLE": self.format.zero, "HAS_MINIMUMS": self.format.has_minimums}


def is_float4(format: TileFormat) -> bool:
    return format.is_float and format.bits == 4


def unpack_lines_torch(matrix: PackedLines, dtype: torch.dtype) -> Tensor:
    """The matrix `[lines, inputs]`, each value rounded once."""
    codes, format = matrix.codes, matrix.format
    if format.bits == 4:
        codes = torch.stack((codes & 0x0F, codes >> 4), dim=2).flatten(1)
    scales, minimums = _floats(matrix.scales, torch.uint8 if format.has_factors else torch.float16)
    if matrix.factors is not None:
        repeats = scales.shape[1] // matrix.factors.shape[1]
        factors = [each.repeat_interleave(repeats, dim=1) for each in _floats(matrix.factors, torch.float16)]
        scales, minimums = scales * factors[0], minimums * factors[-1]
    if is_float4(format):
        table = torch.tensor([*_FLOATS4, *(-value for value in _FLOATS4)], device=codes.device)
        values, scales = table[codes.int()], torch.ldexp(torch.ones_like(scales), scales.int() - 127)
    else:
        values = codes.view(torch.float8_e4m3fn).float() if format.is_float else codes.float() - format.zero
    values = values.view(*scales.shape, -1)
    if matrix.zeros is not None:
        values = values - matrix.zeros.float().unsqueeze(2)
    values = values * scales.unsqueeze(2)
    return (values + minimums.unsqueeze(2) if format.has_minimums else values).flatten(1).to(dtype)


def _floats(stored: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scales and minimums as float32. Without minimums, returns the scales twice."""
    if stored.dtype not in (torch.int32, torch.int16):
        return stored.float(), stored.float()
    first, second = stored.view(kind).float().unflatten(1, (-1, 2)).unbind(2)
    return first, second
