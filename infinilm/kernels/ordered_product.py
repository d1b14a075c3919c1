"""Products of few rows with a matrix, with the same bits as the libraries' products of more rows.

A product of bfloat16 matrices has the same bits for every shape of tile and every number of rows, if matrix
instructions sum over the inputs in order (on Hopper; `executor/self_check.py` tests it). For more rows the libraries do
so if they are kept from splitting the inputs (`keep_order`). For few rows they often have no fast kernel that does.
This kernel uses narrow tiles instead: a program computes a few outputs for all rows, and reads their lines of the
matrix once. The lines are fetched into the L2 cache before the program waits for the previous kernel (`early_launch`).

`gemv` is faster for one row, but has other bits.
"""

import sys
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinilm.kernels.activation import add_bias, gated
from infinilm.kernels.early_launch import launches_early, let_next_start, wait_for_inputs
from infinilm.kernels.norm import Norm, rms_norm

# Up to this many rows the libraries have no fast kernel that sums in order.
MAX_ROWS = 31
# With a matrix of few lines they sometimes have none up to this many rows.
FEW_LINES, MAX_ROWS_OF_FEW = 2048, 127
# With a large matrix of many lines they lack one only for a single row.
MANY_LINES, MANY_NUMBERS = 6144, 16 << 20
# Inputs of a line that are fetched ahead. The L2 cache can't hold all inputs of large matrices.
FETCHED = tl.constexpr(2048)
# Columns of the smallest matrix instruction.
FEW_ROWS = 8


class Tile(NamedTuple):
    """A program computes `outputs` outputs of `rows` rows, from `inputs` inputs at a time."""

    outputs: int
    inputs: int
    num_warps: int
    num_stages: int
    rows: int = 32


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
    """`x` `[M, in]`, normed, times `weight` `[out, in]`, plus `bias` `[out]`, plus `residual` `[M, out]`: `[M, out]`.

    If `is_gated`, `weight` is `[2 * out, in]`, the gate's rows first, and the result is
    `silu_mul` of the product. The norm, the product with its bias, and the sum with the residual are each rounded.
    Pass `tile` only to measure others than `choose_tile`'s.
    """
    num_rows, in_size = x.shape
    num_matrices = 2 if is_gated else 1
    out_size = len(weight) // num_matrices
    if norm is not None:
        x = rms_norm(x, *norm)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((num_rows, out_size), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    tile = tile or choose_tile(num_rows, len(weight), weight.element_size())
    early = launches_early(x.device)
    _product_kernel[(triton.cdiv(out_size, tile.outputs // num_matrices), triton.cdiv(num_rows, tile.rows))](
        x,
        weight,
        bias,
        residual,
        out,
        num_rows,
        out_size,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        IN=in_size,
        WEIGHT_STRIDE=weight.stride(0),
        MATRICES=num_matrices,
        ROWS=tile.rows,
        IS_ONE=num_rows == 1,
        LINES=tile.outputs,
        BLOCK_IN=min(tile.inputs, triton.next_power_of_2(max(16, in_size))),
        # Triton's interpreter has no products of bfloat16 matrices.
        WIDEN=x.device.type == "cpu",
        STAGES=tile.num_stages,
        EARLY=early,
        num_warps=tile.num_warps,
        launch_pdl=early,
    )
    return out


def max_rows(num_lines: int, num_inputs: int, dtype: torch.dtype) -> int:
    """The most rows for which this kernel is faster, for a matrix of that shape, than a library that sums in order.

    For float32, which some routers have, no library's order is known, so there is no limit.
    """
    if dtype == torch.float32 and num_lines <= FEW_LINES:
        return sys.maxsize
    if num_lines >= MANY_LINES and num_lines * num_inputs >= MANY_NUMBERS:
        return 1
    return MAX_ROWS_OF_FEW if num_lines <= FEW_LINES else MAX_ROWS


def keep_order() -> None:
    """Keep torch's products in this process from splitting the inputs, as they do for some numbers of rows."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)


def choose_tile(num_rows: int, num_lines: int, itemsize: int) -> Tile:
    """The tile for a number of rows and of lines of a matrix.

    Tiles are narrow, so that there are programs for most of the 132 multiprocessors of an H200, and have many bytes in
    flight. Two programs of six stages fit on a multiprocessor, or three with fewer bytes, so that all run at once.
    """
    if num_lines > FEW_LINES and 1 < num_rows <= 16:  # wider tiles: all programs read all rows
        tile = Tile(32, 512, 2, 3, FEW_ROWS) if num_rows <= FEW_ROWS else Tile(64, 256, 4, 4, 16)
    elif num_rows <= FEW_ROWS:
        fits_three = 2 * 132 < triton.cdiv(num_lines, 16) <= 3 * 132
        tile = Tile(16, 256, 1, 8, FEW_ROWS) if fits_three else Tile(16, 512, 1, 6, FEW_ROWS)
    elif num_rows > MAX_ROWS:
        tile = Tile(64, 128, 4, 4)
    elif num_lines <= FEW_LINES:
        tile = Tile(16, 512, 2, 4)
    else:
        tile = Tile(64, 128, 4, 6)
    return tile._replace(inputs=tile.inputs * 2 // itemsize)


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    x,
    weight,
    bias,  # or None
    residual,  # or None
    out,
    num_rows,
    out_size,
    x_stride,
    residual_stride,
    IN: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    MATRICES: tl.constexpr,  # 2: gate and up
    ROWS: tl.constexpr,
    IS_ONE: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    WIDEN: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (i, j): outputs from i · `LINES` / `MATRICES` on, of rows from j · `ROWS` on.

    An output takes one line of the tile, or two adjacent lines, for its gate and its up.
    """
    let_next_start(EARLY)
    OUTPUTS: tl.constexpr = LINES // MATRICES
    first = tl.program_id(0) * OUTPUTS
    lines = tl.arange(0, LINES)
    numbers = (first + lines // MATRICES) + lines % MATRICES * out_size
    has_line = first + lines // MATRICES < out_size
    weight += numbers.to(tl.int64)[:, None] * WEIGHT_STRIDE
    if EARLY and IN % 256 == 0 and WEIGHT_STRIDE % 8 == 0 and weight.dtype.element_ty.primitive_bitwidth == 16:
        _fetch_lines(weight, has_line, FETCHED if IN > FETCHED else IN, LINES)
    wait_for_inputs(EARLY)
    inputs = tl.arange(0, BLOCK_IN)
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[None, :]
    is_row = rows < num_rows
    outputs = (first + tl.arange(0, OUTPUTS))[:, None]
    inside = is_row & (outputs < out_size)
    if residual is not None:
        kept = tl.load(residual + rows * residual_stride + outputs, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        added = tl.load(bias + numbers, mask=has_line, other=0.0).to(tl.float32)[:, None]
    sums = tl.zeros([LINES, ROWS], tl.float32)
    for start in tl.range(0, IN, BLOCK_IN, num_stages=STAGES):
        places = start + inputs
        is_input, is_weight = places < IN, has_line[:, None]
        if IN % BLOCK_IN != 0:
            is_weight = is_weight & is_input[None, :]
        # Weights are evicted first, because a matrix is not read again soon.
        tile = tl.load(weight + places[None, :], mask=is_weight, other=0.0, eviction_policy="evict_first")
        if IS_ONE:  # all rows of the tile repeat the only row
            values = tl.load(x + places, mask=is_input, other=0.0)
            values = tl.broadcast_to(values[:, None], (BLOCK_IN, ROWS))
        else:
            is_value = tl.trans(is_row)
            if IN % BLOCK_IN != 0:
                is_value = is_value & is_input[None, :]
            values = tl.load(x + tl.trans(rows) * x_stride + places[None, :], mask=is_value, other=0.0).trans()
        if WIDEN:
            values, tile = values.to(tl.float32), tile.to(tl.float32)
        sums = tl.dot(tile, values, sums, input_precision="ieee")

    if bias is not None:
        sums = add_bias(sums, added)
    result = sums.to(out.dtype.element_ty)
    if MATRICES == 2:
        gate, up = tl.split(tl.permute(tl.reshape(result, (OUTPUTS, 2, ROWS)), (0, 2, 1)))
        result = gated(gate, up)
    if residual is not None:
        result = (result.to(tl.float32) + kept).to(out.dtype.element_ty)
    tl.store(out + rows * out_size + outputs, result, mask=inside)


@triton.jit
def _fetch_lines(lines, has_line, IN: tl.constexpr, LINES: tl.constexpr):
    """Prefetch the `lines` `[LINES, 1]` of 16-bit numbers into the L2 cache; each thread requests a part of a line."""
    PARTS: tl.constexpr = 32 // LINES if LINES < 32 else 1
    PART: tl.constexpr = IN // PARTS
    parts = lines + tl.arange(0, PARTS)[None, :] * PART
    sizes = tl.where(has_line[:, None], PART * 2, 0) + tl.zeros([LINES, PARTS], tl.int32)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [parts, sizes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
