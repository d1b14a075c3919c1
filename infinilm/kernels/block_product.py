"""Products of up to 256 rows with a matrix in one of GGML's formats, and that matrix unpacked.

As in `grouped_product`, a program unpacks the codes of a few outputs in registers, rounds their values to the type of
`x`, and adds up products over the inputs in order. Values before the rounding are those of the format bit for bit: a
code times its scale is exact in float32. So bits are those of a product with the unpacked matrix, whatever the rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinilm.kernels.activation import gated
from infinilm.kernels.early_launch import launches_early, let_next_start, wait_for_inputs
from infinilm.kernels.grouped_product import MAGIC, MAGIC_BITS, ROW_TILES
from infinilm.kernels.norm import rms_norm
from infinilm.kernels.ordered_product import FEW_ROWS, Norm, Tile
from infinilm.kernels.packed_blocks import PackedBlocks

# Columns that share a factor, in formats with factors.
FACTOR_COLUMNS = tl.constexpr(256)
UNPACK_TILE = Tile(16, 256, 4, 1)


def block_product(
    x: Tensor,
    matrix: PackedBlocks,
    *,
    norm: Norm | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    is_gated: bool = False,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """`ordered_product` of `x` `[M, in]`, M at most `MAX_ROWS`, with the matrix; `out` may be columns of a larger."""
    num_rows = len(x)
    num_lines = len(matrix.codes)
    num_matrices = 2 if is_gated else 1
    out_size = num_lines // num_matrices
    if norm is not None:
        x = rms_norm(x, *norm)
    x = x if x.stride(1) == 1 else x.contiguous()
    if out is None:
        out = torch.empty((num_rows, out_size), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    tile = tile or choose_tile(num_rows, num_lines)
    rows = next((size for size in ROW_TILES if num_rows <= size), ROW_TILES[-1])
    early = launches_early(x.device)
    _block_kernel[(triton.cdiv(out_size, tile.outputs // num_matrices), triton.cdiv(num_rows, rows))](
        x,
        matrix.codes,
        matrix.scales,
        matrix.factors,
        bias,
        residual,
        out,
        num_rows,
        out_size,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        MAGIC_BITS,  # not known to the compiler, which would need two instructions where one will do
        MATRICES=num_matrices,
        ROWS=rows,
        IS_ONE=num_rows == 1,
        LINES=tile.outputs,
        BLOCK_IN=tile.inputs,
        # Triton's interpreter has no products of bfloat16 matrices.
        WIDEN=x.device.type == "cpu",
        STAGES=tile.num_stages,
        EARLY=early,
        num_warps=tile.num_warps,
        launch_pdl=early,
        **matrix.options(),
    )
    return out


def choose_tile(num_rows: int, num_lines: int) -> Tile:
    """The tile for a number of rows and a matrix of so many lines, which leaves no registers on the stack."""
    if num_rows <= FEW_ROWS:
        return Tile(16, 256, 1, 6)
    if num_rows <= ROW_TILES[1] and num_lines <= 2048:
        return Tile(16, 256, 2, 4)
    return Tile(64, 128, 4, 6 if num_rows <= ROW_TILES[1] else 3)


def unpack_blocks(matrix: PackedBlocks, dtype: torch.dtype) -> Tensor:
    """The matrix `[out, in]`, each value rounded once."""
    num_lines, tile = len(matrix.codes), UNPACK_TILE
    out = torch.empty((num_lines, matrix.in_size), dtype=dtype, device=matrix.codes.device)
    _unpack_kernel[(triton.cdiv(num_lines, tile.outputs), triton.cdiv(matrix.in_size, tile.inputs))](
        matrix.codes,
        matrix.scales,
        matrix.factors,
        out,
        num_lines,
        MAGIC_BITS,
        LINES=tile.outputs,
        BLOCK_IN=tile.inputs,
        num_warps=tile.num_warps,
        **matrix.options(),
    )
    return out


@triton.jit(do_not_specialize=["num_rows", "magic_bits"])
def _block_kernel(
    x,
    codes,
    scales,
    factors,  # or None
    bias,  # or None
    residual,  # or None
    out,
    num_rows,
    out_size,
    x_stride,
    residual_stride,
    out_stride,
    magic_bits,
    IN: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
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
    first = tl.program_id(0) * OUTPUTS
    lines = tl.arange(0, LINES)
    numbers = (first + lines // MATRICES) + lines % MATRICES * out_size
    has_line = first + lines // MATRICES < out_size
    wait_for_inputs(EARLY)
    inputs = tl.arange(0, BLOCK_IN)
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[None, :]
    is_row = rows < num_rows
    sums = tl.zeros([LINES, ROWS], tl.float32)
    for start in tl.range(0, IN, BLOCK_IN, num_stages=STAGES):
        places = start + inputs
        is_input = places < IN
        tile = unpack_tile(
            codes,
            scales,
            factors,
            numbers,
            has_line,
            start,
            magic_bits,
            IN,
            BITS,
            GROUP,
            MIDDLE,
            HAS_MINIMUMS,
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
    tl.store(out + rows * out_stride + outputs, result, mask=inside)


@triton.jit(do_not_specialize=["magic_bits"])
def _unpack_kernel(
    codes,
    scales,
    factors,  # or None
    out,
    num_lines,
    magic_bits,
    IN: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """Program (i, j): lines i · `LINES` and on, inputs j · `BLOCK_IN` and on."""
    numbers = tl.program_id(0) * LINES + tl.arange(0, LINES)
    start = tl.program_id(1) * BLOCK_IN
    has_line = numbers < num_lines
    tile = unpack_tile(
        codes,
        scales,
        factors,
        numbers,
        has_line,
        start,
        magic_bits,
        IN,
        BITS,
        GROUP,
        MIDDLE,
        HAS_MINIMUMS,
        LINES,
        BLOCK_IN,
    )
    places = start + tl.arange(0, BLOCK_IN)
    inside = has_line[:, None] & (places < IN)[None, :]
    tl.store(out + numbers.to(tl.int64)[:, None] * IN + places[None, :], tile.to(out.dtype.element_ty), mask=inside)


@triton.jit
def unpack_tile(
    codes,
    scales,
    factors,  # or None
    numbers,
    has_line,
    start,
    magic_bits,
    IN: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """Inputs `start` to `start + BLOCK_IN`, whole groups, of the lines of these `numbers` `[LINES]`, as float32."""
    WORDS: tl.constexpr = GROUP * BITS // 32  # of a group
    groups = start // GROUP + tl.arange(0, BLOCK_IN // GROUP)
    is_group = has_line[:, None]
    if IN % BLOCK_IN != 0:
        is_group = is_group & (groups < IN // GROUP)[None, :]
    lines = numbers.to(tl.int64)[:, None]
    words = (lines * (IN // GROUP) + groups[None, :])[:, :, None] * WORDS + tl.arange(0, WORDS)[None, None, :]
    # They are evicted first: a matrix is not read again soon.
    loaded = tl.load(codes + words, mask=is_group[:, :, None], other=0, eviction_policy="evict_first")
    scale, minimum = _pair(
        tl.load(scales + lines * (IN // GROUP) + groups[None, :], mask=is_group, other=0), HAS_MINIMUMS
    )
    if factors is not None:
        blocks = lines * (IN // FACTOR_COLUMNS) + (groups * GROUP // FACTOR_COLUMNS)[None, :]
        factor, minimum_factor = _pair(tl.load(factors + blocks, mask=is_group, other=0), HAS_MINIMUMS)
        scale, minimum = scale * factor, minimum * minimum_factor
    scale, minimum = scale[:, :, None], minimum[:, :, None]
    upper = loaded >> 16
    # By the bits of a code's place in its word: the highest is the first dimension after the words'.
    if BITS == 4:
        evens = tl.join(
            tl.join(
                _take(loaded, magic_bits, scale, minimum, 0, BITS, MIDDLE, HAS_MINIMUMS),
                _take(upper, magic_bits, scale, minimum, 0, BITS, MIDDLE, HAS_MINIMUMS),
            ),
            tl.join(
                _take(loaded, magic_bits, scale, minimum, 2, BITS, MIDDLE, HAS_MINIMUMS),
                _take(upper, magic_bits, scale, minimum, 2, BITS, MIDDLE, HAS_MINIMUMS),
            ),
        )
        odds = tl.join(
            tl.join(
                _take(loaded, magic_bits, scale, minimum, 1, BITS, MIDDLE, HAS_MINIMUMS),
                _take(upper, magic_bits, scale, minimum, 1, BITS, MIDDLE, HAS_MINIMUMS),
            ),
            tl.join(
                _take(loaded, magic_bits, scale, minimum, 3, BITS, MIDDLE, HAS_MINIMUMS),
                _take(upper, magic_bits, scale, minimum, 3, BITS, MIDDLE, HAS_MINIMUMS),
            ),
        )
    else:
        evens = tl.join(
            _take(loaded, magic_bits, scale, minimum, 0, BITS, MIDDLE, HAS_MINIMUMS),
            _take(upper, magic_bits, scale, minimum, 0, BITS, MIDDLE, HAS_MINIMUMS),
        )
        odds = tl.join(
            _take(loaded, magic_bits, scale, minimum, 1, BITS, MIDDLE, HAS_MINIMUMS),
            _take(upper, magic_bits, scale, minimum, 1, BITS, MIDDLE, HAS_MINIMUMS),
        )
    return tl.reshape(tl.join(evens, odds), (LINES, BLOCK_IN))


@triton.jit
def _pair(stored, HAS_MINIMUMS: tl.constexpr):
    """A scale and, in the upper half of a number if there is one, a minimum, as float32."""
    if not HAS_MINIMUMS:
        scale = stored.to(tl.float32)
        minimum = scale  # not used
    elif stored.dtype == tl.int16:
        scale, minimum = (stored & 255).to(tl.float32), ((stored >> 8) & 255).to(tl.float32)
    else:
        scale = stored.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        minimum = (stored >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, minimum


@triton.jit
def _take(
    words,
    magic_bits,
    scale,
    minimum,
    PLACE: tl.constexpr,
    BITS: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
):
    """The values of the codes at a place of the lower half of int32s.

    A code is not moved: it becomes the lower bits of a float as it is, so many times as large, and the scale that much
    smaller. All of it is exact but the last operation, as without the factor.
    """
    FACTOR: tl.constexpr = 1 << (BITS * PLACE)
    MASK: tl.constexpr = (1 << BITS) - 1
    floats = ((words & (MASK * FACTOR)) | magic_bits).to(tl.float32, bitcast=True) - (MAGIC + MIDDLE * FACTOR)
    if HAS_MINIMUMS:
        floats = tl.fma(floats, scale / FACTOR, minimum)
    else:
        floats *= scale / FACTOR
    return floats
