"""Stores keys and values in the paged KV cache, and gathers them from it.

A token's keys and its values are rows of `kv_heads * head_dim` numbers, adjacent in the cache. Storing uses a program
per token, gathering one per row: a few 16-byte accesses for each thread, all in flight at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinilm.kernels.fp8_cache import read_quantized, store_quantized
from infinilm.kernels.fp8_kernels import INFINITE, encode, largest_bits, scale_bits, scale_exponent, scale_place
from infinilm.kernels.nonfinite import mark_nonfinite


@triton.jit
def zero_if_finite(number):
    """0.0, or NaN for NaN and infinity. A sum of them checks all of its terms at once."""
    return number.to(tl.float32) * 0.0


@triton.jit
def _store_kernel(
    new,
    cache,
    scales,  # of 8-bit floats, int16; None: the cache has another type
    slots,
    token_stride,
    part_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_HEADS: tl.constexpr,
    PAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Program (token): its keys and values; see `nonfinite.py` for those that are not finite."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    heads, dims = tl.arange(0, PAD_HEADS)[:, None], tl.arange(0, PAD_DIM)[None, :]
    inside = (heads < KV_HEADS) & (dims < HEAD_DIM)
    places = heads * HEAD_DIM + dims
    new += token * token_stride + places
    cache += slot * (2 * KV_HEADS * HEAD_DIM) + places
    if scales is not None:
        key, value = tl.load(new, mask=inside, other=0.0), tl.load(new + part_stride, mask=inside, other=0.0)
        places = 2 * scale_place(slot // BLOCK_SIZE, heads, slot % BLOCK_SIZE, KV_HEADS, BLOCK_SIZE)
        _store_codes(key, value, cache, scales + places, heads < KV_HEADS, inside, KV_HEADS * HEAD_DIM)
        return
    KEPT: tl.constexpr = cache.dtype.element_ty
    key = tl.load(new, mask=inside, other=0.0).to(KEPT)
    value = tl.load(new + part_stride, mask=inside, other=0.0).to(KEPT)
    is_value_nonfinite = tl.sum(zero_if_finite(value), axis=1)[:, None] != 0.0
    is_nonfinite = tl.sum(zero_if_finite(key) + zero_if_finite(value), axis=1)[:, None] != 0.0
    nan = tl.full(key.shape, float("nan"), tl.float32).to(KEPT)
    tl.store(cache, tl.where(is_nonfinite, nan, key), mask=inside)
    tl.store(cache + KV_HEADS * HEAD_DIM, tl.where(is_value_nonfinite, 0.0, value), mask=inside)


@triton.jit
def _store_codes(key, value, cache, scales, is_head, inside, size):
    """Write a token's keys and values, `[heads, dims]`, as 8-bit floats. A key's scale is followed by its value's."""
    DTYPE: tl.constexpr = key.dtype
    largest, value_largest = largest_bits(key), largest_bits(value)
    is_value_nonfinite = value_largest >= INFINITE
    is_nonfinite = (largest >= INFINITE) | is_value_nonfinite
    key, value = tl.where(is_nonfinite, 0.0, key), tl.where(is_value_nonfinite, 0.0, value)
    exponent = scale_exponent(tl.where(is_nonfinite, 0, largest), DTYPE)
    value_exponent = scale_exponent(tl.where(is_value_nonfinite, 0, value_largest), DTYPE)
    tl.store(scales, scale_bits(exponent, is_nonfinite), mask=is_head)
    tl.store(scales + 1, scale_bits(value_exponent, False), mask=is_head)
    tl.store(cache, encode(key, exponent, DTYPE), mask=inside)
    tl.store(cache + size, encode(value, value_exponent, DTYPE), mask=inside)


def store_kv(new: Tensor, cache: Tensor, slots: Tensor, scales: Tensor | None = None) -> None:
    """Write tokens' keys and values into one layer's cache.

    `new` is `[T, 2, kv_heads, head_dim]`, its last two dimensions contiguous; `cache` `[blocks, block_size, 2,
    kv_heads, head_dim]`, contiguous; `slots` `[T]` int32 or int64 is each token's place, counted in tokens from the
    start of the cache; negative: it is not stored. A cache of 8-bit floats has `scales` (`fp8_cache.py`).
    """
    num_tokens, _, kv_heads, head_dim = new.shape
    if num_tokens == 0:
        return
    if new.stride()[2:] != (head_dim, 1):
        new = new.contiguous()
    _store_kernel[(num_tokens,)](
        new,
        cache,
        None if scales is None else scales.view(torch.int16),
        slots,
        new.stride(0),
        new.stride(1),
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAD_HEADS=triton.next_power_of_2(kv_heads),
        PAD_DIM=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=cache.shape[1],
    )


def store_kv_torch(new: Tensor, cache: Tensor, slots: Tensor, scales: Tensor | None = None) -> None:
    stored = (slots >= 0).nonzero().squeeze(1)
    places = slots[stored].long()
    if scales is not None:
        store_quantized(mark_nonfinite(new[stored]), cache, scales, places)
    else:
        cache.flatten(0, 1).index_copy_(0, places, mark_nonfinite(new[stored].to(cache.dtype)))


@triton.jit(do_not_specialize=["context_len"], do_not_specialize_on_alignment=["table"])
def _gather_kernel(
    cache,
    scales,  # of 8-bit floats, int16; None: the cache has another type
    table,
    target,
    context_len,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    PAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Program (token, part): its keys (part 0) or its values (part 1), `SIZE` numbers."""
    token = tl.program_id(0)
    part = tl.program_id(1)
    is_known = token < context_len
    block = tl.load(table + token // BLOCK_SIZE, mask=is_known, other=0).to(tl.int64)
    slot = block * BLOCK_SIZE + token % BLOCK_SIZE
    places = tl.arange(0, PAD_SIZE)
    inside = places < SIZE
    row = tl.load(cache + (slot * 2 + part) * SIZE + places, mask=inside & is_known, other=0.0)
    if scales is not None:
        pairs = scale_place(block, places // HEAD_DIM, token % BLOCK_SIZE, SIZE // HEAD_DIM, BLOCK_SIZE)
        bits = tl.load(scales + 2 * pairs + part, mask=inside & is_known, other=0).to(tl.int32)
        row = (row.to(tl.float32) * (bits << 16).to(tl.float32, bitcast=True)).to(target.dtype.element_ty)
    tl.store(target + (token.to(tl.int64) * 2 + part) * SIZE + places, row, mask=inside)


def gather_kv(
    cache: Tensor,
    table: Tensor,
    *,
    context_len: int,
    num_tokens: int,
    scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """One request's keys and values in the order of its tokens, `[num_tokens, 2, kv_heads, head_dim]`.

    `cache` is `[blocks, block_size, 2, kv_heads, head_dim]`, contiguous, `table` `[max_blocks]` int32 or int64 has the
    request's blocks. From token `context_len` on the result is zeros, because unused places of the cache may hold
    anything. The result has type `dtype`, or the cache's type if None. A cache of 8-bit floats has `scales`
    (`fp8_cache.py`).
    """
    block_size, _, kv_heads, head_dim = cache.shape[1:]
    size = kv_heads * head_dim
    kept = cache.dtype if scales is None or dtype is None else dtype
    target = cache.new_empty(num_tokens, 2, kv_heads, head_dim, dtype=kept)
    if num_tokens > 0:
        _gather_kernel[num_tokens, 2](
            cache,
            None if scales is None else scales.view(torch.int16),
            table,
            target,
            context_len,
            HEAD_DIM=head_dim,
            SIZE=size,
            PAD_SIZE=triton.next_power_of_2(size),
            BLOCK_SIZE=block_size,
        )
    return target if dtype is None else target.to(dtype)


def gather_kv_torch(
    cache: Tensor,
    table: Tensor,
    *,
    context_len: int,
    num_tokens: int,
    scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    tokens = torch.arange(min(context_len, num_tokens), device=cache.device)
    slots = table.long()[tokens // cache.shape[1]] * cache.shape[1] + tokens % cache.shape[1]
    kept = dtype or cache.dtype
    target = cache.new_zeros(num_tokens, *cache.shape[2:], dtype=kept)
    if scales is not None:
        target[: len(tokens)] = read_quantized(cache, scales, slots, kept)
    else:
        target[: len(tokens)] = cache.flatten(0, 1)[slots]
    return target
