"""Products of rows, rounded to 8-bit floats, with matrices of 8-bit floats, computed by libraries.

They have twice the rate of 16-bit products. For many rows the library multiplies by the scales of rows and lines. For
fewer rows it is faster without them: one kernel scales the sums and also does the operations that follow.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinilm.kernels.activation import gated, silu_mul
from infinilm.kernels.early_launch import launches_early, let_next_start, wait_for_inputs
from infinilm.kernels.norm import Norm, inverse_rms, rms_norm_torch, scale_and_weigh

LARGEST = tl.constexpr(448.0)
"""The largest 8-bit float (e4m3)."""
LEAST_CAPABILITY = (8, 9)
SIZE_STEP = 16
"""The numbers of inputs and lines must be multiples of it."""
# The library multiplies by the scales from _SOME_ROWS on if there are more outputs than inputs, and above _MANY_ROWS
# always.
_SOME_ROWS, _MANY_ROWS = 64, 512
_FINISH_BLOCK = 1024


def rounded_product(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    *,
    norm: Norm | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    is_gated: bool = False,
) -> Tensor:
    """`x` `[M, in]`, normed and rounded, times 8-bit floats `codes` `[out, in]`, whose lines have `scales` `[out]`.

    The result is `[M, out]`. The other arguments are as in `gemv`.
    """
    rounded, row_scales = round_rows(x, norm)
    is_large = len(x) > _MANY_ROWS or (len(x) >= _SOME_ROWS and len(codes) > codes.shape[1])
    if is_large and x.dtype == torch.bfloat16:
        product = torch._scaled_mm(rounded, codes.t(), row_scales[:, None], scales[None, :], out_dtype=x.dtype)
        product = product if bias is None else product.add_(bias)
        product = silu_mul(product) if is_gated else product
        return product if residual is None else residual.add_(product)
    one = _one(x.device)
    sums = torch._scaled_mm(rounded, codes.t(), one, one, out_dtype=torch.float32)
    num_rows, out_size = len(x), len(codes) // (2 if is_gated else 1)
    out = torch.empty((num_rows, out_size), dtype=x.dtype, device=x.device)
    early = launches_early(x.device)
    _finish_kernel[(num_rows, triton.cdiv(out_size, _FINISH_BLOCK))](
        sums,
        row_scales,
        scales,
        bias,
        residual,
        out,
        out_size,
        0 if residual is None else residual.stride(0),
        IS_GATED=is_gated,
        BLOCK=_FINISH_BLOCK,
        EARLY=early,
        num_warps=4,
        launch_pdl=early,
    )
    return out


def round_rows(x: Tensor, norm: Norm | None = None) -> tuple[Tensor, Tensor]:
    """Rows `[M, in]`, normed, as 8-bit floats, and scales, float32 `[M]`. A row's largest number becomes `LARGEST`."""
    num_rows, size = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    rounded = torch.empty((num_rows, size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    early = launches_early(x.device)
    if num_rows:
        block = triton.next_power_of_2(size)
        norm_weight, eps = norm or (None, 0.0)
        _round_kernel[(num_rows,)](
            x,
            norm_weight,
            rounded,
            scales,
            x.stride(0),
            eps,
            SIZE=size,
            BLOCK=block,
            EARLY=early,
            num_warps=min(16, max(1, block // 512)),
            launch_pdl=early,
        )
    return rounded, scales


def round_rows_torch(x: Tensor, norm: Norm | None = None) -> tuple[Tensor, Tensor]:
    """The same by torch operations."""
    x = x if norm is None else rms_norm_torch(x, *norm)
    scales = x.float().abs().amax(1).clamp(min=1e-12) / LARGEST.value
    return (x.float() / scales[:, None]).to(torch.float8_e4m3fn), scales


@cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=device)


@triton.jit
def _round_kernel(
    x,
    norm_weight,  # or None: no norm
    rounded,
    scales,
    stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program i: row i."""
    let_next_start(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    if norm_weight is not None:
        factor = tl.load(norm_weight + columns, mask=inside, other=0.0)
    wait_for_inputs(EARLY)
    values = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    if norm_weight is not None:
        inverse = inverse_rms(tl.sum(values * values, axis=0), SIZE, eps)
        values = scale_and_weigh(values, inverse, factor, x.dtype.element_ty).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), axis=0), 1e-12) / LARGEST
    tl.store(scales + row, scale)
    values = tl.minimum(tl.maximum(tl.fdiv(values, scale), -LARGEST), LARGEST)
    tl.store(rounded + row * SIZE + columns, values.to(tl.float8e4nv), mask=inside)


@triton.jit
def _finish_kernel(
    sums,
    row_scales,
    scales,
    bias,  # or None
    residual,  # or None
    out,
    out_size,
    residual_stride,
    IS_GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (row, block): `BLOCK` outputs of a row."""
    let_next_start(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < out_size
    factors = tl.load(scales + columns, mask=inside, other=0.0)
    wait_for_inputs(EARLY)
    row_scale = tl.load(row_scales + row)
    MATRICES: tl.constexpr = 2 if IS_GATED else 1
    sums += row * out_size * MATRICES + columns
    result = tl.load(sums, mask=inside, other=0.0) * row_scale * factors
    if bias is not None:
        result += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    result = result.to(out.dtype.element_ty)
    if IS_GATED:
        factors = tl.load(scales + out_size + columns, mask=inside, other=0.0)
        up = tl.load(sums + out_size, mask=inside, other=0.0) * row_scale * factors
        if bias is not None:
            up += tl.load(bias + out_size + columns, mask=inside, other=0.0).to(tl.float32)
        result = gated(result, up.to(out.dtype.element_ty))
    if residual is not None:
        kept = tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
        result = (result.to(tl.float32) + kept).to(out.dtype.element_ty)
    tl.store(out + row * out_size + columns, result, mask=inside)
