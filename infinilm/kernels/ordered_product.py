"""Products of up to 32 rows with a matrix, whose bits are those of the libraries' products of more rows.

A product of bfloat16 matrices has the same bits for every shape of tile and every number of rows, if it is summed over
the inputs in order by matrix instructions (measured on Hopper; `check_products` finds out). The libraries keep to that
for more rows if they are kept from splitting the inputs (`keep_order`). For few rows they have no fast way to; here
narrow tiles make up for it: a program computes a few outputs for all rows, and reads their lines of the matrix
once. Its lines are fetched into the L2 cache before it waits for the previous kernel (`early_launch`).

`gemv` is faster for one row, with other bits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinilm.kernels.activation import gated
from infinilm.kernels.early_launch import launches_early, let_next_start, wait_for_inputs
from infinilm.kernels.norm import NORM_WARPS, inverse_rms, is_norm_fused, rms_norm, scale_and_weigh

MAX_ROWS = 32

Norm = tuple[Tensor, float]
"""Weight `[in]` and epsilon of an RMS norm of the input."""


class Tile(NamedTuple):
    """A program computes `outputs` from `inputs` at a time."""

    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


def ordered_product(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Norm | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    is_gated: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """`x` `[M, in]`, normed, times `weight` `[out, in]`, plus `bias` `[out]` or `residual` `[M, out]`: `[M, out]`.

    M is at most `MAX_ROWS`. If `is_gated`, `weight` is `[2 * out, in]`, the gate's rows first, and the result is
    `silu_mul` of the product. `tile` is for measuring others than `choose_tile`'s.
    """
    num_rows, in_size = x.shape
    num_matrices = 2 if is_gated else 1
    out_size = len(weight) // num_matrices
    fuses = norm is not None and num_rows == 1 and is_norm_fused(in_size)
    if norm is not None and not fuses:
        x = rms_norm(x, *norm)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((num_rows, out_size), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    tile = tile or choose_tile(num_rows, len(weight), in_size, fuses=fuses)
    early = launches_early(x.device)
    norm_weight, eps = norm if norm is not None and fuses else (None, 0.0)
    _product_kernel[(triton.cdiv(out_size, tile.outputs // num_matrices),)](
        x,
        norm_weight,
        weight,
        bias,
        residual,
        out,
        num_rows,
        out_size,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        IN=in_size,
        WEIGHT_STRIDE=weight.stride(0),
        MATRICES=num_matrices,
        ROWS=16 if num_rows <= 16 else MAX_ROWS,
        LINES=tile.outputs,
        BLOCK_IN=min(tile.inputs, triton.next_power_of_2(max(16, in_size))),
        COLUMNS=triton.next_power_of_2(in_size),
        # Triton's interpreter has no products of bfloat16 matrices.
        WIDEN=x.device.type == "cpu",
        STAGES=tile.num_stages,
        EARLY=early,
        num_warps=tile.num_warps,
        launch_pdl=early,
    )
    return out


def keep_order() -> None:
    """Keep torch's products from splitting the inputs, in this process: an order of their own for some numbers of rows."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)


def choose_tile(num_rows: int, num_lines: int, in_size: int, *, fuses: bool) -> Tile:
    """The tile for a number of rows and a matrix of so many lines.

    Narrow, so that there are programs for most of the 132 multiprocessors of an H200, and with many bytes in flight.
    """
    if fuses:
        return Tile(32, 256, NORM_WARPS, 4)
    if num_lines <= 2048:
        return Tile(8, 512, 1, 4)
    return Tile(16, 512 if in_size % 512 == 0 else 256, 2, 4 if num_rows <= 16 else 3)


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    x,
    norm_weight,  # or None: no norm
    weight,
    bias,  # or None
    residual,  # or None
    out,
    num_rows,
    out_size,
    x_stride,
    residual_stride,
    eps,
    IN: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    MATRICES: tl.constexpr,  # 2: gate and up
    ROWS: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDEN: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program i: outputs i · `LINES` / `MATRICES` and on.

    An output takes one line of the tile, or two next to each other, its gate's and its up's.
    """
    let_next_start(EARLY)
    OUTPUTS: tl.constexpr = LINES // MATRICES
    first = tl.program_id(0) * OUTPUTS
    lines = tl.arange(0, LINES)
    numbers = (first + lines // MATRICES) + lines % MATRICES * out_size
    has_line = first + lines // MATRICES < out_size
    weight += numbers.to(tl.int64)[None, :] * WEIGHT_STRIDE
    if EARLY and IN % 64 == 0 and WEIGHT_STRIDE % 8 == 0:
        _fetch_lines(weight, has_line, IN, LINES)
    wait_for_inputs(EARLY)
    rows = tl.arange(0, ROWS)
    inputs = tl.arange(0, BLOCK_IN)
    if norm_weight is not None:  # of the only row, in the order of `rms_norm`
        columns = tl.arange(0, COLUMNS)[None, :]
        wide = tl.load(x + columns, mask=columns < IN, other=0.0).to(tl.float32)
        scale = inverse_rms(tl.sum(wide * wide, axis=1), IN, eps)[:, None]
    x += rows[:, None] * x_stride + inputs[None, :]
    weight += inputs[:, None]
    is_row = (rows < num_rows)[:, None]
    sums = tl.zeros([ROWS, LINES], tl.float32)
    for start in tl.range(0, IN, BLOCK_IN, num_stages=STAGES):
        is_value, is_weight = is_row, has_line[None, :]
        if IN % BLOCK_IN != 0:
            is_value = is_value & (start + inputs < IN)[None, :]
            is_weight = is_weight & (start + inputs < IN)[:, None]
        # They are evicted first: a matrix is not read again soon.
        tile = tl.load(weight + start, mask=is_weight, other=0.0, eviction_policy="evict_first")
        values = tl.load(x + start, mask=is_value, other=0.0)
        if norm_weight is not None:
            factor = tl.load(norm_weight + start + inputs, mask=start + inputs < IN, other=0.0)[None, :]
            values = scale_and_weigh(values.to(tl.float32), scale, factor, x.dtype.element_ty)
        if WIDEN:
            values, tile = values.to(tl.float32), tile.to(tl.float32)
        sums = tl.dot(values, tile, sums, input_precision="ieee")

    outputs = first + tl.arange(0, OUTPUTS)[None, :]
    inside = is_row & (outputs < out_size)
    if bias is not None:
        sums += tl.load(bias + numbers, mask=has_line, other=0.0).to(tl.float32)[None, :]
    if residual is not None:
        places = residual + rows[:, None] * residual_stride + outputs
        sums += tl.load(places, mask=inside, other=0.0).to(tl.float32)
    result = sums.to(out.dtype.element_ty)
    if MATRICES == 2:
        gate, up = tl.split(tl.reshape(result, (ROWS, OUTPUTS, 2)))
        result = gated(gate, up)
    tl.store(out + rows[:, None] * out_size + outputs, result, mask=inside)


@triton.jit
def _fetch_lines(lines, has_line, IN: tl.constexpr, LINES: tl.constexpr):
    """Let the L2 cache fetch the `lines` `[1, LINES]` of 16-bit numbers; each thread asks for a part of one."""
    PARTS: tl.constexpr = 32 // LINES if LINES < 32 and IN % 256 == 0 else 1
    PART: tl.constexpr = IN // PARTS
    parts = lines + tl.arange(0, PARTS)[:, None] * PART
    sizes = tl.where(has_line[None, :], PART * 2, 0) + tl.zeros([PARTS, LINES], tl.int32)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [parts, sizes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
