"""Converts logits to float32. Torch's own conversion reaches half of the memory bandwidth."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


def to_float32(values: Tensor) -> Tensor:
    """A copy of `values` `[n, m]`, whose rows are contiguous, in float32."""
    out = torch.empty(values.shape, dtype=torch.float32, device=values.device)
    size = values.shape[1]
    _cast_kernel[len(values), triton.cdiv(size, _BLOCK)](values, values.stride(0), out, size, BLOCK=_BLOCK)
    return out


def to_float32_torch(values: Tensor) -> Tensor:
    return values.float()


@triton.jit
def _cast_kernel(values, stride, out, size, BLOCK: tl.constexpr):
    """Program (row, block of columns)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    tl.store(out + row * size + columns, tl.load(values + row * stride + columns, mask=inside).to(tl.float32), inside)
