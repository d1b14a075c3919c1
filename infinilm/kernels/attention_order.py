"""The order in which attention adds up a token's keys. Every attention kernel follows it, so all have the same bits.

A token's context is divided into chunks, and a chunk into tiles of keys, both at fixed multiples from the request's
first token (`chunk_shift`, `key_tile`). Within a chunk tiles are added in order; then chunks are merged in order. The
division depends only on the token's place in its request: not on the batch, the step that computes it, the cached
tokens, or the program. So a decode step may give each chunk to another program, a shared prefix may be computed once
for many rows, and a prompt may be computed in any pieces.

Sums are computed by the tensor cores, whose results do not depend on the shape of the tile. That includes the sum of
the weights, which is a product with ones. Everything else is one operation per number. The compiler must not merge
products and sums there: kernels are launched with `IN_ORDER`, and use `tl.fma` where they are merged.
"""

import torch
import triton
import triton.language as tl

IN_ORDER = {"enable_fp_fusion": False}
"""Launch options."""

MIN_SHIFT = tl.constexpr(8)
"""Binary logarithm of the smallest chunk size, see `chunk_shift`."""

MAX_CHUNKS = tl.constexpr(16)
"""The most chunks of a token."""

NO_WINDOW = tl.constexpr(1 << 29)
"""Stands for no window: more tokens than any request has."""

LOG2_E = tl.constexpr(1.4426950408889634)

# The least columns of a product's result. All of them hold the same sum.
SUM_COLUMNS = tl.constexpr(16)


def key_tile(dtype: torch.dtype, head_dim: int) -> int:
    """Keys of a tile.

    64 keys of 128 bfloat16 are 16 KiB. When decoding, two tiles of keys and two of values are in flight in each of the
    three programs that fit on a Hopper multiprocessor, several times the bytes that hide the memory latency.
    """
    if dtype == torch.float32:  # exact products don't use tensor cores: small tiles, or registers run out
        return 16
    return 64 if head_dim <= 128 else 32


@triton.jit
def chunk_shift(num_seen, window):
    """The binary logarithm of the keys per chunk for a token that is number `num_seen` of its request.

    A chunk has at least 256 keys, because merging smaller ones would take longer than reading them. From 4,096 tokens
    on it has an eighth of the largest power of two, so that there are 8 to 16 chunks. With a window of w no more than w
    keys and a part of a chunk matter.
    """
    num_seen = tl.minimum(num_seen, window + (window >> 3))
    shift = (num_seen >= 0).to(tl.int32) * MIN_SHIFT
    for i in tl.static_range(12, 30):
        shift += (num_seen >= (1 << i)).to(tl.int32)
    return shift


@triton.jit
def no_keys(M: tl.constexpr, PAD_DIM: tl.constexpr, COLUMNS: tl.constexpr = SUM_COLUMNS):
    """The state before the first tile: weighted sum of the values, sum of the weights, largest score.

    With one column the sum of the weights has the order that is fastest in the kernel.
    """
    output = tl.zeros([M, PAD_DIM], tl.float32)
    total = tl.zeros([M, COLUMNS], tl.float32)
    largest = tl.full([M], float("-inf"), tl.float32)
    return output, total, largest


@triton.jit
def add_tile(
    output,  # [M, PAD_DIM] float32
    total,  # [M, columns] float32
    largest,  # [M] float32
    score,  # [M, TILE] float32, -inf where a key is not seen
    value,  # [TILE, PAD_DIM]
    factor,  # of the scores; log2(e) included
    PRECISION: tl.constexpr,
):
    """The state after one more tile of keys."""
    wide, weight, fade, new_largest = weigh(largest, score, factor, value.dtype)
    output = tl.dot(weight, value, output * fade, input_precision=PRECISION)
    total = add_weights(total, wide, weight, fade, PRECISION)
    return output, total, new_largest


@triton.jit
def weigh(largest, score, factor, DTYPE: tl.constexpr):
    """The weights of a tile of keys, in float32 and rounded, the factor of earlier sums, and the new largest score."""
    new_largest = tl.maximum(largest, tl.max(score, 1) * factor)
    shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # a row may have seen nothing yet
    wide = tl.exp2(tl.fma(score, factor, -shift[:, None]))
    weight = wide.to(DTYPE)
    fade = tl.exp2(largest - shift)[:, None]
    return wide, weight, fade, new_largest


@triton.jit
def add_weights(total, wide, weight, fade, PRECISION: tl.constexpr):
    """The sum of the weights, `wide` or rounded, after one more tile."""
    if total.shape[1] == 1:
        return total * fade + tl.sum(wide, 1, keep_dims=True)
    else:  # noqa: RET505 - Triton compiles only one of the branches
        ones = tl.full([weight.shape[1], total.shape[1]], 1.0, weight.dtype)
        return tl.dot(weight, ones, total * fade, input_precision=PRECISION)


@triton.jit
def merge(output, total, largest, chunk_output, chunk_total, chunk_largest):
    """The state after one more chunk; sums are `[M, …]`, the largest scores `[M]`."""
    new_largest = tl.maximum(largest, chunk_largest)
    shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    old = tl.exp2(largest - shift)[:, None]
    new = tl.exp2(chunk_largest - shift)[:, None]
    output = tl.fma(chunk_output, tl.broadcast_to(new, output.shape), output * old)
    total = tl.fma(chunk_total, tl.broadcast_to(new, total.shape), total * old)
    return output, total, new_largest


@triton.jit
def finish(output, total, largest, sink):
    """The attention of rows whose chunks are all merged. `total` is `[M]`; a `sink` is a score without a value."""
    if sink is not None:
        total += tl.exp2(tl.fma(sink, LOG2_E, -largest))
    return output / total[:, None]


@triton.jit
def capped(score, cap):
    """`cap * tanh(score / cap)`."""
    return cap - 2 * cap / (1 + tl.exp2(score * (2 * LOG2_E / cap)))
