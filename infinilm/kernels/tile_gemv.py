"""The product of a single row with a quantised matrix in tiles, for decoding one stream.

It computes the same as `tile_product`, in another order. With one row, matrix instructions are mostly idle, and wait
for each other. Here codes become float32 and are multiplied and added on the CUDA cores, as in `gemv`. A program
computes all inputs of some lines. It loads the first codes while the previous kernel still runs (`early_launch`).

A code is not converted: its bits are put into the bits of 2^23, which takes two instructions at most. The excess is
subtracted with the sum of the inputs, which groups with a minimum need anyway. Sums lose up to 9 of 24 bits that way;
16-bit outputs have 8 or 11.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinilm.kernels.activation import gated
from infinilm.kernels.early_launch import launches_early, let_next_start, wait_for_inputs
from infinilm.kernels.norm import Norm, rms_norm
from infinilm.kernels.tiles import TiledMatrix, TileFormat


class Tile(NamedTuple):
    """A program computes `lines` lines of each matrix, and loads `chunks` chunks of inputs at a time."""

    lines: int
    chunks: int
    num_warps: int


def can_multiply_one(format: TileFormat, dtype: torch.dtype) -> bool:
    """Whether the kernel supports a format and a type."""
    return not format.is_float and format.group > 0 and dtype.itemsize == 2


def choose_tile(num_chunks: int, num_matrices: int) -> Tile:
    """The tile for a matrix, or two that are read together, with `num_chunks` chunks of inputs."""
    chunks, num_warps = (32, 16) if num_matrices == 1 else (8, 8)
    chunks = min(chunks, triton.next_power_of_2(num_chunks))
    return Tile(16, chunks, min(num_warps, chunks))


def tile_gemv(
    x: Tensor,
    matrix: TiledMatrix,
    *,
    norm: Norm | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    is_gated: bool = False,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """The same as `tile_product`, for `x` `[1, in]`."""
    num_matrices = 2 if is_gated else 1
    out_size = matrix.lines // num_matrices
    if norm is not None:
        x = rms_norm(x, *norm)
    x = x.contiguous()
    if out is None:
        out = torch.empty((1, out_size), dtype=x.dtype, device=x.device)
    format = matrix.format
    tile = tile or choose_tile(matrix.inputs // format.chunk, num_matrices)
    early = launches_early(x.device)
    _gemv_kernel[(triton.cdiv(out_size, tile.lines),)](
        x.view(torch.int32),
        matrix.codes,
        matrix.scales,
        matrix.zeros,
        matrix.factors,
        bias,
        residual,
        out,
        out_size,
        matrix.scales.stride(0),
        0x4B000000,
        IN=matrix.inputs,
        GROUP=format.group,
        BITS=format.bits,
        ZERO=format.zero,
        HAS_MINIMUMS=format.has_minimums,
        MATRICES=num_matrices,
        LINES=tile.lines,
        CHUNKS=tile.chunks,
        EARLY=early,
        num_warps=tile.num_warps,
        launch_pdl=early,
    )
    return out


@triton.jit(do_not_specialize=["large"])
def _gemv_kernel(
    x,  # pairs of numbers
    codes,
    scales,
    zeros,  # or None
    factors,  # or None
    bias,  # or None
    residual,  # or None
    out,
    out_size,
    num_lines,
    large,  # the bits of 2^23; a constant would take one more instruction per code
    IN: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    MATRICES: tl.constexpr,  # 2: gate and up
    LINES: tl.constexpr,
    CHUNKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program i: lines from i · `LINES` on.

    Tensors have one or more numbers per thread, in the order chunk, place (`LINES` / 2), lane. See `tiles`.
    """
    let_next_start(EARLY)
    CHUNK: tl.constexpr = 256 // BITS
    TOTAL: tl.constexpr = IN // CHUNK
    SIZE: tl.constexpr = CHUNKS * LINES * 2
    first = tl.program_id(0) * LINES
    tables = (codes, scales, zeros, factors)
    KIND: tl.constexpr = "zeros" if zeros is not None else "factors" if factors is not None else "plain"
    loaded = _load(tables, first, 0, num_lines, GROUP, CHUNK, TOTAL, HAS_MINIMUMS, LINES, SIZE)
    up_loaded = loaded
    if MATRICES == 2:
        up_loaded = _load(tables, first + out_size, 0, num_lines, GROUP, CHUNK, TOTAL, HAS_MINIMUMS, LINES, SIZE)
    wait_for_inputs(EARLY)
    low = tl.zeros([SIZE], tl.float32)
    high, up_low, up_high = low, low, low
    for chunk in range(0, TOTAL, CHUNKS):
        # Software pipelining: the next chunks' loads are in flight while the current chunks are multiplied.
        later = chunk + CHUNKS
        ahead = _load(tables, first, later, num_lines, GROUP, CHUNK, TOTAL, HAS_MINIMUMS, LINES, SIZE)
        up_ahead = ahead
        if MATRICES == 2:
            up_ahead = _load(tables, first + out_size, later, num_lines, GROUP, CHUNK, TOTAL, HAS_MINIMUMS, LINES, SIZE)
        inputs = _load_inputs(x, chunk, out.dtype.element_ty, BITS, TOTAL, LINES, SIZE)
        low, high = _added(low, high, loaded, inputs, chunk, large, KIND, GROUP, BITS, ZERO, HAS_MINIMUMS, LINES)
        if MATRICES == 2:
            up_low, up_high = _added(
                up_low, up_high, up_loaded, inputs, chunk, large, KIND, GROUP, BITS, ZERO, HAS_MINIMUMS, LINES
            )
        loaded, up_loaded = ahead, up_ahead
    numbers = tl.arange(0, LINES // 2)
    lines = first + numbers // 8 * 16 + numbers % 8
    _finish(low, up_low, lines, bias, residual, out, out_size, MATRICES, CHUNKS)
    _finish(high, up_high, lines + 8, bias, residual, out, out_size, MATRICES, CHUNKS)


@triton.jit
def _load(
    tables, first, chunk, num_lines, GROUP: tl.constexpr, CHUNK: tl.constexpr, TOTAL: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr, LINES: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Load the chunks from `chunk` on: a thread's four words; scales, zeros and factors of its two lines."""
    codes, scales, zeros, factors = tables
    # Bit operations instead of remainders: with remainders the compiler would give threads adjacent numbers, and would
    # have to exchange them.
    index = tl.arange(0, SIZE)
    own_chunk = index // (2 * LINES)
    there = _is_chunk(chunk, TOTAL, LINES, SIZE)
    start = ((first // 64).to(tl.int64) * TOTAL + chunk) * 512 + first % 64 * 8
    places = codes + start + (own_chunk * 512 + (index & (2 * LINES - 1)) * 4)
    words = tl.load(
        places[:, None] + tl.arange(0, 4)[None, :], mask=there[:, None], other=0, eviction_policy="evict_first"
    )
    even, odd = tl.split(tl.reshape(words, (SIZE, 2, 2)))
    place = index // 4 & (LINES // 2 - 1)
    lines = first + (place // 8 * 16 + (place & 7))
    group = (chunk + own_chunk) * CHUNK // GROUP
    found = ()
    if factors is not None:
        # A word has the scales of a chunk's groups.
        IN_WORD: tl.constexpr = 2 if HAS_MINIMUMS else 4
        found += (_of_lines(scales, group // IN_WORD, lines, num_lines, there),)  # type: ignore[assignment]
        found += (_of_lines(factors, group * GROUP // 256, lines, num_lines, there),)  # type: ignore[assignment]
    else:
        for part in tl.static_range(CHUNK // GROUP if GROUP < CHUNK else 1):
            found += (_of_lines(scales, group + part, lines, num_lines, there),)  # type: ignore[assignment]
            if zeros is not None:
                found += (_of_lines(zeros, group + part, lines, num_lines, there),)  # type: ignore[assignment]
    first_words, third_words = tl.split(even)
    second_words, fourth_words = tl.split(odd)
    return (first_words, second_words, third_words, fourth_words), found


@triton.jit
def _is_chunk(chunk, TOTAL: tl.constexpr, LINES: tl.constexpr, SIZE: tl.constexpr):
    """Which threads have a chunk. If the chunks at a time divide all chunks, either all threads or none."""
    index = tl.arange(0, SIZE)
    return chunk + index // (2 * LINES) * (TOTAL % (SIZE // (2 * LINES)) != 0) < TOTAL


@triton.jit
def _of_lines(table, row, lines, num_lines, there):
    """A row's numbers of `lines`, and of the lines 8 further on."""
    places = table + (row * num_lines + lines)
    return tl.load(places, mask=there, other=0), tl.load(places + 8, mask=there, other=0)


@triton.jit
def _load_inputs(
    x, chunk, dtype: tl.constexpr, BITS: tl.constexpr, TOTAL: tl.constexpr, LINES: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """The inputs of each word's codes: two, or four if a word has the codes of inputs that are eight apart."""
    index = tl.arange(0, SIZE)
    there = _is_chunk(chunk, TOTAL, LINES, SIZE)
    CHUNK_PAIRS: tl.constexpr = 128 // BITS
    places = x + chunk * CHUNK_PAIRS + ((index // (2 * LINES)) * CHUNK_PAIRS + (index & 3))
    inputs = ()
    for word in tl.static_range(4):
        own = places + word * (CHUNK_PAIRS // 4)
        near = _pair(tl.load(own, mask=there, other=0), dtype)
        if BITS == 4:
            near = near + _pair(tl.load(own + 4, mask=there, other=0), dtype)
        inputs += (near,)  # type: ignore[assignment]
    return inputs


@triton.jit
def _pair(words, dtype: tl.constexpr):
    """The two 16-bit floats in each word, as float32."""
    if dtype == tl.bfloat16:
        first = (words << 16).to(tl.float32, bitcast=True)
        second = (words & -65536).to(tl.float32, bitcast=True)
    else:
        first = (words & 0xFFFF).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        second = (words >> 16 & 0xFFFF).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return first, second


@triton.jit
def _added(
    low, high, loaded, inputs, chunk, large, KIND: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    ZERO: tl.constexpr, HAS_MINIMUMS: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """The sums of both halves of lines, plus the products of the loaded codes."""
    CHUNK: tl.constexpr = 256 // BITS
    WORDS: tl.constexpr = 4 * GROUP // CHUNK if GROUP < CHUNK else 4  # words of a group
    words, tables = loaded
    for part in tl.static_range(4 // WORDS):
        own, own_high, total, excess = _multiply(words, inputs, large, part * WORDS, WORDS, BITS, ZERO)
        group = part
        if KIND == "factors" and (2 if HAS_MINIMUMS else 4) > CHUNK // GROUP:  # groups per word of scales
            group += (chunk + tl.arange(0, low.shape[0]) // (2 * LINES)) * (CHUNK // GROUP)
        if KIND == "factors":
            scales, more = tables[0], tables[1]
        elif KIND == "zeros":
            scales, more = tables[2 * part], tables[2 * part + 1]
        else:
            scales, more = tables[part], tables[part]
        scale, minimum = _scale(scales[0], more[0], group, large, KIND, HAS_MINIMUMS)
        high_scale, high_minimum = _scale(scales[1], more[1], group, large, KIND, HAS_MINIMUMS)
        low += (own - excess) * scale
        high += (own_high - excess) * high_scale
        if HAS_MINIMUMS or KIND == "zeros":
            low += minimum * total
            high += high_minimum * total
    return low, high


@triton.jit
def _multiply(
    words, inputs, large, FIRST: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr
):  # fmt: skip
    """For some words: the products of both halves of lines, the sum of inputs, and the excess in the products.

    Codes become bits of a float32 between 2^23 and 2^24: with 4 bits, from bit 16 or 12 on, with 8 bits, from bit 8.
    """
    near, far, near_high, far_high = 0.0, 0.0, 0.0, 0.0
    near_total, far_total = 0.0, 0.0
    for index in tl.static_range(FIRST, FIRST + WORDS):
        word, own = words[index], inputs[index]
        near_total += own[0] + own[1]
        if BITS == 4:
            near += _bits(word << 16, large, 16, 4) * own[0]
            near += _bits(word, large, 16, 4) * own[1]
            far += _bits(word << 8, large, 12, 4) * own[2]
            far += _bits(word >> 8, large, 12, 4) * own[3]
            near_high += _bits(word << 8, large, 16, 4) * own[0]
            near_high += _bits(word >> 8, large, 16, 4) * own[1]
            far_high += _bits(word, large, 12, 4) * own[2]
            far_high += _bits(word >> 16, large, 12, 4) * own[3]
            far_total += own[2] + own[3]
        else:
            near += _bits(word << 8, large, 8, 8) * own[0]
            near += _bits(word >> 8, large, 8, 8) * own[1]
            near_high += _bits(word, large, 8, 8) * own[0]
            near_high += _bits(word >> 16, large, 8, 8) * own[1]
    if BITS == 4:  # in units of 2^-16
        total = near_total + far_total
        excess = near_total * (128.0 + ZERO) + far_total * (2048.0 + ZERO)
        low, high = (far * 16.0 + near) * 1.52587890625e-05, (far_high * 16.0 + near_high) * 1.52587890625e-05
    else:  # in units of 2^-8
        total = near_total
        excess = near_total * (32768.0 + ZERO)
        low, high = near * 0.00390625, near_high * 0.00390625
    return low, high, total, excess


@triton.jit
def _bits(words, large, PLACE: tl.constexpr, BITS: tl.constexpr):
    """2^23 plus the bits from `PLACE` on, which keep their places: float32."""
    return (words & (((1 << BITS) - 1) << PLACE) | large).to(tl.float32, bitcast=True)


@triton.jit
def _scale(scale, more, group, large, KIND: tl.constexpr, HAS_MINIMUMS: tl.constexpr):
    """The scales and minimums of groups. Without minimums, the second result is not used. `more` are zeros or
    factors."""
    minimum = scale
    if KIND == "zeros":
        minimum = -scale * (more & 15).to(tl.float32)
    elif KIND == "factors":
        if HAS_MINIMUMS:
            scale_factor, minimum_factor = _pair(more, tl.float16)
            scale = scale >> (group % 2 * 16)
            minimum = (_bits(scale >> 8, large, 0, 8) - 8388608.0) * minimum_factor
            scale = (_bits(scale, large, 0, 8) - 8388608.0) * scale_factor
        else:
            scale = (scale >> (group % 4 * 8)).to(tl.int8).to(tl.float32) * more
            minimum = scale
    elif HAS_MINIMUMS:
        scale, minimum = _pair(scale, tl.float16)
    return scale, minimum


@triton.jit
def _finish(sums, ups, lines, bias, residual, out, out_size, MATRICES: tl.constexpr, CHUNKS: tl.constexpr):
    """Write the outputs of `lines`."""
    inside = lines < out_size
    result = _over_threads(sums, CHUNKS)
    if bias is not None:
        result += tl.load(bias + lines, mask=inside, other=0.0).to(tl.float32)
    result = result.to(out.dtype.element_ty)
    if MATRICES == 2:
        result = gated(result, _over_threads(ups, CHUNKS).to(out.dtype.element_ty))
    if residual is not None:
        kept = tl.load(residual + lines, mask=inside, other=0.0).to(tl.float32)
        result = (result.to(tl.float32) + kept).to(out.dtype.element_ty)
    tl.store(out + lines, result, mask=inside)


@triton.jit
def _over_threads(sums, CHUNKS: tl.constexpr):
    """The sums of each line, over lanes and chunks."""
    by_lane = tl.reshape(sums, (CHUNKS, sums.shape[0] // CHUNKS // 4, 4))
    return tl.sum(tl.sum(by_lane, 2), 0)
