"""Torch operations on a CPU whose bits depend neither on the other rows of a tensor nor on the number of threads.

Torch's own operations differ in two ways. Libraries of matrix products sum few rows, or few columns, in another order
than many. And some element-wise operations compute the last elements of a tensor, or of a thread's share, by another
formula than whole vectors; `exp`, `tanh` and arithmetic do not. The native library, if there is one, computes products
of float32 matrices.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from infinilm.kernels.native import arrays_of, load, load_library

TILE = 4
"""MKL computes fewer rows or columns than this in another order. It gives threads whole tiles if there are any."""
PIECE = 16
"""On some CPUs MKL's order also depends on the number of tiles. There this many rows are multiplied at a time."""
NARROW = 32
"""From this many columns on the last tile's width makes no difference."""


def is_native(device: torch.device | str, dtype: torch.dtype) -> bool:
    """Whether the native library computes with such numbers. Then `multiply` can be used."""
    return torch.device(device).type == "cpu" and dtype == torch.float32 and load() is not None


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    is_table: bool = False,
    scales: Tensor | None = None,
) -> Tensor:
    """`x @ weight`, or `x @ weight.t()` with a table, plus bias and residual. The residual is overwritten by the
    result.

    If `weight` is uint8, codes of 8-bit floats, it has `scales` `[groups of inputs, outputs]`.
    """
    out = x.new_empty(len(x), weight.shape[0 if is_table else 1])
    load_library().multiply_dense(*arrays_of(x.contiguous(), weight, out), is_table, *arrays_of(scales))
    if bias is not None:
        out += bias
    return out if residual is None else residual.add_(out)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension, by the native library."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(rows.shape)
    load_library().rms_norm(*arrays_of(rows, weight, out), eps)
    return out.view(x.shape)


def pad_rows(x: Tensor, size: int = TILE) -> Tensor:
    """`x` `[n, …]` padded with zeros to whole tiles of `size` rows."""
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, -len(x) % size)) if len(x) % size else x


def sigmoid(x: Tensor) -> Tensor:
    """`torch.sigmoid` in float32."""
    return x.sigmoid() if x.device.type != "cpu" else x.float().neg().exp_().add_(1).reciprocal_().to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """`F.silu`."""
    if x.device.type != "cpu":
        return F.silu(x)
    if is_native(x.device, x.dtype):
        return _activate(x, "silu")
    wide = x.float()
    return wide.neg().exp_().add_(1).reciprocal_().mul_(wide).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """`F.gelu` with the tanh approximation."""
    if x.device.type != "cpu":
        return F.gelu(x, approximate="tanh")
    if is_native(x.device, x.dtype):
        return _activate(x, "gelu_pytorch_tanh")
    wide = x.float()
    inner = torch.addcmul(wide, wide * wide, wide, value=0.044715).mul_(math.sqrt(2 / math.pi))
    return inner.tanh_().add_(1).mul_(wide).mul_(0.5).to(x.dtype)


def _activate(x: Tensor, name: str) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])  # rows may have any stride
    out = torch.empty(rows.shape)
    load_library().activate(*arrays_of(rows, out), name)
    return out.view(x.shape)
