"""The native library's arithmetic with quantised weights, in torch: the reference that it is checked against."""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256  # columns of the activations that share a scale; the last block may have fewer
MAX_QUANT = 32512
"""The largest quant of a block: 255 * 127 + 127, which is stored in two bytes of -127 to 127."""


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` `[T, columns]` float32 as int16 `[T, columns]` and, by blocks of 256 columns, scales float32 `[T, blocks]`.

    Halves are rounded to even numbers. A block of zeros has the scale 0.
    """
    blocks = F.pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1) / MAX_QUANT
    inverses = torch.where(scales == 0, 0.0, 1 / scales)
    quants = (blocks * inverses.unsqueeze(-1)).round().clamp(-MAX_QUANT, MAX_QUANT).to(torch.int16)
    return quants.flatten(-2)[..., : x.shape[-1]], scales


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x` `[T, columns]`, quantised, times the dequantised `weight` `[rows, columns]`: `[T, rows]` float32.

    Sums are float64, so that another order of additions differs by its own rounding only.
    """
    quants, scales = quantize_activations(x)
    rounded = quants.double() * scales.double().repeat_interleave(BLOCK, dim=-1)[..., : x.shape[-1]]
    product = torch.mm(rounded, weight.double().T)
    return (product if bias is None else product + bias.double()).float()
