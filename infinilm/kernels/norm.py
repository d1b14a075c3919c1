"""Root-mean-square normalisation."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinilm.kernels.early_launch import launches_early, let_next_start, loaded_ahead, wait_for_inputs

# The least numbers per program: one load of 16 bytes, the widest, per thread. Shorter rows share a program.
_MIN_TILE = 1024

# A thread of a long row has several loads in flight.
_WARPS = 4

Norm = tuple[Tensor, float]
"""Weight `[in]` and epsilon of an RMS norm of the input."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, is_zero_centred: bool = False) -> Tensor:
    """`x` `[T, n]` divided by its rows' root mean square, times `weight` `[n]`: `[T, n]`, contiguous.

    Computed in float32 and rounded to the input's type before it is multiplied by the weight. If the weight
    `is_zero_centred`, it is multiplied by 1 + weight and rounded once.
    """
    num_rows, size = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    columns = triton.next_power_of_2(size)
    rows = max(1, _MIN_TILE // columns)
    early = launches_early(x.device)
    _norm_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        weight,
        out,
        num_rows,
        x.stride(0),
        eps,
        SIZE=size,
        ROWS=rows,
        COLUMNS=columns,
        IS_ZERO_CENTRED=is_zero_centred,
        EARLY=early,
        num_warps=_WARPS,
        launch_pdl=early,
    )
    return out


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    x,
    weight,
    out,
    num_rows,
    x_stride,
    eps,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_ZERO_CENTRED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program i: rows i · `ROWS` and on."""
    let_next_start(EARLY)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    factor = tl.load(weight + columns, mask=columns < SIZE, other=0.0)
    wait_for_inputs(EARLY)
    inside = (rows < num_rows) & (columns < SIZE)
    wide = tl.load(x + rows * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = inverse_rms(tl.sum(wide * wide, axis=1), SIZE, eps)
    factor = loaded_ahead(factor, EARLY)
    if IS_ZERO_CENTRED:
        normed = (wide * scale[:, None] * (1.0 + factor.to(tl.float32))).to(out.dtype.element_ty)
    else:
        normed = scale_and_weigh(wide, scale[:, None], factor, out.dtype.element_ty)
    tl.store(out + rows * SIZE + columns, normed, mask=inside)


@triton.jit
def inverse_rms(square_sum, SIZE: tl.constexpr, eps):
    """The factor of rows whose `SIZE` numbers have these sums of squares."""
    return tl.rsqrt(tl.fma(square_sum, 1.0 / SIZE, eps))


@triton.jit
def scale_and_weigh(wide, scale, factor, DTYPE: tl.constexpr):
    """`wide` float32 times `scale`, rounded, times the norm's weight `factor`, rounded: `DTYPE`."""
    return ((wide * scale).to(DTYPE).to(tl.float32) * factor.to(tl.float32)).to(DTYPE)
