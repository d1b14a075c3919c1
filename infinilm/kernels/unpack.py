"""Unpacks some inputs of some lines of `PackedLines` in registers, for the kernels of `experts`."""

import triton
import triton.language as tl

# The bits of the float32 2^23, and that number: its lowest bits count units. The bits are passed to kernels as an
# argument, because with a constant the compiler would use two instructions instead of one.
MAGIC_BITS = 0x4B000000
MAGIC = tl.constexpr(8388608.0)
# Columns that share a factor, in formats with factors.
FACTOR_COLUMNS = tl.constexpr(256)
# `_take_float` moves a 4-bit float's bits to the lowest of the exponent and the highest of the mantissa. This factor
# corrects the exponent.
FLOAT4_SCALE = tl.constexpr(2.0**126)
HALF_EXPONENT = tl.constexpr(0x00400000)


@triton.jit
def unpack_tile(
    codes,
    scales,
    factors,  # or None
    zeros,  # or None
    numbers,
    has_line,
    start,
    magic_bits,
    IN: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """Inputs `start` to `start + BLOCK_IN` of the lines `numbers` `[LINES]`, as float32; see `PackedLines`.

    `BLOCK_IN` and every group consist of whole runs of `RUN` inputs, unless a group is a whole line.
    """
    IS_FP8: tl.constexpr = codes.dtype.element_ty == tl.float8e4nv
    IN_WORD: tl.constexpr = 1 if IS_FP8 else 32 // BITS
    WORDS: tl.constexpr = RUN // IN_WORD
    runs = tl.arange(0, BLOCK_IN // RUN)
    inputs = start + runs * RUN
    is_run = has_line[:, None]
    words = (inputs // IN_WORD)[:, None] + tl.arange(0, WORDS)[None, :]
    is_word = has_line[:, None, None]
    if IN % BLOCK_IN != 0:
        is_run = is_run & (inputs < IN)[None, :]
        is_word = is_word & (words < IN // IN_WORD)[None, :, :]
    lines = numbers.to(tl.int64)[:, None]
    # Codes are evicted first, because a matrix is not read again soon.
    loaded = tl.load(
        codes + (lines * (IN // IN_WORD))[:, :, None] + words[None, :, :],
        mask=is_word,
        other=0.0 if IS_FP8 else 0,
        eviction_policy="evict_first",
    )
    groups = lines * (IN // GROUP) + (inputs // GROUP)[None, :]
    scale, minimum = split_pair(tl.load(scales + groups, mask=is_run, other=0), HAS_MINIMUMS)
    if factors is not None:
        blocks = lines * (IN // FACTOR_COLUMNS) + (inputs // FACTOR_COLUMNS)[None, :]
        factor, minimum_factor = split_pair(tl.load(factors + blocks, mask=is_run, other=0), HAS_MINIMUMS)
        scale, minimum = scale * factor, minimum * minimum_factor
    scale, minimum = scale[:, :, None], minimum[:, :, None]
    middle = MIDDLE
    if zeros is not None:
        middle = tl.load(zeros + groups, mask=is_run, other=0).to(tl.float32)[:, :, None]
    if IS_FP8:
        values = loaded.to(tl.float32) * scale
    else:
        IS_FLOAT: tl.constexpr = scales.dtype.element_ty == tl.uint8
        upper = loaded >> 16
        # Joined by the bits of a code's place in its word. The highest bit is the first dimension after the words.
        evens = _halves(loaded, upper, magic_bits, scale, minimum, middle, 0, BITS, HAS_MINIMUMS, IS_FLOAT)
        odds = _halves(loaded, upper, magic_bits, scale, minimum, middle, 1, BITS, HAS_MINIMUMS, IS_FLOAT)
        if BITS == 4:
            more = _halves(loaded, upper, magic_bits, scale, minimum, middle, 2, BITS, HAS_MINIMUMS, IS_FLOAT)
            evens = tl.join(evens, more)
            more = _halves(loaded, upper, magic_bits, scale, minimum, middle, 3, BITS, HAS_MINIMUMS, IS_FLOAT)
            odds = tl.join(odds, more)
        values = tl.join(evens, odds)
    return tl.reshape(values, (LINES, BLOCK_IN))


@triton.jit
def split_pair(stored, HAS_MINIMUMS: tl.constexpr):
    """A scale and a minimum, as float32. If there are minimums, they are in the upper half of the stored number."""
    if HAS_MINIMUMS:
        if stored.dtype == tl.int16:
            scale, minimum = (stored & 255).to(tl.float32), ((stored >> 8) & 255).to(tl.float32)
        else:
            scale = stored.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            minimum = (stored >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        if stored.dtype == tl.uint8:  # an exponent
            bits = tl.where(stored == 0, HALF_EXPONENT, stored.to(tl.int32) << 23)
            scale = bits.to(tl.float32, bitcast=True)
        else:
            scale = stored.to(tl.float32)
        minimum = scale  # not used
    return scale, minimum


@triton.jit
def _halves(
    loaded,
    upper,
    magic_bits,
    scale,
    minimum,
    middle,
    PLACE: tl.constexpr,
    BITS: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
):
    """The values of the codes at a place in the lower and in the upper half of words, `[…, 2]`."""
    if IS_FLOAT:
        lower = _take_float(loaded, PLACE) * scale
        higher = _take_float(upper, PLACE) * scale
    else:
        lower = _take(loaded, magic_bits, scale, minimum, middle, PLACE, BITS, HAS_MINIMUMS)
        higher = _take(upper, magic_bits, scale, minimum, middle, PLACE, BITS, HAS_MINIMUMS)
    return tl.join(lower, higher)


@triton.jit
def _take(
    words, magic_bits, scale, minimum, middle, PLACE: tl.constexpr, BITS: tl.constexpr, HAS_MINIMUMS: tl.constexpr
):
    """The values of the codes at a place in the lower half of int32s.

    A code is not shifted. Its bits become the lower bits of a float where they are, so its value is `FACTOR` times as
    large, and the scale is divided by `FACTOR`. Only the last operation rounds, as it would without the factor.
    """
    FACTOR: tl.constexpr = 1 << (BITS * PLACE)
    MASK: tl.constexpr = (1 << BITS) - 1
    floats = ((words & (MASK * FACTOR)) | magic_bits).to(tl.float32, bitcast=True) - (middle * FACTOR + MAGIC)
    if HAS_MINIMUMS:
        floats = tl.fma(floats, scale / FACTOR, minimum)
    else:
        floats *= scale / FACTOR
    return floats


@triton.jit
def _take_float(words, PLACE: tl.constexpr):
    """The 4-bit floats (E2M1) at a place in the lower half of int32s: sign, two bits of exponent, one of mantissa."""
    bits = words << (28 - 4 * PLACE)
    floats = (bits & -2147483648) | ((bits >> 6) & 0x01C00000)
    return floats.to(tl.float32, bitcast=True) * FLOAT4_SCALE
