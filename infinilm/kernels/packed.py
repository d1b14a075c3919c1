"""The native library's arithmetic with quantised weights, in torch: the reference that it is checked against."""

import torch
from torch import Tensor

GROUP = 32  # columns of the activations that share a scale
MAX_QUANT = 32512
"""The largest quant of a group: 255 * 127 + 127, which is stored in two bytes of -127 to 127."""


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` `[T, columns]` float32 as int16 `[T, columns]` and, by groups of 32 columns, scales float32 `[T, groups]`.

    Halves are rounded to even numbers. A group of zeros has the scale 0.
    """
    groups = x.unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1) / MAX_QUANT
    inverses = torch.where(scales == 0, 0.0, 1 / scales)
    quants = (groups * inverses.unsqueeze(-1)).round().clamp(-MAX_QUANT, MAX_QUANT).to(torch.int16)
    return quants.flatten(-2), scales


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x` `[T, columns]`, quantised, times the dequantised `weight` `[rows, columns]`: `[T, rows]` float32.

    Sums are float64, so that another order of additions differs by its own rounding only.
    """
    quants, scales = quantize_activations(x)
    rounded = quants.unflatten(-1, (-1, GROUP)).double() * scales.double().unsqueeze(-1)
    product = torch.mm(rounded.flatten(-2), weight.double().T)
    return (product if bias is None else product + bias.double()).float()
