"""Stores keys and values in the paged KV cache, and gathers them from it.

A token's keys and its values are rows of `kv_heads * head_dim` numbers, adjacent in the cache. Storing uses a program
per token, gathering one per row: a few 16-byte accesses for each thread, all in flight at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinilm.kernels.nonfinite import mark_nonfinite


@triton.jit
def zero_if_finite(number):
    """0.0, or NaN for NaN and infinity. A sum of them checks all of its terms at once."""
    return number.to(tl.float32) * 0.0


@triton.jit
def _store_kernel(
    new,
    cache,
    slots,
    token_stride,
    part_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_HEADS: tl.constexpr,
    PAD_DIM: tl.constexpr,
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
    KEPT: tl.constexpr = cache.dtype.element_ty
    key = tl.load(new, mask=inside, other=0.0).to(KEPT)
    value = tl.load(new + part_stride, mask=inside, other=0.0).to(KEPT)
    is_value_nonfinite = tl.sum(zero_if_finite(value), axis=1)[:, None] != 0.0
    is_nonfinite = tl.sum(zero_if_finite(key) + zero_if_finite(value), axis=1)[:, None] != 0.0
    nan = tl.full(key.shape, float("nan"), tl.float32).to(KEPT)
    tl.store(cache, tl.where(is_nonfinite, nan, key), mask=inside)
    tl.store(cache + KV_HEADS * HEAD_DIM, tl.where(is_value_nonfinite, 0.0, value), mask=inside)


def store_kv(new: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write tokens' keys and values into one layer's cache.

    `new` is `[T, 2, kv_heads, head_dim]`, its last two dimensions contiguous; `cache` `[blocks, block_size, 2,
    kv_heads, head_dim]`, contiguous; `slots` `[T]` int32 or int64 is where each token goes, counted in tokens from
    the start of the cache, or negative for nowhere.
    """
    num_tokens, _, kv_heads, head_dim = new.shape
    if num_tokens == 0:
        return
    if new.stride()[2:] != (head_dim, 1):
        new = new.contiguous()
    _store_kernel[(num_tokens,)](
        new,
        cache,
        slots,
        new.stride(0),
        new.stride(1),
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAD_HEADS=triton.next_power_of_2(kv_heads),
        PAD_DIM=triton.next_power_of_2(head_dim),
    )


def store_kv_torch(new: Tensor, cache: Tensor, slots: Tensor) -> None:
    stored = (slots >= 0).nonzero().squeeze(1)
    cache.flatten(0, 1).index_copy_(0, slots[stored].long(), mark_nonfinite(new[stored].to(cache.dtype)))


@triton.jit(do_not_specialize=["context_len"], do_not_specialize_on_alignment=["table"])
def _gather_kernel(
    cache, table, target, context_len, SIZE: tl.constexpr, PAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr
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
    tl.store(target + (token.to(tl.int64) * 2 + part) * SIZE + places, row, mask=inside)


def gather_kv(cache: Tensor, table: Tensor, *, context_len: int, num_tokens: int) -> Tensor:
    """One request's keys and values in the order of its tokens, `[num_tokens, 2, kv_heads, head_dim]`.

    `cache` is `[blocks, block_size, 2, kv_heads, head_dim]`, contiguous, `table` `[max_blocks]` int32 or int64 names
    the request's blocks. From token `context_len` on it is zeros: unused places of the cache may hold anything.
    """
    block_size, _, kv_heads, head_dim = cache.shape[1:]
    size = kv_heads * head_dim
    target = cache.new_empty(num_tokens, 2, kv_heads, head_dim)
    if num_tokens == 0:
        return target
    _gather_kernel[num_tokens, 2](
        cache, table, target, context_len, SIZE=size, PAD_SIZE=triton.next_power_of_2(size), BLOCK_SIZE=block_size
    )
    return target


def gather_kv_torch(cache: Tensor, table: Tensor, *, context_len: int, num_tokens: int) -> Tensor:
    tokens = torch.arange(min(context_len, num_tokens), device=cache.device)
    slots = table.long()[tokens // cache.shape[1]] * cache.shape[1] + tokens % cache.shape[1]
    target = cache.new_zeros(num_tokens, *cache.shape[2:])
    target[: len(tokens)] = cache.flatten(0, 1)[slots]
    return target
