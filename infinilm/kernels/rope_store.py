"""Head norms, rotary embedding and the KV cache update in one kernel, between the qkv projection and attention."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinilm.kernels.early_launch import launches_early, let_next_start, wait_for_inputs
from infinilm.kernels.fp8_kernels import INFINITE, encode, largest_bits, scale_bits, scale_exponent, scale_place
from infinilm.kernels.norm import inverse_rms, rms_norm_torch, scale_and_weigh
from infinilm.kernels.store_kv import store_kv_torch, zero_if_finite

# Numbers per program: with 4 warps, one load of 16 bytes per thread for each half of the heads. So one token's heads
# are divided among a few programs, each large enough to be worth its start. (Half as many numbers and warps would take
# a tenth less time. But the variants of `marks_nonfinite` would have different layouts, and norms might add
# differently.)
_TILE = 2048
_WARPS = 4


def rope_store(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    slots: Tensor,
    cache: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    is_interleaved: bool = False,
    marks_nonfinite: bool = True,
    scales: Tensor | None = None,
) -> Tensor:
    """Norm and rotate queries and keys, store keys and values; returns the queries `[T, heads, head_dim]`, contiguous.

    - `qkv` `[T, heads + 2 * kv_heads, head_dim]`: queries, keys, values of each token; only the stride over tokens
      is free.
    - `positions` `[T]` int64: rows of `table` `[max_len, dim]` float32, cosines and then sines, half of `dim` each.
      In a head's first `dim` numbers, i is rotated with i + dim / 2; with `is_interleaved`, 2i with 2i + 1.
    - `slots` `[T]` int64: a token's place in `cache` `[blocks, block_size, 2, kv_heads, head_dim]`, contiguous, counted
      over all blocks; negative: its key and value are not stored.
    - `q_norm`, `k_norm` `[head_dim]`: weights of the norms, both or none, with `eps`.
    - `scales`: those of a cache of 8-bit floats (`fp8_cache.py`).

    Keys and values that are not finite are stored as `nonfinite.py` describes, unless `marks_nonfinite` is False. The
    check is not needed if each row has one new token, because then no other query is in the same product with its
    value, and it would cost 0.3 us.

    Cosines, sines and the results of each norm, product and sum are rounded to the type of `qkv`.
    """
    num_tokens, _, head_dim = qkv.shape
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    pairs = triton.next_power_of_2(head_dim // 2)
    heads = max(1, _TILE // (2 * pairs))
    early = launches_early(qkv.device)
    _rope_store_kernel[(num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, heads))](
        qkv,
        positions,
        table,
        slots,
        cache,
        None if scales is None else scales.view(torch.int16),
        q_norm,
        k_norm,
        out,
        qkv.stride(0),
        eps,
        Q_HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HEADS=heads,
        PAIRS=pairs,
        ROTATED=table.shape[1] // 2,
        INTERLEAVED=is_interleaved,
        EARLY=early,
        MARKS_NONFINITE=marks_nonfinite,
        BLOCK_SIZE=cache.shape[1],
        num_warps=_WARPS,
        launch_pdl=early,
    )
    return out


def rope_store_torch(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    slots: Tensor,
    cache: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    is_interleaved: bool = False,
    scales: Tensor | None = None,
) -> Tensor:
    q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm_torch(q, q_norm, eps), rms_norm_torch(k, k_norm, eps)
    cos, sin = table[positions].to(qkv.dtype).unsqueeze(1).chunk(2, dim=-1)  # [T, 1, dim / 2]
    dim = table.shape[1]

    def turned(heads: Tensor) -> Tensor:
        rotated = heads[..., :dim]
        first, second = (rotated[..., ::2], rotated[..., 1::2]) if is_interleaved else rotated.chunk(2, dim=-1)
        pairs = (torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin))
        together = torch.stack(pairs, dim=-1).flatten(-2) if is_interleaved else torch.cat(pairs, dim=-1)
        return torch.cat((together, heads[..., dim:]), dim=-1)

    store_kv_torch(torch.stack((turned(k), v), dim=1), cache, slots, scales)
    return turned(q)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])  # otherwise odd numbers of tokens compile a variant
def _rope_store_kernel(
    qkv,
    positions,
    table,
    slots,
    cache,
    scales,  # of 8-bit floats, int16; None: the cache has another type
    q_norm,  # or None
    k_norm,  # or None
    out,
    stride,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EARLY: tl.constexpr,
    MARKS_NONFINITE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Program (token, group): `HEADS` of a token's heads, each as pairs. The first `ROTATED` pairs are rotated."""
    let_next_start(EARLY)
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    pairs = tl.arange(0, PAIRS)[None, :]
    HALF: tl.constexpr = HEAD_DIM // 2
    # The places of a pair's numbers in a head. Pairs that are not rotated come last.
    lefts, rights = pairs, pairs + HALF
    if INTERLEAVED:
        lefts, rights = 2 * pairs, 2 * pairs + 1
    if ROTATED < HALF:
        lefts = tl.where(pairs < ROTATED, lefts, pairs + ROTATED)
        rights = tl.where(pairs < ROTATED, rights if INTERLEAVED else pairs + ROTATED, pairs + HALF)
    DTYPE: tl.constexpr = qkv.dtype.element_ty
    is_query = heads < Q_HEADS
    is_value = heads >= Q_HEADS + KV_HEADS
    is_key = (heads >= Q_HEADS) & (heads < Q_HEADS + KV_HEADS)
    in_half = pairs < HALF
    inside = (heads < Q_HEADS + 2 * KV_HEADS) & in_half
    wait_for_inputs(EARLY)
    # Volatile, so that all loads are in flight at once: otherwise the compiler delays each until it is needed.
    position, slot = tl.load(positions + token, volatile=True), tl.load(slots + token, volatile=True)
    own = qkv + token * stride + heads * HEAD_DIM
    first = tl.load(own + lefts, mask=inside, other=0.0, volatile=True)
    second = tl.load(own + rights, mask=inside, other=0.0, volatile=True)
    # A key's program reads the value, too, because the key marks whether the value is finite.
    if MARKS_NONFINITE:
        value = own + KV_HEADS * HEAD_DIM
        value_first = tl.load(value + lefts, mask=is_key & in_half, other=0.0, volatile=True)
        value_second = tl.load(value + rights, mask=is_key & in_half, other=0.0, volatile=True)
    angles = table + position * (2 * ROTATED) + pairs
    cos = tl.load(angles, mask=pairs < ROTATED, other=1.0)
    sin = tl.load(angles + ROTATED, mask=pairs < ROTATED, other=0.0)
    cos, sin = cos.to(DTYPE).to(tl.float32), sin.to(DTYPE).to(tl.float32)

    a, b = first.to(tl.float32), second.to(tl.float32)
    if q_norm is not None:
        scale = inverse_rms(tl.sum(a * a + b * b, axis=1), HEAD_DIM, eps)[:, None]
        q_first, q_second = _both(q_norm, lefts, rights, in_half)
        k_first, k_second = _both(k_norm, lefts, rights, in_half)
        first_factor, second_factor = tl.where(is_query, q_first, k_first), tl.where(is_query, q_second, k_second)
        a = scale_and_weigh(a, scale, first_factor, DTYPE).to(tl.float32)
        b = scale_and_weigh(b, scale, second_factor, DTYPE).to(tl.float32)
    turned_first = ((a * cos).to(DTYPE).to(tl.float32) - b * sin).to(DTYPE)
    turned_second = ((b * cos).to(DTYPE).to(tl.float32) + a * sin).to(DTYPE)

    query = out + (token * Q_HEADS + heads) * HEAD_DIM
    tl.store(query + lefts, turned_first, mask=is_query & in_half)
    tl.store(query + rights, turned_second, mask=is_query & in_half)
    # In the cache, as here, a token's keys are followed by its values.
    KEPT: tl.constexpr = cache.dtype.element_ty
    kept = cache + (slot * 2 * KV_HEADS + heads - Q_HEADS) * HEAD_DIM
    is_kept = inside & (heads >= Q_HEADS) & (slot >= 0)
    if scales is not None:
        kept_first, kept_second = tl.where(is_value, first, turned_first), tl.where(is_value, second, turned_second)
        largest = tl.maximum(largest_bits(kept_first), largest_bits(kept_second))
        # A value that is not finite becomes 0 and its key NaN. Without marks, its own scale becomes NaN.
        is_nan = largest >= INFINITE
        if MARKS_NONFINITE:
            own_value = tl.maximum(largest_bits(value_first), largest_bits(value_second))
            is_nan = (is_nan & ~is_value) | (own_value >= INFINITE)
        largest = tl.where((largest >= INFINITE) | is_nan, 0, largest)
        exponent = scale_exponent(largest, DTYPE)
        codes = tl.where(largest == 0, 0.0, kept_first), tl.where(largest == 0, 0.0, kept_second)
        pair = scale_place(slot // BLOCK_SIZE, (heads - Q_HEADS) % KV_HEADS, slot % BLOCK_SIZE, KV_HEADS, BLOCK_SIZE)
        is_head = (heads >= Q_HEADS) & (heads < Q_HEADS + 2 * KV_HEADS) & (slot >= 0)
        tl.store(scales + 2 * pair + is_value.to(tl.int32), scale_bits(exponent, is_nan), mask=is_head)
        tl.store(kept + lefts, encode(codes[0], exponent, DTYPE), mask=is_kept)
        tl.store(kept + rights, encode(codes[1], exponent, DTYPE), mask=is_kept)
        return
    kept_first = tl.where(is_value, first, turned_first).to(KEPT)
    kept_second = tl.where(is_value, second, turned_second).to(KEPT)
    if MARKS_NONFINITE:
        zeros = zero_if_finite(kept_first) + zero_if_finite(kept_second)
        zeros += zero_if_finite(value_first.to(KEPT)) + zero_if_finite(value_second.to(KEPT))
        is_nonfinite = tl.sum(zeros, axis=1)[:, None] != 0.0
        mark = tl.where(is_value, 0.0, float("nan")).to(KEPT)
        kept_first = tl.where(is_nonfinite, mark, kept_first)
        kept_second = tl.where(is_nonfinite, mark, kept_second)
    tl.store(kept + lefts, kept_first, mask=is_kept)
    tl.store(kept + rights, kept_second, mask=is_kept)


@triton.jit
def _both(places, lefts, rights, mask):
    return tl.load(places + lefts, mask=mask, other=0.0), tl.load(places + rights, mask=mask, other=0.0)
