"""Merges two attention results of the same queries over different keys."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE_TOKENS = 32


@triton.jit(do_not_specialize=["num_tokens"])
def _merge_kernel(
    first,
    first_log_sums,
    second,
    second_log_sums,
    target,
    target_log_sums,
    num_tokens,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """Program (tile of tokens, head)."""
    tokens = tl.program_id(0) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    head = tl.program_id(1)
    dims = tl.arange(0, PAD_DIM)
    inside = tokens < num_tokens
    mask = inside[:, None] & (dims < HEAD_DIM)[None, :]
    places = (tokens.to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
    sums = head.to(tl.int64) * num_tokens + tokens
    first_log_sum = tl.load(first_log_sums + sums, mask=inside, other=0.0)
    second_log_sum = tl.load(second_log_sums + sums, mask=inside, other=0.0)
    largest = tl.maximum(first_log_sum, second_log_sum)
    first_weight = tl.exp(first_log_sum - largest)
    second_weight = tl.exp(second_log_sum - largest)
    total = first_weight + second_weight
    merged = tl.load(first + places, mask=mask, other=0.0).to(tl.float32) * (first_weight / total)[:, None]
    merged += tl.load(second + places, mask=mask, other=0.0).to(tl.float32) * (second_weight / total)[:, None]
    tl.store(target + places, merged.to(target.dtype.element_ty), mask=mask)
    tl.store(target_log_sums + sums, largest + tl.log(total), mask=inside)


def merge_attention(
    first: Tensor, first_log_sums: Tensor, second: Tensor, second_log_sums: Tensor, *, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Merge two results for the same queries, weighted by their sums of exponentials.

    `first` and `second` are `[T, heads, head_dim]`, contiguous, of any types. Their log sums are `[heads, T]` float32,
    natural logarithms and finite. Returns the result in `dtype` and its log sums.
    """
    num_tokens, heads, head_dim = first.shape
    target = torch.empty_like(first, dtype=dtype)
    log_sums = torch.empty_like(first_log_sums)
    if num_tokens == 0:
        return target, log_sums
    _merge_kernel[triton.cdiv(num_tokens, _TILE_TOKENS), heads](
        first,
        first_log_sums,
        second,
        second_log_sums,
        target,
        log_sums,
        num_tokens,
        HEADS=heads,
        HEAD_DIM=head_dim,
        PAD_DIM=triton.next_power_of_2(head_dim),
        TILE_TOKENS=_TILE_TOKENS,
    )
    return target, log_sums


def merge_attention_torch(
    first: Tensor, first_log_sums: Tensor, second: Tensor, second_log_sums: Tensor, *, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    log_sums = torch.logaddexp(first_log_sums, second_log_sums)
    weights = [torch.exp(part - log_sums).T.unsqueeze(2) for part in (first_log_sums, second_log_sums)]
    return (first.float() * weights[0] + second.float() * weights[1]).to(dtype), log_sums
