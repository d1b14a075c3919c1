"""Products of many rows, rounded to 8-bit floats, with matrices of 8-bit floats: twice as fast as 16-bit ones."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinilm.kernels.tile_product import untile
from infinilm.kernels.tiles import TiledMatrix

LARGEST = 448.0


def rounded_product(x: Tensor, matrix: TiledMatrix, bias: Tensor | None = None) -> Tensor:
    """`x` `[M, in]`, rounded, times `matrix` `[out, in]`, whose lines have one scale each: `[M, out]`."""
    rounded, scales = round_rows(x)
    line_scales = matrix.scales[:, : matrix.lines]
    weight = untile(matrix, torch.float8_e4m3fn)
    product = torch._scaled_mm(rounded, weight.t(), scale_a=scales, scale_b=line_scales, out_dtype=x.dtype)
    return product if bias is None else product.add_(bias)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows `[M, in]` as 8-bit floats (e4m3) and their scales, float32 `[M, 1]`. The largest number becomes the largest."""
    num_rows, size = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    rounded = torch.empty((num_rows, size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=x.device)
    if num_rows:
        _round_kernel[(num_rows,)](
            x, rounded, scales, size, x.stride(0), BLOCK=triton.next_power_of_2(size), num_warps=8
        )
    return rounded, scales


def round_rows_torch(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same by torch operations."""
    scales = x.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (x.float() / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


@triton.jit
def _round_kernel(x, rounded, scales, size, stride, BLOCK: tl.constexpr):
    """Program i: row i."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    values = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), axis=0), 1e-12) / 448.0
    tl.store(scales + row, scale)
    values = tl.minimum(tl.maximum(tl.fdiv(values, scale), -448.0), 448.0)
    tl.store(rounded + row * size + columns, values.to(tl.float8e4nv), mask=inside)
