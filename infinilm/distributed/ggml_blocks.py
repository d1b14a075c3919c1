"""GGML's block formats: what a block holds, and how a device stores it.

A quantised row is a run of blocks, each a few small integers with one or two float16 scales.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Split(NamedTuple):
    """The parts of `n` blocks: `value = (code - middle) * scale + minimum`.

    Scales and minimums are float16, or integers that are multiplied by the factors, float16, of their blocks.
    """

    codes: Tensor
    """uint8 `[n, groups, columns of a group]`."""
    scales: Tensor
    """`[n, groups]`."""
    minimums: Tensor | None = None
    """`[n, groups]`."""
    scale_factors: Tensor | None = None
    """`[n, 1]`."""
    minimum_factors: Tensor | None = None
    """`[n, 1]`."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One of GGML's formats. On a device codes have 4 or 8 bits, for any number of bits in files."""

    block_columns: int
    block_bytes: int
    group: int
    """Columns that share a scale."""
    split: Callable[[Tensor], Split]
    """Takes blocks, uint8 `[n, block_bytes]`."""
    bits: int
    middle: int = 0
    """The code that stands for 0, in formats without minimums."""
    has_minimums: bool = False
    has_factors: bool = False

    def take_apart(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rows of blocks, uint8 `[n, bytes]`, as a device stores them: codes uint8 `[n, columns]`, scales, factors.

        Scales and factors are float32, or bytes or float16 in words of 32 bits, each minimum after its scale. See
        `TiledMatrix`.
        """
        num_rows = len(rows)
        parts = self.split(rows.reshape(-1, self.block_bytes))
        codes = parts.codes.reshape(num_rows, -1)
        if not self.has_factors and not self.has_minimums:
            return codes, parts.scales.float().reshape(num_rows, -1), None
        scales = _words(parts.scales, parts.minimums, num_rows)
        if parts.scale_factors is None:
            return codes, scales, None
        if parts.minimum_factors is None:
            return codes, scales, parts.scale_factors.float().reshape(num_rows, -1)
        return codes, scales, _words(parts.scale_factors, parts.minimum_factors, num_rows)


_BYTE_MIDDLE = 128


def _words(first: Tensor, second: Tensor | None, num_rows: int) -> Tensor:
    """int32 `[n, words]`."""
    both = first if second is None else torch.stack((first, second), dim=2)
    return both.reshape(num_rows, -1).contiguous().view(torch.int32)


def _float16(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of every block, `[n, 1]`."""
    return blocks[:, start : start + 2].clone().view(torch.float16)


def _halves(quants: Tensor) -> Tensor:
    """Split bytes `[..., m]` into `[..., 2, m]`: all low four bits, then all high four bits."""
    return torch.stack((quants & 0x0F, quants >> 4), dim=-2)


def _nibbles(quants: Tensor) -> Tensor:
    """The codes of 16 bytes `[n, 16]`: `[n, 1, 32]`."""
    return _halves(quants).view(-1, 1, 32)


def _fifth_bits(high: Tensor) -> Tensor:
    """Spread 4 bytes `[n, 4]` into 32 values 0 or 16 `[n, 1, 32]`; bit i of the 32 belongs to element i."""
    shifts = torch.arange(8, dtype=torch.uint8, device=high.device)
    return (((high.unsqueeze(-1) >> shifts) & 1) << 4).view(-1, 1, 32)


def _q4_0(blocks: Tensor) -> Split:
    """Scale, 16 bytes of quants."""
    return Split(_nibbles(blocks[:, 2:]), _float16(blocks, 0))


def _q4_1(blocks: Tensor) -> Split:
    """Scale, minimum, 16 bytes of quants."""
    return Split(_nibbles(blocks[:, 4:]), _float16(blocks, 0), _float16(blocks, 2))


def _q5_0(blocks: Tensor) -> Split:
    """Scale, 4 bytes of fifth bits, 16 bytes of low bits."""
    return Split(_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), _float16(blocks, 0))


def _q5_1(blocks: Tensor) -> Split:
    """Scale, minimum, 4 bytes of fifth bits, 16 bytes of low bits."""
    return Split(_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), _float16(blocks, 0), _float16(blocks, 2))


def _q8_0(blocks: Tensor) -> Split:
    """Scale, 32 signed bytes."""
    return Split((blocks[:, 2:] ^ _BYTE_MIDDLE).unsqueeze(1), _float16(blocks, 0))


def _k_block(blocks: Tensor, codes: Tensor) -> Split:
    """The parts of a Q4_K or Q5_K block, which has 8 groups of 32.

    A block opens with a float16 scale and a float16 minimum scale, then 12 bytes hold 8 + 8 numbers of
    six bits: bytes 0–3 the first four scales and, in their top two bits, the upper bits of the last four;
    bytes 4–7 likewise for the minimums; bytes 8–11 the lower four bits of the last four of both. Minimums are
    subtracted.
    """
    scales, minimums, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((scales & 0x3F, (low & 0x0F) | ((scales >> 2) & 0x30)), dim=1)
    minimums = torch.cat((minimums & 0x3F, (low >> 4) | ((minimums >> 2) & 0x30)), dim=1)
    return Split(codes, scales, minimums, _float16(blocks, 0), -_float16(blocks, 2))


def _q4_k(blocks: Tensor) -> Split:
    """16 bytes of scales, 4 × 32 bytes of quants."""
    return _k_block(blocks, _halves(blocks[:, 16:].reshape(-1, 4, 32)).flatten(1, 2))


def _q5_k(blocks: Tensor) -> Split:
    """16 bytes of scales, 32 bytes of fifth bits (bit g for group g), 4 × 32 bytes of low bits."""
    groups = torch.arange(8, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    fifth_bits = ((blocks[:, None, 16:48] >> groups) & 1) << 4
    return _k_block(blocks, _halves(blocks[:, 48:].reshape(-1, 4, 32)).flatten(1, 2) | fifth_bits)


def _q6_k(blocks: Tensor) -> Split:
    """2 × 64 bytes of low bits, 2 × 32 bytes of upper bits, 16 signed scales, scale f16; groups of 16."""
    low = _halves(blocks[:, :128].reshape(-1, 2, 64)).flatten(2)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    upper = (((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3) << 4).flatten(2)
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    return Split((low | upper).view(-1, 16, 16), scales, None, _float16(blocks, 208))


BLOCK_FORMATS = {
    "Q4_0": BlockFormat(32, 18, 32, _q4_0, bits=4, middle=8),
    "Q4_1": BlockFormat(32, 20, 32, _q4_1, bits=4, has_minimums=True),
    "Q5_0": BlockFormat(32, 22, 32, _q5_0, bits=8, middle=16),
    "Q5_1": BlockFormat(32, 24, 32, _q5_1, bits=8, has_minimums=True),
    "Q8_0": BlockFormat(32, 34, 32, _q8_0, bits=8, middle=_BYTE_MIDDLE),
    "Q4_K": BlockFormat(256, 144, 32, _q4_k, bits=4, has_minimums=True, has_factors=True),
    "Q5_K": BlockFormat(256, 176, 32, _q5_k, bits=8, has_minimums=True, has_factors=True),
    "Q6_K": BlockFormat(256, 210, 16, _q6_k, bits=8, middle=32, has_factors=True),
}
"""By GGML's name. A device uses 5 bits per weight for Q4_0 and Q4_1, 4.63 for Q4_K, and 8.6 to 9 for the others."""
