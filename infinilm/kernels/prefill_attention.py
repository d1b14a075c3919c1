"""Attention of several new tokens per request over a paged KV cache: prompts, chunks of prompts, and mixed steps.

*Tiles.* The new tokens of all requests are concatenated. A program computes a tile of one request's tokens for one
kv head; the query heads that share the kv head are adjacent rows of the tile, so that keys and values are read once for
all of them and a short prompt still fills the tile. Programs find their tile's request themselves: the host sends only
the start of each request, and at most one program per request and kv head has nothing to do.

*Keys.* They are processed in the order of `attention_order`. Usually all tokens of a tile have chunks of one size. If a
tile has tokens with two sizes, it is computed once for each size. Without a window only the last tiles of keys need a
mask: the whole tile sees all others.

*Order.* The tiles with the most keys are launched first, so that the short ones fill the gaps at the end.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from infinilm.kernels.attention_order import (
    IN_ORDER,
    LOG2_E,
    NO_WINDOW,
    SUM_COLUMNS,
    add_tile,
    capped,
    chunk_shift,
    finish,
    key_tile,
    merge,
    no_keys,
)
from infinilm.kernels.fp8_cache import as_pairs, decoded_cache
from infinilm.kernels.fp8_kernels import join_pairs, scale_place, score_pairs, split_pairs, split_scales, unpack_scaled


class Tiles(NamedTuple):
    """How the work is split and how a program is run."""

    rows: int  # query rows of a program: tokens times the query heads of a kv head
    num_warps: int
    num_stages: int


def choose_tiles(dtype: torch.dtype, head_dim: int, *, is_wide: bool = True) -> Tiles:
    """A good choice for Hopper. If not `is_wide`, fewer registers are available.

    128 rows are two of Hopper's matrix instructions, one for each group of four warps, and reuse each key enough. An
    accumulator of 128 x 64 takes 32 registers of every thread. Scores, a chunk's output and that of the previous chunks
    take 160 of the 255, so nothing spills.
    """
    if dtype == torch.float32:  # exact products don't use tensor cores: small tiles, or registers run out
        return Tiles(rows=16, num_warps=4, num_stages=1)
    if head_dim <= 128 and is_wide:
        return Tiles(rows=128, num_warps=8, num_stages=3)
    return Tiles(rows=64, num_warps=8, num_stages=2)  # or registers run out


def can_gather(query: Tensor) -> bool:
    """Whether `prefill_attention` supports gathered keys and values for these queries. Hopper's copy engine loads
    them."""
    is_hopper = query.device.type == "cpu" or torch.cuda.get_device_capability(query.device) >= (9, 0)
    head_dim = query.shape[2]
    return (
        is_hopper and query.dtype != torch.float32 and head_dim >= 16 and head_dim == triton.next_power_of_2(head_dim)
    )


@triton.jit
def _find_request(query_starts, num_requests, tile, TOKENS: tl.constexpr):
    """The tile's request. Request i's tiles are numbered from `query_starts[i] // TOKENS + i`, so that all fit."""
    low = 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _load(pointers, inside, dims, IS_MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, PAD_DIM: tl.constexpr):
    """Rows of `HEAD_DIM` numbers, padded with zeros; rows that are not `inside` are not read."""
    if IS_MASKED:
        return tl.load(pointers, mask=inside[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM < PAD_DIM:  # noqa: RET505 - Triton compiles only one of the branches
        return tl.load(pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _attend(
    query,  # [rows, PAD_DIM]; with scales the even columns
    odd_query,  # with scales the odd columns
    positions,  # [rows], the rows' places in the request
    cache,  # at the head's keys
    scales,  # the cache has codes in pairs, see `fp8_kernels`, with these scales; None: it has numbers
    gathered,  # None: they are read from the cache
    head,
    table,
    begin,  # a multiple of TILE_KEYS
    end,
    num_unmasked,  # keys that all rows see
    scale,
    cap,  # None: scores are not capped
    window,
    block_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_ORDERED: tl.constexpr,
):
    """The state (see `attention_order`) after the keys from `begin` to before `end`."""
    PAD_DIM: tl.constexpr = query.shape[1] if scales is None else 2 * query.shape[1]
    output, total, largest = no_keys(query.shape[0], PAD_DIM, SUM_COLUMNS if IS_ORDERED else 1)
    if not HAS_WINDOW:
        output, total, largest = _attend_tiles(
            output,
            total,
            largest,
            query,
            odd_query,
            positions,
            cache,
            scales,
            gathered,
            head,
            table,
            begin,
            tl.minimum(end, num_unmasked),
            scale,
            cap,
            window,
            block_stride,
            KV_HEADS,
            HEAD_DIM,
            BLOCK_SIZE,
            TILE_KEYS,
            False,
            False,
        )
        begin = tl.minimum(tl.maximum(begin, num_unmasked), end)
    return _attend_tiles(
        output,
        total,
        largest,
        query,
        odd_query,
        positions,
        cache,
        scales,
        gathered,
        head,
        table,
        begin,
        end,
        scale,
        cap,
        window,
        block_stride,
        KV_HEADS,
        HEAD_DIM,
        BLOCK_SIZE,
        TILE_KEYS,
        True,
        HAS_WINDOW,
    )


@triton.jit
def _attend_tiles(
    output,  # the state, see `attention_order`
    total,
    largest,
    query,  # this and the next four: see `_attend`
    odd_query,
    positions,
    cache,
    scales,
    gathered,
    head,
    table,
    begin,  # a multiple of TILE_KEYS
    end,
    scale,
    cap,  # None: scores are not capped
    window,
    block_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    IS_MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Attend to the keys from `begin` to before `end`: all rows to all of them, unless `IS_MASKED`."""
    PAD_WIDTH: tl.constexpr = query.shape[1]
    WIDTH: tl.constexpr = HEAD_DIM if scales is None else HEAD_DIM // 2
    dims = tl.arange(0, PAD_WIDTH)
    for first in range(begin, end, TILE_KEYS):
        keys = first + tl.arange(0, TILE_KEYS)
        inside = keys < end
        if gathered is not None:
            block = 0
        elif BLOCK_SIZE % TILE_KEYS == 0:
            block = tl.load(table + first // BLOCK_SIZE).to(tl.int64)
        elif IS_MASKED:
            block = tl.load(table + keys // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        else:
            block = tl.load(table + keys // BLOCK_SIZE).to(tl.int64)
        if gathered is not None:
            key = gathered.load([first, head * HEAD_DIM])
        else:
            places = block * block_stride + keys % BLOCK_SIZE * (2 * KV_HEADS * WIDTH)
            pointers = cache + places[:, None] + dims[None, :]
            key = _load(pointers, inside, dims, IS_MASKED, WIDTH, PAD_WIDTH)
        if scales is not None:
            both = scales + scale_place(block, head, keys % BLOCK_SIZE, KV_HEADS, BLOCK_SIZE)
            key_scale, value_scale = split_scales(tl.load(both, mask=inside, other=0) if IS_MASKED else tl.load(both))
            score = score_pairs(query, odd_query, key, key_scale, "ieee")
        else:
            score = tl.dot(query, key.to(query.dtype).trans(), input_precision="ieee")
        factor = scale
        if cap is not None:
            score = capped(score * scale, cap)
            factor = 1.0
        if IS_MASKED:
            is_seen = keys[None, :] <= positions[:, None]
            if HAS_WINDOW:
                is_seen &= keys[None, :] > positions[:, None] - window
            score = tl.where(is_seen, score, float("-inf"))
        if gathered is not None:
            value = gathered.load([first, (KV_HEADS + head) * HEAD_DIM])
        else:
            value = _load(pointers + KV_HEADS * WIDTH, inside, dims, IS_MASKED, WIDTH, PAD_WIDTH)
        if scales is not None:
            value, odd_value = unpack_scaled(value, value_scale, query.dtype)
            value = join_pairs(value, odd_value)
        output, total, largest = add_tile(output, total, largest, score, value.to(query.dtype), factor, "ieee")
    return output, total, largest


@triton.jit(
    do_not_specialize=["num_requests", "table_stride", "window"],
    do_not_specialize_on_alignment=["tables", "query_starts", "context_lens"],
)
def _prefill_kernel(
    query,
    cache,
    scales,  # see `_attend`
    gathered,  # a descriptor of the only request's keys and values in order; None: they are read from the cache
    tables,
    query_starts,
    context_lens,
    target,
    sinks,  # None: there are none
    num_requests,
    scale,  # includes log2(e): the exponentials are of base 2
    cap,  # includes log2(e), too; None: scores are not capped
    window,
    query_stride,
    block_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_ORDERED: tl.constexpr,
):
    """Program (tile, head), see above."""
    TOKENS: tl.constexpr = TILE_ROWS // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    request = _find_request(query_starts, num_requests, tile, TOKENS)
    begin = tl.load(query_starts + request)
    end = tl.load(query_starts + request + 1)
    context_len = tl.load(context_lens + request)
    first = begin + (tile - begin // TOKENS - request) * TOKENS
    if (first >= end) | (context_len == 0):
        return
    last = tl.minimum(first + TOKENS, end) - 1
    rows = tl.arange(0, TILE_ROWS)
    # Rows past the last token repeat its rows and are not written, so they need no mask.
    tokens = tl.minimum(first + rows // GROUP, last)
    is_real = (rows < TOKENS * GROUP) & (first + rows // GROUP <= last)
    shift = context_len - end  # from places in the batch to places in the request
    dims = tl.arange(0, PAD_DIM)
    heads = head * GROUP + rows % GROUP
    query += tokens.to(tl.int64)[:, None] * query_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    packed = _load(query, is_real, dims, False, HEAD_DIM, PAD_DIM)
    odd_packed = None
    if scales is not None:
        packed, odd_packed = split_pairs(packed)
    cache += head * (HEAD_DIM if scales is None else HEAD_DIM // 2)
    table = tables + request.to(tl.int64) * table_stride

    positions = tokens + shift
    chunk_size = chunk_shift(positions + 1, window)
    first_key = 0
    num_unmasked = 0  # keys that all rows see
    if HAS_WINDOW:
        first_key = tl.maximum(first + shift - window + 1, 0) // TILE_KEYS * TILE_KEYS
    else:
        num_unmasked = (first + shift + 1) // TILE_KEYS * TILE_KEYS
    end_key = last + shift + 1
    target += (tokens.to(tl.int64)[:, None] * (KV_HEADS * GROUP) + heads[:, None]) * HEAD_DIM + dims[None, :]
    sink = None
    if sinks is not None:
        sink = tl.load(sinks + heads)
    is_inside = (dims < HEAD_DIM)[None, :]
    if IS_ORDERED:
        for size in range(chunk_shift(first + shift + 1, window), chunk_shift(end_key, window) + 1):
            output, total, largest = no_keys(TILE_ROWS, PAD_DIM)
            for chunk in range(first_key >> size, (end_key - 1 >> size) + 1):
                chunk_output, chunk_total, chunk_largest = _attend(
                    packed,
                    odd_packed,
                    positions,
                    cache,
                    scales,
                    gathered,
                    head,
                    table,
                    tl.maximum(chunk << size, first_key),
                    tl.minimum((chunk + 1) << size, end_key),
                    num_unmasked,
                    scale,
                    cap,
                    window,
                    block_stride,
                    KV_HEADS,
                    HEAD_DIM,
                    BLOCK_SIZE,
                    TILE_KEYS,
                    HAS_WINDOW,
                    IS_ORDERED,
                )
                output, total, largest = merge(output, total, largest, chunk_output, chunk_total, chunk_largest)
            attended = finish(output, tl.max(total, 1), largest, sink).to(target.dtype.element_ty)
            tl.store(target, attended, mask=(is_real & (chunk_size == size))[:, None] & is_inside)
    else:
        output, total, largest = _attend(
            packed,
            odd_packed,
            positions,
            cache,
            scales,
            gathered,
            head,
            table,
            first_key,
            end_key,
            num_unmasked,
            scale,
            cap,
            window,
            block_stride,
            KV_HEADS,
            HEAD_DIM,
            BLOCK_SIZE,
            TILE_KEYS,
            HAS_WINDOW,
            IS_ORDERED,
        )
        attended = finish(output, tl.max(total, 1), largest, sink).to(target.dtype.element_ty)
        tl.store(target, attended, mask=is_real[:, None] & is_inside)


def prefill_attention(
    query: Tensor,
    cache: Tensor,
    tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int | None,
    cap: float | None = None,
    sinks: Tensor | None = None,
    scales: Tensor | None = None,
    out: Tensor | None = None,
    gathered: Tensor | None = None,
    is_ordered: bool = True,
    tiles: Tiles | None = None,
) -> Tensor:
    """Attend each request's new tokens to its tokens in the cache, causally, their own keys and values included.

    `query` is `[T, heads, head_dim]`; only the stride over tokens is free. `cache` `[blocks, block_size, 2, kv_heads,
    head_dim]` is contiguous. `tables` `[N, max_blocks]` int32 has the requests' blocks. `query_starts` `[N + 1]` int32
    has the first token of each request in the query, and the end of the last request. `context_lens` `[N]` int32 has
    the requests' numbers of tokens in the cache, the last of which are the new tokens. With a `window` a token sees the
    last `window` tokens of its context. With a `cap` scores are `cap * tanh(score / cap)`. `sinks` `[heads]` float32
    are scores of a key without a value. Returns `[T, heads, head_dim]`.

    A cache of 8-bit floats has `scales` (`fp8_cache.py`), and is not gathered.

    `gathered` `[n, 2, kv_heads, head_dim]` are the keys and values of the only request in order, padded with zeros to a
    multiple of `key_tile`. They are read faster than the cache; `can_gather` says for which heads.

    If not `is_ordered`, all keys are one chunk. That is faster, but a token's bits differ from those of decoding.

    A request of context length 0 is skipped: its rows of `out` keep their contents, or are zeros without `out`. `out`
    is contiguous.
    """
    num_tokens, heads, head_dim = query.shape
    block_size, _, kv_heads, _ = cache.shape[1:]
    num_requests = len(context_lens)
    if out is None:
        out = query.new_zeros(query.shape)
    if num_tokens == 0 or num_requests == 0:
        return out
    # Unpacking 8-bit floats takes registers, and so does merging chunks.
    tiles = tiles or choose_tiles(query.dtype, head_dim, is_wide=scales is None or not is_ordered)
    keys = key_tile(query.dtype, head_dim)
    group = heads // kv_heads
    tile_rows = max(tiles.rows, triton.next_power_of_2(group))
    num_tiles = num_tokens // (tile_rows // group) + num_requests
    if scales is not None:
        cache, scales = as_pairs(cache, scales)
    _prefill_kernel[num_tiles, kv_heads](
        query,
        cache,
        scales,
        None if gathered is None else TensorDescriptor.from_tensor(gathered.flatten(1), [keys, head_dim]),
        tables,
        query_starts,
        context_lens,
        out,
        sinks,
        num_requests,
        scale * LOG2_E.value,
        None if cap is None else cap * LOG2_E.value,
        NO_WINDOW.value if window is None else window,
        query.stride(0),
        cache.stride(0),
        tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PAD_DIM=max(16 if scales is None else 32, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=block_size,
        TILE_ROWS=tile_rows,
        TILE_KEYS=keys,
        HAS_WINDOW=window is not None,
        IS_ORDERED=is_ordered,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **IN_ORDER,
    )
    return out


def prefill_attention_torch(
    query: Tensor,
    cache: Tensor,
    tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int | None,
    cap: float | None = None,
    sinks: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """The reference, one request after another."""
    heads, head_dim = query.shape[1:]
    cache = decoded_cache(cache, scales)
    kv_heads = cache.shape[3]
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    starts = query_starts.tolist()
    for request, context_len in enumerate(context_lens.tolist()):
        if context_len == 0:
            continue
        own = slice(starts[request], starts[request + 1])
        blocks = tables[request, : -(-context_len // cache.shape[1])].long()
        key, value = cache[blocks].flatten(0, 1)[:context_len].float().unbind(1)  # [context, kv_heads, head_dim]
        rows = query[own].float().view(-1, kv_heads, heads // kv_heads, head_dim)
        keys = torch.arange(context_len, device=query.device)
        places = keys[context_len - len(rows) :, None]
        is_seen = keys <= places
        if window is not None:
            is_seen &= keys > places - window
        score = torch.einsum("qkgd,tkd->kgqt", rows, key) * scale
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        score = score.masked_fill(~is_seen, float("-inf"))
        if sinks is not None:
            score = torch.cat((score, sinks.view(kv_heads, -1, 1, 1).expand(-1, -1, len(rows), -1)), dim=-1)
        weight = score.softmax(-1)[..., :context_len]
        out[own] = torch.einsum("kgqt,tkd->qkgd", weight, value).flatten(1, 2).to(query.dtype)
    return out
