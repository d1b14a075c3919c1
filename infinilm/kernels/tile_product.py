"""Products with quantised matrices, whose codes are unpacked in the registers of matrix instructions.

Codes are whole numbers or 8-bit floats, which 16-bit floats hold exactly. A program multiplies 64 lines or more with
some rows. It adds up the products with the codes of a group in order, and then the groups' sums times their scales in
order. Inputs may be split over several programs; the last one to end adds up their sums in order. So a row's bits
depend only on the number of splits, not on other rows.
"""

from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinilm.kernels.activation import add_bias, gated
from infinilm.kernels.early_launch import launches_early, let_next_start, wait_for_inputs
from infinilm.kernels.norm import Norm, rms_norm
from infinilm.kernels.tiles import TILE_LINES, TiledMatrix, TileFormat

MAX_ROWS = 256
"""For more rows it is faster to unpack the matrix first."""
# The number of programs that keep a device busy, by their rows; the most splits if `is_ordered`; and the number of rows
# above which a program computes all splits, one after the other.
_PROGRAMS, _ORDERED_SPLITS, _MANY_ROWS = {16: 500, 32: 300, 64: 200, 128: 180}, 8, 128
_LARGEST = max(_PROGRAMS)
# For more than 64 rows and 4-bit codes: rows and stages of a program, and how many of these fit on an H200 at once.
_FITTING = ((64, 4, 2 * 132), (64, 3, 3 * 132), (128, 3, 2 * 132))
# The preferred least share of them that a launch should have, and the share that is still acceptable.
_SHARES = 0.9, 0.7
_UNPACKED_INPUTS = 128
# The results of unpacking a word: bits of 16-bit floats.
FOUR, EIGHT = tl.constexpr((tl.int16,) * 4), tl.constexpr((tl.int16,) * 8)


class Tile(NamedTuple):
    """A program computes `lines` lines for `rows` rows, from `inputs` inputs at a time, for one split or all
    `in_turn`."""

    rows: int
    lines: int
    inputs: int
    splits: int
    in_turn: bool
    num_warps: int
    num_stages: int


def can_multiply(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels support a type on a device."""
    if device.type == "cpu":  # Triton's interpreter
        return True
    return dtype in (torch.bfloat16, torch.float16) and torch.cuda.get_device_capability(device) >= (8, 0)


def choose_tile(num_rows: int, num_lines: int, matrix: TiledMatrix, *, is_ordered: bool) -> Tile:
    """The tile for `num_rows` rows and `num_lines` lines of each matrix."""
    # Minimums double the registers.
    largest = 64 if is_ordered or matrix.format.has_minimums else 128
    rows = next((size for size in (16, 32, 64) if num_rows <= size), largest)
    inputs, unit = matrix.inputs, max(matrix.format.group, matrix.format.chunk, 128)
    # Inputs of a split: powers of 2, with which memory is read fastest, or half or a quarter of all inputs.
    sizes = sorted(
        size for size in {512, 1024, 2048, 4096, inputs // 2, inputs // 4} if size < inputs and inputs % size == 0
    )
    sizes = [*(size for size in sizes if size % unit == 0), inputs]
    if is_ordered:
        splits = next((inputs // size for size in sizes if inputs // size <= _ORDERED_SPLITS), 1)
        return Tile(rows, TILE_LINES, 128, splits, num_rows > _MANY_ROWS, 4, 3)
    if rows == 128 and matrix.format.bits == 4:
        return _fill(num_rows, num_lines, [inputs // size for size in sizes])
    programs = triton.cdiv(num_lines, TILE_LINES) * triton.cdiv(num_rows, rows)
    enough = [inputs // size for size in sizes if programs * inputs // size >= _PROGRAMS[rows]]
    return Tile(rows, TILE_LINES, 128, enough[-1] if enough else inputs // sizes[0], False, 4, 4 if rows <= 16 else 3)


def _fill(num_rows: int, num_lines: int, splits: list[int]) -> Tile:
    """A tile for which the launch has nearly as many programs as run at once; if no tile fits, the largest.

    For up to three times 64 rows small tiles are best. Tiles of 128 rows unpack the matrix half as often.
    """
    fitting = _FITTING if num_rows <= 3 * 64 else _FITTING[::-1]
    for share, (rows, stages, most) in product(_SHARES, fitting):
        programs = triton.cdiv(num_lines, TILE_LINES) * triton.cdiv(num_rows, rows)
        for count in splits:  # most splits first
            if share * most <= programs * count <= most:
                return Tile(rows, TILE_LINES, 128, count, False, 4, stages)
    return Tile(128, TILE_LINES, 128, 1, False, 4, 3)


def tile_product(
    x: Tensor,
    matrix: TiledMatrix,
    *,
    norm: Norm | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    is_gated: bool = False,
    is_ordered: bool = False,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """`x` `[M, in]`, normed, times `matrix` `[out, in]`, plus `bias` `[out]`, plus `residual` `[M, out]`: `[M, out]`.

    If `is_gated`, the matrix is `[2 * out, in]`, the gate's lines first, `out` a multiple of `TILE_LINES`, and the
    result is `silu_mul` of the product. The norm, the product with its bias, and the sum with the residual are each
    rounded. If `is_ordered`, bits are the same for all numbers of rows. `out` may be columns of a larger tensor.
    Pass `tile` only to measure others than `choose_tile`'s.
    """
    num_rows = len(x)
    num_matrices = 2 if is_gated else 1
    out_size = matrix.lines // num_matrices
    if norm is not None:
        x = rms_norm(x, *norm)
    x = x if x.stride(1) == 1 else x.contiguous()
    if out is None:
        out = torch.empty((num_rows, out_size), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    if tile is None and not is_ordered and _leaves_rest(num_rows, out_size, matrix):
        for part in (slice(_LARGEST), slice(_LARGEST, None)):
            own = None if residual is None else residual[part]
            tile_product(x[part], matrix, bias=bias, residual=own, is_gated=is_gated, out=out[part])
        return out
    tile = tile or choose_tile(num_rows, out_size, matrix, is_ordered=is_ordered)
    grid = (triton.cdiv(out_size, tile.lines), triton.cdiv(num_rows, tile.rows), 1 if tile.in_turn else tile.splits)
    partials = tickets = None
    if tile.splits > 1 and not tile.in_turn:
        size = grid[0] * grid[1] * tile.splits * tile.lines * tile.rows * num_matrices
        partials = torch.empty(size, dtype=torch.float32, device=x.device)
        tickets = _tickets(x.device)[: grid[0] * grid[1]]
    early = launches_early(x.device)
    _product_kernel[grid](
        x,
        matrix.codes,
        matrix.scales,
        matrix.zeros,
        matrix.factors,
        bias,
        residual,
        out,
        partials,
        tickets,
        num_rows,
        out_size,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        matrix.scales.stride(0),
        MATRICES=num_matrices,
        ROWS=tile.rows,
        LINES=tile.lines,
        SPLITS=tile.splits,
        IN_TURN=tile.in_turn,
        STEP=_step(matrix, tile.inputs, matrix.inputs // tile.splits),
        STAGES=tile.num_stages,
        EARLY=early,
        num_warps=tile.num_warps,
        launch_pdl=early,
        **_options(matrix, x.dtype),
    )
    return out


def _leaves_rest(num_rows: int, num_lines: int, matrix: TiledMatrix) -> bool:
    """Whether the rows beyond the largest tile are few enough for a separate launch with smaller tiles.

    Two launches take longer if one launch does not occupy the device.
    """
    is_large = num_lines >= _PROGRAMS[_LARGEST] * TILE_LINES
    has_largest = matrix.format.bits == 4 and not matrix.format.has_minimums
    return is_large and has_largest and _LARGEST < num_rows <= _LARGEST + 64


def untile(matrix: TiledMatrix, dtype: torch.dtype) -> Tensor:
    """The matrix `[lines, inputs]`, each value rounded once."""
    out = torch.empty((matrix.lines, matrix.inputs), dtype=dtype, device=matrix.codes.device)
    step = _step(matrix, _UNPACKED_INPUTS, matrix.inputs)
    _untile_kernel[(triton.cdiv(matrix.lines, TILE_LINES), matrix.inputs // step)](
        matrix.codes,
        matrix.scales,
        matrix.zeros,
        matrix.factors,
        out,
        matrix.lines,
        matrix.scales.stride(0),
        STEP=step,
        num_warps=4,
        **_options(matrix, dtype),
    )
    return out


def _step(matrix: TiledMatrix, most: int, inputs: int) -> int:
    """How many of `inputs` inputs a program takes at a time: one chunk, or several that divide the inputs and a
    group."""
    chunk, group = matrix.format.chunk, matrix.format.group or matrix.inputs
    steps = [chunk << times for times in range(5)]
    return max(step for step in steps if step == chunk or (step <= most and inputs % step == 0 and group % step == 0))


@cache
def _tickets(device: torch.device) -> Tensor:
    """Counters of the programs of a tile that have ended. The last program sets its counter to 0 again."""
    return torch.zeros(1 << 16, dtype=torch.int32, device=device)


def _options(matrix: TiledMatrix, dtype: torch.dtype) -> dict[str, Any]:
    """The kernels' compile-time arguments for a matrix."""
    format = matrix.format
    is_cpu = matrix.codes.device.type == "cpu"
    return {
        "IN": matrix.inputs,
        "GROUP": format.group or matrix.inputs,
        "BITS": format.bits,
        "IS_FLOAT": format.is_float,
        "ZERO": format.zero,
        "HAS_MINIMUMS": format.has_minimums,
        "UNPACK": None if is_cpu else _unpacking(format, dtype),  # Triton's interpreter has no instructions
        "OUTPUTS": "=h," * (8 if format.bits == 4 else 4) + ("r,r,r" if format.has_zeros else "r"),
    }


@cache
def _unpacking(format: TileFormat, dtype: torch.dtype) -> str:
    """Instructions that convert a word of codes to 16-bit floats: see `_unpack`.

    4-bit codes become the lowest bits of 128 or 1024, two at a time; then that number and the zero are subtracted.
    8-bit integers become the lowest bits of 2^23. The bits of 8-bit floats are moved to their places, and a product
    corrects the bias of the exponent. All operations are exact.
    """
    is_bfloat = dtype == torch.bfloat16
    kind = "bf16x2" if is_bfloat else "f16x2"
    if format.bits == 4:
        large, one = (0x4300, 0x3F80) if is_bfloat else (0x6400, 0x3C00)
        lines = [".reg .b32 s, v, large, one, zero;", f"mov.b32 large, {large * 0x10001};"]
        lines.append(f"mov.b32 one, {one * 0x10001};")
        if not format.has_zeros:
            lines.append(f"mov.b32 zero, {(large + format.zero + 0x8000) * 0x10001};")
        for place in range(4):
            zero = ("$9", "$10")[place // 2] if format.has_zeros else "zero"
            lines += [f"shr.b32 s, $8, {4 * place};"] if place else ["mov.b32 s, $8;"]
            lines += ["lop3.b32 v, s, 0x000f000f, large, 0xEA;", f"fma.rn.{kind} v, v, one, {zero};"]
            lines.append(f"mov.b32 {{${2 * place}, ${2 * place + 1}}}, v;")
    elif format.is_float:
        shift, mask, factor = (4, 0x07F0, 0x7B80) if is_bfloat else (1, 0x3F80, 0x5C00)
        lines = [".reg .b32 s, u, v, factor, zero;", f"mov.b32 factor, {factor * 0x10001};"]
        lines.append(f"mov.b32 zero, {0x8000 * 0x10001};")  # -0: adding it changes nothing
        for place in range(2):
            lines += ["shl.b32 s, $4, 8;"] if place == 0 else ["mov.b32 s, $4;"]
            lines += [f"shr.b32 u, s, {shift};", f"and.b32 u, u, {mask * 0x10001};"]
            lines += ["lop3.b32 v, s, 0x80008000, u, 0xEA;", f"fma.rn.{kind} v, v, factor, zero;"]
            lines.append(f"mov.b32 {{${2 * place}, ${2 * place + 1}}}, v;")
    else:
        lines = [".reg .b32 u, v;", ".reg .f32 a, b;"]
        for place in range(2):  # of a line's half: bytes `place` and `place + 2`
            for name, byte in (("a", place), ("b", place + 2)):
                lines += [f"prmt.b32 u, $4, 0x4B000000, {0x7650 + byte};", f"mov.b32 {name}, u;"]
                lines.append(f"sub.rn.f32 {name}, {name}, 0f{0x4B000000 + format.zero:08X};")
            lines += [f"cvt.rn.{kind}.f32 v, b, a;", f"mov.b32 {{${2 * place}, ${2 * place + 1}}}, v;"]
    return "{\n" + "\n".join(lines) + "\n}"


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    x,
    codes,
    scales,
    zeros,  # or None
    factors,  # or None
    bias,  # or None
    residual,  # or None
    out,
    partials,  # None: no splits
    tickets,
    num_rows,
    out_size,
    x_stride,
    residual_stride,
    out_stride,
    num_lines,
    IN: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    UNPACK: tl.constexpr,
    OUTPUTS: tl.constexpr,
    MATRICES: tl.constexpr,  # 2: gate and up
    ROWS: tl.constexpr,
    LINES: tl.constexpr,
    SPLITS: tl.constexpr,
    IN_TURN: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (i, j, k): lines from i · `LINES` on, rows from j · `ROWS` on, and the k-th split of the inputs."""
    let_next_start(EARLY)
    first = tl.program_id(0) * LINES
    lines = first + tl.arange(0, LINES)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    PER_SPLIT: tl.constexpr = IN // SPLITS
    wait_for_inputs(EARLY)
    sums = tl.zeros([LINES, ROWS], tl.float32)
    ups = tl.zeros([LINES, ROWS], tl.float32)
    for turn in tl.range(SPLITS if IN_TURN else 1):
        begin = (turn if IN_TURN else tl.program_id(2)) * PER_SPLIT
        own = tl.zeros([LINES, ROWS], tl.float32)
        own_ups = tl.zeros([LINES, ROWS], tl.float32)
        for start in tl.range(begin, begin + PER_SPLIT, STEP, num_stages=STAGES):
            own = _added(
                own, x, codes, scales, zeros, factors, first, start, rows, is_row, x_stride, num_lines,
                IN, GROUP, BITS, IS_FLOAT, ZERO, HAS_MINIMUMS, UNPACK, OUTPUTS, LINES, ROWS, STEP,
            )  # fmt: skip
            if MATRICES == 2:
                own_ups = _added(
                    own_ups, x, codes, scales, zeros, factors, first + out_size, start, rows, is_row, x_stride,
                    num_lines, IN, GROUP, BITS, IS_FLOAT, ZERO, HAS_MINIMUMS, UNPACK, OUTPUTS, LINES, ROWS, STEP,
                )  # fmt: skip
        sums += own
        ups += own_ups
    if partials is not None:
        number = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        SIZE: tl.constexpr = LINES * ROWS * MATRICES
        places = tl.arange(0, LINES)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        partials += number.to(tl.int64) * (SPLITS * SIZE) + places
        mine = partials + tl.program_id(2) * SIZE
        kept = is_row[None, :] | (ROWS > 16)  # with few rows, only existing rows
        tl.store(mine, sums, mask=kept)
        if MATRICES == 2:
            tl.store(mine + LINES * ROWS, ups, mask=kept)
        tl.debug_barrier()
        if tl.atomic_add(tickets + number, 1, sem="acq_rel", scope="gpu") < SPLITS - 1:
            return
        tl.store(tickets + number, 0)
        sums = _load_sums(partials, kept)
        if MATRICES == 2:
            ups = _load_sums(partials + LINES * ROWS, kept)
        for split in tl.static_range(1, SPLITS):
            sums += _load_sums(partials + split * SIZE, kept)
            if MATRICES == 2:
                ups += _load_sums(partials + (split * SIZE + LINES * ROWS), kept)

    has_line = lines < out_size
    if GROUP == IN:
        sums *= tl.load(scales + lines)[:, None]
        if MATRICES == 2:
            ups *= tl.load(scales + out_size + lines)[:, None]
    if bias is not None:
        sums = add_bias(sums, tl.load(bias + lines, mask=has_line, other=0.0).to(tl.float32)[:, None])
    result = sums.to(out.dtype.element_ty)
    if MATRICES == 2:
        result = gated(result, ups.to(out.dtype.element_ty))
    inside = is_row[None, :] & has_line[:, None]
    if residual is not None:
        places = rows[None, :] * residual_stride + lines[:, None]
        kept = tl.load(residual + places, mask=inside, other=0.0).to(tl.float32)
        result = (result.to(tl.float32) + kept).to(out.dtype.element_ty)
    tl.store(out + rows[None, :].to(tl.int64) * out_stride + lines[:, None], result, mask=inside)


@triton.jit
def _load_sums(places, kept):
    # Bypasses the L1 cache, because another program wrote the sums.
    return tl.load(places, mask=kept, other=0.0, cache_modifier=".cg")


@triton.jit
def _untile_kernel(
    codes,
    scales,
    zeros,  # or None
    factors,  # or None
    out,
    out_size,
    num_lines,
    IN: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    UNPACK: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Program (i, j): inputs from j · `STEP` on of tile i."""
    LINES: tl.constexpr = 64
    CHUNK: tl.constexpr = 256 // BITS
    SIZE: tl.constexpr = GROUP if GROUP < CHUNK else CHUNK
    first = tl.program_id(0) * LINES
    lines = first + tl.arange(0, LINES)
    for chunk in tl.static_range(STEP // CHUNK):
        start = tl.program_id(1) * STEP + chunk * CHUNK
        words = _load_words(codes, first, start, IN, BITS, LINES)
        for part in tl.static_range(CHUNK // SIZE):
            own = _take(words, part, CHUNK // SIZE)
            place = start + part * SIZE
            target = out + lines.to(tl.int64)[:, None] * IN + place + tl.arange(0, SIZE)[None, :]
            inside = (lines < out_size)[:, None]
            values = _unpack(
                own, zeros, first, place, num_lines, out.dtype.element_ty,
                GROUP, BITS, IS_FLOAT, ZERO, UNPACK, OUTPUTS, LINES,
            ).to(tl.float32)  # fmt: skip
            if GROUP == IN:
                values *= tl.load(scales + lines)[:, None]
            else:
                scale, minimum = _scale(scales, factors, lines, place // GROUP, num_lines, GROUP, HAS_MINIMUMS)
                values *= scale[:, None]
                if HAS_MINIMUMS:
                    values += minimum[:, None]
            tl.store(target, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _added(
    sums, x, codes, scales, zeros, factors, first, start, rows, is_row, x_stride, num_lines,
    IN: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, IS_FLOAT: tl.constexpr, ZERO: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr, UNPACK: tl.constexpr, OUTPUTS: tl.constexpr, LINES: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """`sums` plus the products with the lines from `first` on, for inputs `start` to `start + STEP`."""
    CHUNK: tl.constexpr = 256 // BITS
    SIZE: tl.constexpr = GROUP if GROUP < CHUNK else CHUNK
    PARTS: tl.constexpr = CHUNK // SIZE
    lines = first + tl.arange(0, LINES)
    group_sums = tl.zeros([LINES, ROWS], tl.float32)
    input_sums = tl.zeros([LINES, ROWS], tl.float32)
    for chunk in tl.static_range(STEP // CHUNK):
        words = _load_words(codes, first, start + chunk * CHUNK, IN, BITS, LINES)
        for part in tl.static_range(PARTS):
            place = start + chunk * CHUNK + part * SIZE
            places = rows.to(tl.int64)[:, None] * x_stride + (place + tl.arange(0, SIZE))[None, :]
            values = tl.load(x + places, mask=is_row[:, None], other=0.0).trans()
            tile = _unpack(
                _take(words, part, PARTS), zeros, first, place, num_lines, x.dtype.element_ty,
                GROUP, BITS, IS_FLOAT, ZERO, UNPACK, OUTPUTS, LINES,
            )  # fmt: skip
            if UNPACK is None:  # the interpreter has no products of bfloat16 matrices
                values, tile = values.to(tl.float32), tile.to(tl.float32)
            if GROUP == IN:
                sums = tl.dot(tile, values, sums, input_precision="ieee")
            else:
                group_sums = tl.dot(tile, values, group_sums, input_precision="ieee")
                if HAS_MINIMUMS:
                    ones = tl.full([LINES, SIZE], 1.0, values.dtype)
                    input_sums = tl.dot(ones, values, input_sums, input_precision="ieee")
                if SIZE == GROUP or chunk == STEP // CHUNK - 1:
                    scale, minimum = _scale(scales, factors, lines, place // GROUP, num_lines, GROUP, HAS_MINIMUMS)
                    sums = tl.fma(group_sums, tl.broadcast_to(scale[:, None], sums.shape), sums)
                    group_sums = tl.zeros([LINES, ROWS], tl.float32)
                    if HAS_MINIMUMS:
                        sums = tl.fma(input_sums, tl.broadcast_to(minimum[:, None], sums.shape), sums)
                        input_sums = tl.zeros([LINES, ROWS], tl.float32)
    return sums


@triton.jit
def _scale(scales, factors, lines, group, num_lines, GROUP: tl.constexpr, HAS_MINIMUMS: tl.constexpr):
    """The scales and minimums of a group, float32 `[LINES]`. Without minimums, the scales twice. See `TiledMatrix`."""
    if factors is None:
        word = tl.load(scales + group * num_lines + lines)
        if HAS_MINIMUMS:
            scale, minimum = _two_halves(word)
        else:
            scale, minimum = word, word
    else:
        factor = tl.load(factors + group * GROUP // 256 * num_lines + lines)
        if HAS_MINIMUMS:
            word = tl.load(scales + group // 2 * num_lines + lines) >> (group % 2 * 16)
            scale_factor, minimum_factor = _two_halves(factor)
            scale = (word & 255).to(tl.float32) * scale_factor
            minimum = (word >> 8 & 255).to(tl.float32) * minimum_factor
        else:
            word = tl.load(scales + group // 4 * num_lines + lines) >> (group % 4 * 8)
            scale = word.to(tl.int8).to(tl.float32) * factor
            minimum = scale
    return scale, minimum


@triton.jit
def _two_halves(words):
    """The two float16 in each int32, as float32."""
    first = (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    second = (words >> 16 & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return first, second


@triton.jit
def _load_words(codes, first, start, IN: tl.constexpr, BITS: tl.constexpr, LINES: tl.constexpr):
    """A chunk of each tile, `[2 * LINES, 4]`: a thread's 16 bytes in each line."""
    CHUNK: tl.constexpr = 256 // BITS
    threads = tl.arange(0, 2 * LINES)
    tiles = (first // 64 + threads // 128).to(tl.int64)
    places = (tiles * (IN // CHUNK) + start // CHUNK) * 512 + threads % 128 * 4
    # Codes are evicted first, because a matrix is not read again soon.
    return tl.load(codes + places[:, None] + tl.arange(0, 4)[None, :], eviction_policy="evict_first")


@triton.jit
def _take(words, part: tl.constexpr, PARTS: tl.constexpr):
    """One of `PARTS` equal parts of each thread's words."""
    SIZE: tl.constexpr = words.shape[1] // 2
    if PARTS == 1:
        taken = words
    else:
        low, high = tl.split(tl.permute(tl.reshape(words, (words.shape[0], 2, SIZE)), (0, 2, 1)))
        half = high if part >= PARTS // 2 else low
        taken = _take(half, part % (PARTS // 2), PARTS // 2)
    return taken


@triton.jit
def _unpack(
    words, zeros, first, place, num_lines, dtype: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr, ZERO: tl.constexpr, UNPACK: tl.constexpr, OUTPUTS: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Codes minus their zeros, `[LINES, inputs]`, in a type that holds them exactly.

    A word has the codes of two lines (half) and of 2 inputs (pair) in its bytes pair · 2 + half. With 4 bits a byte has
    the codes of two inputs that are eight apart (near, far); with 8 bits these are in two words.
    """
    STEPS: tl.constexpr = words.shape[1] if BITS == 4 else words.shape[1] // 2
    low, high = tl.zeros_like(words), tl.zeros_like(words)
    if zeros is not None:
        threads = tl.arange(0, 2 * LINES)
        own = zeros + place // GROUP * num_lines + first + threads // 32 * 16 + threads % 32 // 4
        low = tl.broadcast_to(tl.load(own)[:, None], words.shape)
        high = tl.broadcast_to(tl.load(own + 8)[:, None], words.shape)
    if BITS == 4:
        if UNPACK is None:
            low = low & 15 if zeros is not None else low + ZERO
            high = high & 15 if zeros is not None else high + ZERO
            a, b = (words & 15) - low, (words >> 16 & 15) - low
            c, d = (words >> 4 & 15) - low, (words >> 20 & 15) - low
            e, f = (words >> 8 & 15) - high, (words >> 24 & 15) - high
            g, h = (words >> 12 & 15) - high, (words >> 28 & 15) - high
        elif zeros is None:
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(UNPACK, OUTPUTS, [words], EIGHT, is_pure=True, pack=1)
        else:
            # -128 or -1024 in both halves of the word.
            LARGE: tl.constexpr = (0xC300C300 if dtype == tl.bfloat16 else 0xE400E400) - (1 << 32)
            both = [words, low + LARGE, high + LARGE]
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(UNPACK, OUTPUTS, both, EIGHT, is_pure=True, pack=1)
        # [threads, step, half of lines, near or far, pair]
        numbers = tl.join(tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h)))
        numbers = tl.reshape(numbers, (LINES // 16, 8, 4, STEPS, 2, 2, 2))
        numbers = tl.permute(numbers, (0, 4, 1, 3, 5, 2, 6))
    else:
        if UNPACK is None:
            a, b = _number(words, 0, IS_FLOAT, ZERO), _number(words, 2, IS_FLOAT, ZERO)
            c, d = _number(words, 1, IS_FLOAT, ZERO), _number(words, 3, IS_FLOAT, ZERO)
        else:
            a, b, c, d = tl.inline_asm_elementwise(UNPACK, OUTPUTS, [words], FOUR, is_pure=True, pack=1)
        # [threads, step, near or far, half of lines, pair]
        numbers = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (LINES // 16, 8, 4, STEPS, 2, 2, 2))
        numbers = tl.permute(numbers, (0, 5, 1, 3, 4, 2, 6))
    if UNPACK is not None:
        numbers = numbers.to(dtype, bitcast=True)
    return tl.reshape(numbers, (LINES, STEPS * 16))


@triton.jit
def _number(words, BYTE: tl.constexpr, IS_FLOAT: tl.constexpr, ZERO: tl.constexpr):
    """A byte of each word as a float32, in the interpreter."""
    byte = words >> (8 * BYTE) & 255
    if IS_FLOAT:
        number = byte.to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        number = (byte - ZERO).to(tl.float32)
    return number
