"""Products of a few rows with a matrix, for decoding one or a few streams.

Such a product takes as long as reading the matrix, if enough loads are in flight: to read 4.2 TB/s at 0.8 µs latency,
3.4 MB, or 26 KB on each of the 132 multiprocessors of an H200. So a program loads all its rows of the matrix, 16 bytes
per thread and load, before anything else. If it is launched early (`early_launch`), it does so while the previous
kernel still computes the input. With norm, activation and residual fused, a layer has four such kernels.

One row is multiplied and added in float32 on the CUDA cores. More rows are padded to 8 or 16 and multiplied on the
tensor cores, for which the matrix passes through shared memory. In both cases the order of additions depends on the
matrix alone: with 2 to `MAX_ROWS` rows a row's result does not depend on their number. A single row has another order.

Sums are float32; bias and residual are added before the single rounding to the type of the input. A fused norm or
activation is rounded like its separate kernel (`norm`, `activation`).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from infinilm.errors import InvalidValueError
from infinilm.kernels.activation import gated, silu_mul_torch
from infinilm.kernels.early_launch import launches_early, let_next_start, loaded_ahead, wait_for_inputs
from infinilm.kernels.norm import Norm, inverse_rms, rms_norm, rms_norm_torch, scale_and_weigh

MAX_ROWS = 16

# Bytes of a matrix that a warp reads with one load, 16 of them per thread.
_WARP_BYTES = 512
# Bytes of a program's tile. It has at least 4 lines, which share the inputs' loads and norm.
_TILE_BYTES = 16384
_MIN_LINES = 4
# Two programs for almost every one of 132 multiprocessors. Matrices with few rows get smaller tiles.
_MIN_PROGRAMS = 256
_MAX_WARPS = 16
# A larger matrix has so many programs that a norm in each of them takes longer than a separate kernel.
_NORMED_BYTES = 16 << 20
# The least lines that the tensor cores take.
_DOT_LINES = 16


class Tile(NamedTuple):
    """How a product is split: a program computes `block_out` outputs from `block_in` inputs at a time."""

    block_out: int
    block_in: int
    num_warps: int
    padded_rows: int = 1  # 1: on the CUDA cores; 8 or 16: on the tensor cores


def gemv(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Norm | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    is_gated: bool = False,
    scales: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """`x` `[M, in]`, normed, times `weight` `[out, in]`, plus `bias` `[out]` and `residual` `[M, out]`: `[M, out]`.

    M is at most `MAX_ROWS`. If `is_gated`, `weight` is `[2 * out, in]`, the gate's rows first, and the result is
    `silu_mul` of the product. It is contiguous. With `scales` float32, one for each row of the weight, `weight` is
    uint8: the bits of 8-bit floats (e4m3), for a single row. Pass `tile` only to measure others than `choose_tile`'s.
    """
    num_rows, in_size = x.shape
    num_matrices = 2 if is_gated else 1
    out_size = len(weight) // num_matrices
    tile = tile or choose_tile(num_rows, out_size, in_size, weight.element_size(), num_matrices)
    if num_rows > tile.padded_rows:
        raise InvalidValueError(f"x has {num_rows} rows; multiply more than {tile.padded_rows} with torch.mm")
    if norm is not None and (scales is not None or weight.nbytes > _NORMED_BYTES):
        x, norm = rms_norm(x, *norm), None  # with 8-bit floats programs are busy with unpacking
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((num_rows, out_size), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    early = launches_early(x.device)
    norm_weight, eps = norm or (None, 0.0)
    _gemv_kernel[(triton.cdiv(out_size, tile.block_out),)](
        x,
        norm_weight,
        weight,
        scales,
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
        ROWS=tile.padded_rows,
        BLOCK_OUT=tile.block_out,
        STEP=tile.block_in,
        # One row is summed over all warps at once. On the tensor cores each warp has its own sums.
        SPLITS=1 if tile.padded_rows == 1 else tile.num_warps,
        STAGES=3,
        # Triton's interpreter has no products of bfloat16 matrices.
        WIDEN=x.device.type == "cpu",
        EARLY=early,
        num_warps=tile.num_warps,
        launch_pdl=early,
    )
    return out


def gemv_torch(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Norm | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    is_gated: bool = False,
) -> Tensor:
    x = x if norm is None else rms_norm_torch(x, *norm)
    wide = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    product = (wide if residual is None else wide + residual).to(x.dtype)
    return silu_mul_torch(product) if is_gated else product


def choose_tile(rows: int, out_size: int, in_size: int, itemsize: int, num_matrices: int = 1) -> Tile:
    """The tile for a number of rows and a matrix, or two matrices that are read together.

    It has all inputs if 16 warps can hold them with one load per thread, so that all loads are in flight from the
    start. Longer rows are read in steps, with two of them in flight.
    """
    warp_in = _WARP_BYTES // itemsize
    if rows > 1:
        block_in = (8 if 4 * warp_in < in_size <= 8 * warp_in else 4) * warp_in
        return Tile(_DOT_LINES // num_matrices, block_in, num_warps=8, padded_rows=8 if rows <= 8 else MAX_ROWS)
    block_in = triton.next_power_of_2(in_size)
    if itemsize == 1:  # unpacking takes registers
        block_in, block_out, num_warps = block_in if block_in <= 8 * warp_in else 4 * warp_in, _MIN_LINES, 4
    else:
        if block_in > _MAX_WARPS * warp_in:
            block_in = 8 * warp_in
        block_out = max(_MIN_LINES, _TILE_BYTES // (block_in * itemsize))
        num_warps = max(4, block_in // warp_in)
    block_out //= num_matrices
    while block_out > 1 and triton.cdiv(out_size, block_out) < _MIN_PROGRAMS:
        block_out //= 2
    return Tile(block_out, block_in, num_warps)


@triton.jit(do_not_specialize=["num_rows"])
def _gemv_kernel(
    x,
    norm_weight,  # or None: no norm
    weight,
    scales,  # of 8-bit floats; or None
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
    BLOCK_OUT: tl.constexpr,
    STEP: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    WIDEN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program i: outputs from i · `BLOCK_OUT` on.

    An output takes one line of the tile, or two adjacent lines, for its gate and its up. The dimensions are
    `[SPLITS, LINES or ROWS, BLOCK_IN]`: the inputs of a step are split over the first and the last.
    """
    let_next_start(EARLY)
    AHEAD: tl.constexpr = EARLY and IN % 16 == 0
    LINES: tl.constexpr = BLOCK_OUT * MATRICES
    BLOCK_IN: tl.constexpr = STEP // SPLITS
    first = tl.program_id(0).to(tl.int64) * BLOCK_OUT
    lines = tl.arange(0, LINES)[None, :, None]
    inputs = (tl.arange(0, SPLITS)[:, None] * BLOCK_IN + tl.arange(0, BLOCK_IN)[None, :])[:, None, :]
    has_line = first + lines // MATRICES < out_size
    weight += first * WEIGHT_STRIDE + (lines % MATRICES).to(tl.int64) * out_size * WEIGHT_STRIDE
    weight += lines // MATRICES * WEIGHT_STRIDE + inputs
    outputs = first + tl.arange(0, BLOCK_OUT)[:, None]
    rows = tl.arange(0, ROWS)[None, :]
    inside = (outputs < out_size) & (rows < num_rows)

    # Weights are loaded before the wait. They are evicted first, because a matrix is not read again soon.
    tile = tl.load(weight, mask=has_line & (inputs < IN), other=0, eviction_policy="evict_first")
    if norm_weight is not None:
        factor = tl.load(norm_weight + inputs, mask=inputs < IN, other=0.0)
    if bias is not None:
        added = tl.load(bias + outputs, mask=outputs < out_size, other=0.0)
    wait_for_inputs(EARLY)
    x += rows[:, :, None] * x_stride + inputs
    has_row = rows[:, :, None] < num_rows
    values = tl.load(x, mask=has_row & (inputs < IN), other=0.0)
    if residual is not None:
        kept = tl.load(residual + rows * residual_stride + outputs, mask=inside, other=0.0).to(tl.float32)
    if norm_weight is not None:
        squares = _squares(values)
        for start in range(STEP, IN, STEP):
            squares += _squares(tl.load(x + start, mask=has_row & (start + inputs < IN), other=0.0))
        scale = inverse_rms(tl.sum(squares, axis=0), IN, eps)[None, :, None]
        values = scale_and_weigh(values.to(tl.float32), scale, loaded_ahead(factor, AHEAD), x.dtype.element_ty)

    sums = _products(loaded_ahead(tile, AHEAD), values, ROWS, WIDEN)
    for start in tl.range(STEP, IN, STEP, num_stages=STAGES):
        ahead = start + inputs < IN
        tile = tl.load(weight + start, mask=has_line & ahead, other=0, eviction_policy="evict_first")
        values = tl.load(x + start, mask=has_row & ahead, other=0.0)
        if norm_weight is not None:
            factor = tl.load(norm_weight + start + inputs, mask=ahead, other=0.0)
            values = scale_and_weigh(values.to(tl.float32), scale, factor, x.dtype.element_ty)
        sums += _products(tile, values, ROWS, WIDEN)

    if ROWS == 1:
        sums = tl.sum(sums, axis=2, keep_dims=True)
    result = tl.sum(sums, axis=0)  # [LINES, ROWS]
    if scales is not None:
        own = tl.arange(0, LINES)
        places = first + own // MATRICES + (own % MATRICES).to(tl.int64) * out_size
        result *= tl.load(scales + places, mask=first + own // MATRICES < out_size, other=0.0)[:, None]
    if bias is not None:
        result += loaded_ahead(added, AHEAD and BLOCK_OUT > 1).to(tl.float32)  # needs pairs
    if residual is not None:
        result += kept
    result = result.to(out.dtype.element_ty)
    if MATRICES == 2:
        gate, up = tl.split(tl.permute(tl.reshape(result, (BLOCK_OUT, 2, ROWS)), (0, 2, 1)))
        result = gated(gate, up)
    tl.store(out + rows * out_size + outputs, result, mask=inside)


@triton.jit
def _squares(values):
    wide = values.to(tl.float32)
    return tl.sum(wide * wide, axis=2)


@triton.jit
def _products(weights, values, ROWS: tl.constexpr, WIDEN: tl.constexpr):
    """The products of `weights` and `values`. With one row they are not yet summed over the last dimension."""
    if weights.dtype == tl.uint8:
        weights = weights.to(tl.float8e4nv, bitcast=True)
    if ROWS == 1:
        products = weights.to(tl.float32) * values.to(tl.float32)
    else:
        if WIDEN:
            weights, values = weights.to(tl.float32), values.to(tl.float32)
        products = tl.dot(weights, tl.permute(values, (0, 2, 1)), input_precision="ieee")
    return products
