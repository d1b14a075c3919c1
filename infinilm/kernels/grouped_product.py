"""Products of up to 256 rows with a matrix of 8-bit floats or 4-bit integers, which is unpacked in registers.

A program reads the codes of a few outputs once, multiplies them by their scales, rounds them to the type of `x`, and
adds up products over the inputs in order. So the bits are those of `ordered_product` with the unpacked matrix, and do
not depend on the number of rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinilm.kernels.activation import gated
from infinilm.kernels.early_launch import launches_early, let_next_start, wait_for_inputs
from infinilm.kernels.norm import rms_norm
from infinilm.kernels.ordered_product import FEW_ROWS, Norm, Tile

MAX_ROWS = 256
"""For more rows it is faster to unpack the matrix first."""
# Rows that a program computes at once, whichever of these is enough, or several programs the last.
ROW_TILES = (FEW_ROWS, 32, 64, 128)
# The upper bits of a float32 whose lowest bits count from 2^23 on, and that number.
MAGIC_BITS = 0x4B000000
MAGIC = tl.constexpr(8388608.0)
MIDDLE = tl.constexpr(8)
# Where 8-bit floats are converted by instructions.
LEAST_FP8_CAPABILITY = (8, 9)


def can_unpack(device: torch.device, bits: int) -> bool:
    """Whether the device's kernels can unpack codes of so many bits."""
    return bits == 4 or device.type == "cpu" or torch.cuda.get_device_capability(device) >= LEAST_FP8_CAPABILITY


def grouped_product(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    *,
    norm: Norm | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    is_gated: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """`ordered_product` of `x` `[M, in]`, M at most `MAX_ROWS`, with the matrix of these codes, scales and zeros.

    Codes are 8-bit floats `[out, in]`, or uint8 `[out, in / 2]` with two 4-bit codes each, the first in the lower half;
    of those a line has a multiple of eight.
    Scales, and zeros for 4-bit codes, are `[out, groups]`; without zeros a code of 8 is 0.
    """
    num_rows, in_size = x.shape
    num_matrices = 2 if is_gated else 1
    out_size = len(codes) // num_matrices
    if norm is not None:
        x = rms_norm(x, *norm)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((num_rows, out_size), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    bits = 4 if codes.dtype == torch.uint8 else 8
    if bits == 4:
        codes = codes.view(torch.int32)
    tile = tile or choose_tile(num_rows, len(codes))
    group = in_size // scales.shape[1]
    # A tile's inputs have one scale for each output.
    inputs = triton.next_power_of_2(max(16, in_size)) if group == in_size else group & -group
    rows = next((size for size in ROW_TILES if num_rows <= size), ROW_TILES[-1])
    early = launches_early(x.device)
    _grouped_kernel[(triton.cdiv(out_size, tile.outputs // num_matrices), triton.cdiv(num_rows, rows))](
        x,
        codes,
        scales,
        zeros,
        bias,
        residual,
        out,
        num_rows,
        out_size,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        MAGIC_BITS,  # not known to the compiler, which would need two instructions where one will do
        IN=in_size,
        GROUP=group,
        BITS=bits,
        MATRICES=num_matrices,
        ROWS=rows,
        IS_ONE=num_rows == 1,
        LINES=tile.outputs,
        BLOCK_IN=min(tile.inputs, inputs),
        # Triton's interpreter has no products of bfloat16 matrices.
        WIDEN=x.device.type == "cpu",
        STAGES=tile.num_stages,
        EARLY=early,
        num_warps=tile.num_warps,
        launch_pdl=early,
    )
    return out


def choose_tile(num_rows: int, num_lines: int) -> Tile:
    """The tile for a number of rows and a matrix of so many lines, which leaves no registers on the stack."""
    if num_rows <= FEW_ROWS:
        return Tile(16, 512, 1, 6)
    if num_rows <= ROW_TILES[1] and num_lines <= 2048:
        return Tile(16, 256, 2, 4)
    return Tile(64, 128, 4, 6 if num_rows <= ROW_TILES[1] else 3)


@triton.jit(do_not_specialize=["num_rows", "magic_bits"])
def _grouped_kernel(
    x,
    codes,
    scales,
    zeros,  # or None
    bias,  # or None
    residual,  # or None
    out,
    num_rows,
    out_size,
    x_stride,
    residual_stride,
    magic_bits,
    IN: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MATRICES: tl.constexpr,  # 2: gate and up
    ROWS: tl.constexpr,
    IS_ONE: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    WIDEN: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (i, j): outputs i · `LINES` / `MATRICES` and on, of rows j · `ROWS` and on.

    An output takes one line of the tile, or two next to each other, its gate's and its up's.
    """
    let_next_start(EARLY)
    OUTPUTS: tl.constexpr = LINES // MATRICES
    GROUPS: tl.constexpr = IN // GROUP
    first = tl.program_id(0) * OUTPUTS
    lines = tl.arange(0, LINES)
    numbers = (first + lines // MATRICES) + lines % MATRICES * out_size
    has_line = first + lines // MATRICES < out_size
    codes += numbers.to(tl.int64)[:, None] * (IN // (8 if BITS == 4 else 1))
    wait_for_inputs(EARLY)
    inputs = tl.arange(0, BLOCK_IN)
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[None, :]
    is_row = rows < num_rows
    sums = tl.zeros([LINES, ROWS], tl.float32)
    for start in tl.range(0, IN, BLOCK_IN, num_stages=STAGES):
        places = start + inputs
        is_input = places < IN
        tile = _unpack(
            codes,
            scales,
            zeros,
            numbers * GROUPS + start // GROUP,
            has_line,
            start,
            magic_bits,
            IN,
            BITS,
            LINES,
            BLOCK_IN,
        ).to(x.dtype.element_ty)
        if IS_ONE:  # all rows of the tile are the only one
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
        sums += tl.load(bias + numbers, mask=has_line, other=0.0).to(tl.float32)[:, None]
    result = sums.to(out.dtype.element_ty)
    if MATRICES == 2:
        gate, up = tl.split(tl.permute(tl.reshape(result, (OUTPUTS, 2, ROWS)), (0, 2, 1)))
        result = gated(gate, up)
    outputs = (first + tl.arange(0, OUTPUTS))[:, None]
    inside = is_row & (outputs < out_size)
    if residual is not None:
        kept = tl.load(residual + rows * residual_stride + outputs, mask=inside, other=0.0).to(tl.float32)
        result = (result.to(tl.float32) + kept).to(out.dtype.element_ty)
    tl.store(out + rows * out_size + outputs, result, mask=inside)


@triton.jit
def _unpack(
    codes,
    scales,
    zeros,  # or None
    groups,
    has_line,
    start,
    magic_bits,
    IN: tl.constexpr,
    BITS: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """Inputs `start` to `start + BLOCK_IN` of the lines that begin at `codes` `[LINES, 1]`, as float32."""
    IN_WORD: tl.constexpr = 8 if BITS == 4 else 1
    places = start // IN_WORD + tl.arange(0, BLOCK_IN // IN_WORD)
    is_inside = has_line[:, None]
    if IN % BLOCK_IN != 0:
        is_inside = is_inside & (places < IN // IN_WORD)[None, :]
    # They are evicted first: a matrix is not read again soon.
    loaded = tl.load(codes + places[None, :], mask=is_inside, other=0.0, eviction_policy="evict_first")
    scale = tl.load(scales + groups, mask=has_line, other=0.0).to(tl.float32)[:, None]
    if BITS == 8:
        values = loaded.to(tl.float32) * scale
    else:
        if zeros is None:
            zero = tl.full([LINES, 1], MIDDLE, tl.float32)
        else:
            zero = tl.load(zeros + groups, mask=has_line, other=0).to(tl.float32)[:, None]
        upper = loaded >> 16
        # By the bits of a code's place in its word: the highest is the first dimension after the words'.
        evens = tl.join(
            tl.join(_take(loaded, magic_bits, zero, scale, 0), _take(upper, magic_bits, zero, scale, 0)),
            tl.join(_take(loaded, magic_bits, zero, scale, 2), _take(upper, magic_bits, zero, scale, 2)),
        )
        odds = tl.join(
            tl.join(_take(loaded, magic_bits, zero, scale, 1), _take(upper, magic_bits, zero, scale, 1)),
            tl.join(_take(loaded, magic_bits, zero, scale, 3), _take(upper, magic_bits, zero, scale, 3)),
        )
        values = tl.reshape(tl.join(evens, odds), (LINES, BLOCK_IN))
    return values


@triton.jit
def _take(words, magic_bits, zero, scale, PLACE: tl.constexpr):
    """The values of the 4-bit codes at a place, 0 to 3, of int32s.

    A code is not moved: it becomes the lower bits of a float as it is, 16^PLACE times as large, and the scale that much
    smaller. All of it is exact but the last product, as without the factor.
    """
    FACTOR: tl.constexpr = 16**PLACE
    floats = ((words & (15 * FACTOR)) | magic_bits).to(tl.float32, bitcast=True)
    return (floats - (zero * FACTOR + MAGIC)) * (scale / FACTOR)
