"""Matrices in GGML's formats as the kernels of `block_product` take them, and their torch twin."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class PackedBlocks(NamedTuple):
    """A matrix of a `BlockFormat`, whose `value = (code - middle) * scale + minimum`."""

    codes: Tensor
    """int32 `[out, in * bits / 32]`; the first code is in the lowest bits."""
    scales: Tensor
    """`[out, in / group]`: float16, or int8 if there are factors. With a minimum behind each: int32, or int16."""
    factors: Tensor | None
    """`[out, in / 256]`: float16, or int32 with that of minimums behind it."""
    bits: int
    group: int
    middle: int

    @property
    def in_size(self) -> int:
        return self.codes.shape[1] * 32 // self.bits

    @property
    def has_minimums(self) -> bool:
        return self.scales.dtype in (torch.int32, torch.int16)

    def options(self) -> dict[str, Any]:
        """What the kernels have to know when they are compiled."""
        sizes = {"IN": self.in_size, "BITS": self.bits, "GROUP": self.group, "MIDDLE": self.middle}
        return {**sizes, "HAS_MINIMUMS": self.has_minimums}


def unpack_blocks_torch(matrix: PackedBlocks, dtype: torch.dtype) -> Tensor:
    """The same by torch operations."""
    codes = matrix.codes.view(torch.uint8)
    if matrix.bits == 4:
        codes = torch.stack((codes & 0x0F, codes >> 4), dim=2).flatten(1)
    scales, minimums = _floats(matrix.scales, torch.uint8 if matrix.factors is not None else torch.float16)
    if matrix.factors is not None:
        repeats = scales.shape[1] // matrix.factors.shape[1]
        factors = [each.repeat_interleave(repeats, dim=1) for each in _floats(matrix.factors, torch.float16)]
        scales, minimums = scales * factors[0], minimums * factors[-1]
    values = (codes.float() - matrix.middle).view(*scales.shape, -1) * scales.unsqueeze(2)
    return (values + minimums.unsqueeze(2) if matrix.has_minimums else values).flatten(1).to(dtype)


def _floats(stored: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scales and minimums as float32; without minimums the scales twice."""
    if stored.dtype in (torch.int8, torch.float16):
        return stored.float(), stored.float()
    first, second = stored.view(kind).float().unflatten(1, (-1, 2)).unbind(2)
    return first, second
