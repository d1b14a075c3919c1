"""Conversions and products of the cache's 8-bit floats (`fp8_cache.py`). Triton's own conversions are too slow.

Codes are read in pairs, as int16, and unpacked into two tiles: a head's even numbers and its odd numbers. So they get
to the tensor cores' registers like 16-bit numbers, and nine 32-bit instructions convert four of them. A product with
keys adds up the even numbers, then the odd ones.
"""

import triton
import triton.language as tl

from infinilm.kernels.attention_order import add_weights, weigh
from infinilm.kernels.fp8_cache import FLOAT16_LIMIT, LEAST_EXPONENT, LEAST_EXPONENT_FLOAT16

_LEAST_EXPONENT = tl.constexpr(LEAST_EXPONENT)
_LEAST_EXPONENT_FLOAT16 = tl.constexpr(LEAST_EXPONENT_FLOAT16)
_FLOAT16_LIMIT = tl.constexpr(FLOAT16_LIMIT)
INFINITE = tl.constexpr(0x7F800000)
# From this many queries on, scaling keys and values is less work than scaling scores and weights.
MANY = tl.constexpr(32)
_IS_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)

# A code's bits are moved to their places in bfloat16, which makes the value smaller by a factor of 2^-120.
_TO_BFLOAT16 = tl.constexpr("""{
.reg .b32 a, b, factor, zero;
mov.b32 factor, 0x7b807b80;
mov.b32 zero, 0x80008000;
shl.b32 a, $2, 4;
shl.b32 b, $2, 8;
and.b32 a, a, 0x07f007f0;
and.b32 b, b, 0x80008000;
or.b32 a, a, b;
fma.rn.bf16x2 $0, a, factor, zero;
shr.b32 a, $2, 4;
and.b32 a, a, 0x07f007f0;
and.b32 b, $2, 0x80008000;
or.b32 a, a, b;
fma.rn.bf16x2 $1, a, factor, zero;
}""")
_TO_FLOAT16 = tl.constexpr("""{
.reg .b32 a, b;
.reg .b16 x, y;
prmt.b32 a, $2, 0, 0x4420;
prmt.b32 b, $2, 0, 0x4431;
cvt.u16.u32 x, a;
cvt.u16.u32 y, b;
cvt.rn.f16x2.e4m3x2 $0, x;
cvt.rn.f16x2.e4m3x2 $1, y;
}""")


@triton.jit
def unpack(pairs, DTYPE: tl.constexpr):
    """The numbers of the first code in each int16, and of the second one, exactly."""
    if _IS_COMPILED and tl.bfloat16 == DTYPE:
        even, odd = tl.inline_asm_elementwise(
            _TO_BFLOAT16, "=r,=r,r", [pairs], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    elif _IS_COMPILED and tl.float16 == DTYPE:
        even, odd = tl.inline_asm_elementwise(
            _TO_FLOAT16, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:  # the same in float32
        bits = pairs.to(tl.int32)
        even = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True)
        odd = (((bits & 0x8000) << 16) | ((bits & 0x7F00) << 12)).to(tl.float32, bitcast=True)
        even, odd = (even * 2.0**120).to(DTYPE), (odd * 2.0**120).to(DTYPE)
    return even, odd


@triton.jit
def split_pairs(numbers):
    """The even and the odd columns."""
    return tl.split(tl.reshape(numbers, (numbers.shape[0], numbers.shape[1] // 2, 2)))


@triton.jit
def join_pairs(even, odd):
    """Put even and odd columns back in order."""
    return tl.reshape(tl.join(even, odd), (even.shape[0], 2 * even.shape[1]))


@triton.jit
def scale_place(block, head, offset, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The place of a token's scales, counted in pairs."""
    return (block.to(tl.int64) * KV_HEADS + head) * BLOCK_SIZE + offset


@triton.jit
def split_scales(both):
    """The scales of keys and of values as float32."""
    return (both << 16).to(tl.float32, bitcast=True), (both & -65536).to(tl.float32, bitcast=True)


@triton.jit
def largest_bits(numbers):
    """The bits of each row's largest magnitude as float32, `[N, 1]`. They are at least `INFINITE` if a number is
    infinite or NaN."""
    return tl.max(numbers.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)[:, None]


@triton.jit
def scale_exponent(largest, DTYPE: tl.constexpr):
    """The biased exponent of the scale for rows of type `DTYPE`, from the bits of their largest magnitude."""
    LEAST: tl.constexpr = _LEAST_EXPONENT_FLOAT16 if tl.float16 == DTYPE else _LEAST_EXPONENT
    return tl.maximum(((largest + 0x1FFFFF) >> 23) - 8, LEAST)


@triton.jit
def scale_bits(exponent, is_nan):
    """Scales as the bits of bfloat16, int16."""
    return tl.where(is_nan, 0x7FC0, exponent << 7).to(tl.int16)


@triton.jit
def encode(numbers, exponent, DTYPE: tl.constexpr):
    """The codes of numbers of type `DTYPE`."""
    numbers = numbers.to(tl.float32)
    if tl.float16 == DTYPE:
        numbers = tl.clamp(numbers, -_FLOAT16_LIMIT, _FLOAT16_LIMIT)
    numbers *= ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    if not _IS_COMPILED:  # the interpreter drops the carry of rounding up: round to three bits of mantissa before
        power = tl.maximum(numbers.to(tl.int32, bitcast=True) & INFINITE, (127 - 6) << 23)
        large = 1.5 * (power + (20 << 23)).to(tl.float32, bitcast=True)
        numbers = (numbers + large) - large
    return numbers.to(tl.float8e4nv)


@triton.jit
def unpack_scaled(pairs, scale, DTYPE: tl.constexpr):
    """`unpack` with the numbers of each row scaled."""
    even, odd = unpack(pairs, DTYPE)
    factor = scale.to(DTYPE)[:, None]
    return even * factor, odd * factor


@triton.jit
def score_pairs(even_query, odd_query, keys, scale, PRECISION: tl.constexpr):
    """The scores of queries with a tile of keys' codes and scales. With few queries the scores are scaled."""
    if even_query.shape[0] >= MANY:
        even, odd = unpack_scaled(keys, scale, even_query.dtype)
    else:
        even, odd = unpack(keys, even_query.dtype)
    score = tl.dot(even_query, even.trans(), input_precision=PRECISION)
    score = tl.dot(odd_query, odd.trans(), score, input_precision=PRECISION)
    if even_query.shape[0] < MANY:
        score *= scale[None, :]
    return score


@triton.jit
def add_pairs(
    even_output, odd_output, total, largest, score, values, scale, factor, DTYPE: tl.constexpr, PRECISION: tl.constexpr
):
    """`add_tile` with a tile of values' codes and scales. Even and odd columns of the output are separate.

    With few queries the weights are scaled, unless they are float16, where scaled weights would be subnormal.
    """
    wide, weight, fade, new_largest = weigh(largest, score, factor, DTYPE)
    if tl.float16 == DTYPE or score.shape[0] >= MANY:
        even, odd = unpack_scaled(values, scale, DTYPE)
        scaled = weight
    else:
        even, odd = unpack(values, DTYPE)
        scaled = (wide * scale[None, :]).to(DTYPE)
    even_output = tl.dot(scaled, even, even_output * fade, input_precision=PRECISION)
    odd_output = tl.dot(scaled, odd, odd_output * fade, input_precision=PRECISION)
    total = add_weights(total, wide, weight, fade, PRECISION)
    return even_output, odd_output, total, new_largest
