"""Attention of several new tokens per request over a paged KV cache: prompts, chunks of prompts, and mixed steps.

*Tiles.* The new tokens of all requests are concatenated. A program computes a tile of one request's tokens for one
kv head; the query heads that share the kv head are rows of the tile next to each other, so that keys and values are
read once for all of them and a short prompt still fills the tile. Programs find their tile's request themselves: the
host sends only where the requests begin, and at most one program per request and kv head has nothing to do.

*Keys.* Their tiles begin at multiples of the tile's size in the request, however much of it is cached and wherever a
chunk of it begins. So a token's output is bitwise the same for any chunking and in any batch. Without a window only the
last tiles of keys need a mask: all others are seen by the whole tile.

*Order.* The tiles with the most keys are launched first, so that the short ones fill the gaps at the end.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinilm.kernels.decode_attention_kernels import capped

_LOG2_E = tl.constexpr(1.4426950408889634)


class Tiles(NamedTuple):
    """How the work is split and how a program is run."""

    rows: int  # query rows of a program: tokens times the query heads of a kv head
    keys: int  # keys per iteration
    num_warps: int
    num_stages: int


def choose_tiles(dtype: torch.dtype, head_dim: int) -> Tiles:
    """A good choice for Hopper.

    128 rows are two of its matrix instructions, one for each group of four warps, and reuse each key enough; below 64
    keys the instructions wait for shared memory. An accumulator of 128 x 64 takes 32 registers of every thread, scores
    and output together at most 160 of the 255, so nothing spills.
    """
    if dtype == torch.float32:  # exact products don't use tensor cores: small tiles, or registers run out
        return Tiles(rows=16, keys=16, num_warps=4, num_stages=1)
    if head_dim <= 128:
        return Tiles(rows=128, keys=64, num_warps=8, num_stages=3)
    if head_dim <= 256:
        return Tiles(rows=128, keys=64, num_warps=8, num_stages=2)  # or shared memory runs out
    return Tiles(rows=64, keys=32, num_warps=8, num_stages=2)


@triton.jit
def _find_request(query_starts, num_requests, tile, TOKENS: tl.constexpr):
    """The tile's request. Request i's tiles begin with number `query_starts[i] // TOKENS + i`, so that all fit."""
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
    output,  # [rows, PAD_DIM]
    total,  # [rows], the sum of exponentials
    largest,  # [rows], the largest score
    query,  # [rows, PAD_DIM]
    positions,  # [rows], the rows' places in the request
    cache,  # at the head's keys
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
    PAD_DIM: tl.constexpr = query.shape[1]
    dims = tl.arange(0, PAD_DIM)
    for first in range(begin, end, TILE_KEYS):
        keys = first + tl.arange(0, TILE_KEYS)
        inside = keys < end
        if BLOCK_SIZE % TILE_KEYS == 0:
            block = tl.load(table + first // BLOCK_SIZE).to(tl.int64)
        elif IS_MASKED:
            block = tl.load(table + keys // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        else:
            block = tl.load(table + keys // BLOCK_SIZE).to(tl.int64)
        places = block * block_stride + keys % BLOCK_SIZE * (2 * KV_HEADS * HEAD_DIM)
        pointers = cache + places[:, None] + dims[None, :]
        key = _load(pointers, inside, dims, IS_MASKED, HEAD_DIM, PAD_DIM).to(query.dtype)
        score = tl.dot(query, key.trans(), input_precision="ieee")
        factor = scale
        if cap is not None:
            score = capped(score * scale, cap)
            factor = 1.0
        if IS_MASKED:
            is_seen = keys[None, :] <= positions[:, None]
            if HAS_WINDOW:
                is_seen &= keys[None, :] > positions[:, None] - window
            score = tl.where(is_seen, score, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, 1) * factor)
        shift = new_largest
        if HAS_WINDOW:  # a row may have seen nothing yet; without a window the first tile has a key for every row
            shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weight = tl.exp2(score * factor - shift[:, None])
        fade = tl.exp2(largest - shift)
        value = _load(pointers + KV_HEADS * HEAD_DIM, inside, dims, IS_MASKED, HEAD_DIM, PAD_DIM).to(query.dtype)
        output = tl.dot(weight.to(value.dtype), value, output * fade[:, None], input_precision="ieee")
        total = total * fade + tl.sum(weight, 1)
        largest = new_largest
    return output, total, largest


@triton.jit(
    do_not_specialize=["num_requests", "table_stride", "window"],
    do_not_specialize_on_alignment=["tables", "query_starts", "context_lens"],
)
def _prefill_kernel(
    query,
    cache,
    tables,
    query_starts,
    context_lens,
    target,
    sinks,  # None: there are none
    num_requests,
    scale,  # includes log2(e): the exponentials are of base 2
    cap,  # includes it, too; None: scores are not capped
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
    cache += head * HEAD_DIM
    table = tables + request.to(tl.int64) * table_stride

    output = tl.zeros([TILE_ROWS, PAD_DIM], tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    largest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    num_done = 0
    if HAS_WINDOW:
        num_done = tl.maximum(first + shift - window + 1, 0) // TILE_KEYS * TILE_KEYS
    else:
        num_done = (first + shift + 1) // TILE_KEYS * TILE_KEYS
        output, total, largest = _attend(
            output,
            total,
            largest,
            packed,
            tokens + shift,
            cache,
            table,
            0,
            num_done,
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
    output, total, largest = _attend(
        output,
        total,
        largest,
        packed,
        tokens + shift,
        cache,
        table,
        num_done,
        last + shift + 1,
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
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + heads) * _LOG2_E - largest)
    target += (tokens.to(tl.int64)[:, None] * (KV_HEADS * GROUP) + heads[:, None]) * HEAD_DIM + dims[None, :]
    rounded = (output / total[:, None]).to(target.dtype.element_ty)
    tl.store(target, rounded, mask=is_real[:, None] & (dims < HEAD_DIM)[None, :])


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
    out: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """Attend each request's new tokens to its tokens in the cache, causally, their own keys and values included.

    `query` is `[T, heads, head_dim]`, strided by token only; `cache` `[blocks, block_size, 2, kv_heads, head_dim]`,
    contiguous; `tables` `[N, max_blocks]` int32 the requests' blocks; `query_starts` `[N + 1]` int32 where each
    request's tokens begin in the query, and where the last one's end; `context_lens` `[N]` int32 its tokens in the
    cache, the new ones being the last of them. With a `window` a token sees the last `window` of its context.
    With a `cap` scores are `cap * tanh(score / cap)`. `sinks` `[heads]` float32 are scores of a key without a value.
    Returns `[T, heads, head_dim]`.

    A request of context length 0 is left out: its rows of `out`, which is contiguous, stay as they are, or zeros.
    """
    num_tokens, heads, head_dim = query.shape
    block_size, _, kv_heads, _ = cache.shape[1:]
    num_requests = len(context_lens)
    if out is None:
        out = query.new_zeros(query.shape)
    if num_tokens == 0 or num_requests == 0:
        return out
    tiles = tiles or choose_tiles(query.dtype, head_dim)
    group = heads // kv_heads
    tile_rows = max(tiles.rows, triton.next_power_of_2(group))
    num_tiles = num_tokens // (tile_rows // group) + num_requests
    _prefill_kernel[num_tiles, kv_heads](
        query,
        cache,
        tables,
        query_starts,
        context_lens,
        out,
        sinks,
        num_requests,
        scale * _LOG2_E.value,
        None if cap is None else cap * _LOG2_E.value,
        0 if window is None else window,
        query.stride(0),
        cache.stride(0),
        tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PAD_DIM=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=block_size,
        TILE_ROWS=tile_rows,
        TILE_KEYS=tiles.keys,
        HAS_WINDOW=window is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
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
) -> Tensor:
    """The reference, one request after another."""
    heads, head_dim = query.shape[1:]
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
