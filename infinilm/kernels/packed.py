"""The native library's arithmetic with quantised weights, in torch: the reference for its tests."""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256  # columns of the activations that share a scale; the last block may have fewer
GROUP = 32  # the same for 8-bit activations
OUTLIER_SHARE = 0.4
MAX_QUANT = 32512
"""The quant of a block's largest number: 255 * 127 + 127. Quants are stored in two bytes of -127 to 127."""


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` `[T, columns]` float32 as int16 `[T, columns]` and scales float32 `[T, blocks]`, one per 256 columns.

    Ties are rounded to even. A block of zeros has the scale 0.
    """
    blocks = F.pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1) / MAX_QUANT
    inverses = torch.where(scales == 0, 0.0, 1 / scales)
    quants = (blocks * inverses.unsqueeze(-1)).round().clamp(-MAX_QUANT, MAX_QUANT).to(torch.int16)
    return quants.flatten(-2)[..., : x.shape[-1]], scales


def round_to_bytes(x: Tensor) -> Tensor:
    """`x` `[T, columns]` float32 rounded as with `activation_bits=8`, in float64.

    Each group of 32 columns has a scale and is rounded to -127 to 127 steps. If the square of a group's largest number
    is more than `OUTLIER_SHARE` of its block's sum of squares, its steps are 1/254 as large.
    """
    groups = F.pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK // GROUP, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    scales = largest / 127
    numbers = groups * torch.where(scales == 0, 0.0, 1 / scales)
    coarse = numbers.round()
    has_outlier = largest.square() > OUTLIER_SHARE * groups.square().sum((-1, -2), keepdim=True)
    fine = torch.where(has_outlier, ((numbers - coarse) * 254).round(), 0.0)
    rounded: Tensor = (coarse.double() + fine.double() / 254) * scales.double()
    return rounded.flatten(-3)[..., : x.shape[-1]]


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation_bits: int = 16) -> Tensor:
    """`x` `[T, columns]`, quantised, times the dequantised `weight` `[rows, columns]`: `[T, rows]` float32.

    Sums are float64, so that a result in another order of additions differs only by that result's own rounding.
    """
    if activation_bits == 8:
        rounded = round_to_bytes(x)
    else:
        quants, scales = quantize_activations(x)
        rounded = quants.double() * scales.double().repeat_interleave(BLOCK, dim=-1)[..., : x.shape[-1]]
    product = torch.mm(rounded, weight.double().T)
    return (product if bias is None else product + bias.double()).float()
