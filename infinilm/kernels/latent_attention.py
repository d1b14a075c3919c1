"""Latent attention with absorbed projections over a paged cache of latent vectors; see `latent_kernels.py`.

In a cache `[blocks, block_size, 1, 1, rank + rope]` each token has a vector of `rank` numbers, which is key and value
of all heads, and a rotated key of `rope` numbers. A head's query has both parts: `query` `[T, heads, rank]`,
contiguous, and `turned` `[T, heads, rope]`, contiguous.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from infinilm.kernels.attention_order import IN_ORDER, MAX_CHUNKS
from infinilm.kernels.early_launch import launches_early
from infinilm.kernels.latent_kernels import (
    decode_kernel,
    heads_kernel,
    merge_kernel,
    prefill_kernel,
    store_kernel,
)
from infinilm.kernels.nonfinite import mark_nonfinite
from infinilm.kernels.norm import rms_norm_torch


class Tile(NamedTuple):
    """How many keys a program takes at a time, and how it is launched."""

    keys: int
    num_warps: int
    num_stages: int


_LEAST_CHUNK = 256
TILES = {0: Tile(16, 4, 1), 16: Tile(32, 4, 2), 32: Tile(32, 8, 2)}
"""Tiles by their least number of rows. 0 is for float32, which does not use tensor cores and needs registers.

The number of keys must be the same for all rows of a type, or results would depend on the kernel that computes them.
"""


def multiply_heads(x: Tensor, matrix: Tensor) -> Tensor:
    """Each head's rows times its own matrix: `x` `[T, heads, in]`, `matrix` `[heads, in, out]` to `[T, heads, out]`.

    The last dimension of `x` is contiguous; the matrix may be transposed.
    """
    (num_rows, heads, in_size), out_size = x.shape, matrix.shape[2]
    out = torch.empty((num_rows, heads, out_size), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    is_exact = x.dtype == torch.float32  # products without tensor cores: small tiles
    rows, outputs = (16, 32) if is_exact else (64, 128)
    early = launches_early(x.device)
    heads_kernel[heads, triton.cdiv(out_size, outputs), triton.cdiv(num_rows, rows)](
        x,
        matrix,
        out,
        num_rows,
        x.stride(0),
        x.stride(1),
        *matrix.stride(),
        HEADS=heads,
        IN=in_size,
        OUT=out_size,
        BLOCK_ROWS=rows,
        BLOCK_IN=32 if is_exact else 64,
        BLOCK_OUT=outputs,
        EARLY=early,
        num_warps=4,
        num_stages=3,
        launch_pdl=early,
    )
    return out


def store_latents(
    latents: Tensor,
    query: Tensor,
    positions: Tensor,
    table: Tensor,
    slots: Tensor,
    cache: Tensor,
    *,
    weight: Tensor,
    eps: float,
    is_interleaved: bool,
) -> Tensor:
    """Norm the vectors, rotate keys and queries, store vectors and keys; returns the queries `[T, heads, rope]`.

    `latents` `[T, rank + rope]` and `query` `[T, heads, rope]`, contiguous in the last dimension; `weight` `[rank]` and
    `eps` are the norm's. `positions`, `table`, `slots` and the rounding are as in `rope_store`.
    """
    num_tokens, heads, rope = query.shape
    rank = latents.shape[1] - rope
    rotated = torch.empty((num_tokens, heads, rope), dtype=query.dtype, device=query.device)
    if num_tokens == 0:
        return rotated
    early = launches_early(query.device)
    store_kernel[(num_tokens,)](
        latents,
        weight,
        query,
        positions,
        table,
        slots,
        cache,
        rotated,
        latents.stride(0),
        query.stride(0),
        query.stride(1),
        eps,
        HEADS=heads,
        RANK=rank,
        ROPE=rope,
        PAD_HEADS=triton.next_power_of_2(heads),
        PAD_RANK=triton.next_power_of_2(rank),
        PAD_PAIRS=triton.next_power_of_2(rope // 2),
        INTERLEAVED=is_interleaved,
        EARLY=early,
        num_warps=4,
        launch_pdl=early,
    )
    return rotated


def store_latents_torch(
    latents: Tensor,
    query: Tensor,
    positions: Tensor,
    table: Tensor,
    slots: Tensor,
    cache: Tensor,
    *,
    weight: Tensor,
    eps: float,
    is_interleaved: bool,
) -> Tensor:
    rope = query.shape[2]
    cos, sin = table[positions].to(query.dtype).unsqueeze(1).chunk(2, dim=-1)

    def turned(heads: Tensor) -> Tensor:
        first, second = (heads[..., ::2], heads[..., 1::2]) if is_interleaved else heads.chunk(2, dim=-1)
        pairs = (torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin))
        return torch.stack(pairs, dim=-1).flatten(-2) if is_interleaved else torch.cat(pairs, dim=-1)

    key = turned(latents[:, None, -rope:])[:, 0]
    kept = torch.cat((rms_norm_torch(latents[:, :-rope], weight, eps), key), dim=1)
    is_stored = slots >= 0
    new = mark_nonfinite(kept[is_stored, None, None].to(cache.dtype))
    cache.flatten(0, 1).index_copy_(0, slots[is_stored].long(), new)
    return turned(query)


def latent_decode(
    query: Tensor, turned: Tensor, cache: Tensor, tables: Tensor, context_lens: Tensor, *, scale: float
) -> Tensor:
    """Attend one new token per row to the row's tokens in the cache: `[B, heads, rank]`.

    `tables` `[B, max_blocks]` int32 has the blocks of each row, `context_lens` `[B]` int32 the number of tokens in
    them; a row of 0 tokens gives zeros.
    """
    rows, heads, rank = query.shape
    output = query.new_empty(query.shape)
    if rows == 0:
        return output
    block_size = cache.shape[1]
    num_chunks = min(MAX_CHUNKS.value, max(1, triton.cdiv(tables.shape[1] * block_size, _LEAST_CHUNK)))
    results = torch.empty((rows, heads, num_chunks, rank), dtype=torch.float32, device=query.device)
    sums = torch.empty((rows, heads, num_chunks, 2), dtype=torch.float32, device=query.device)
    is_exact = query.dtype == torch.float32
    tile_rows = 16 if is_exact else min(64, max(16, triton.next_power_of_2(heads)))
    options = _options(query, turned, cache, tile_rows)
    early = launches_early(query.device)
    decode_kernel[triton.cdiv(heads, tile_rows), rows, num_chunks](
        query,
        turned,
        cache,
        tables,
        context_lens,
        results,
        sums,
        scale * math.log2(math.e),
        query.stride(0),
        query.stride(1),
        tables.stride(0),
        EARLY=early,
        launch_pdl=early,
        **options,
    )
    merge_kernel[heads, rows](
        results,
        sums,
        context_lens,
        output,
        num_chunks,
        HEADS=heads,
        RANK=rank,
        PAD_RANK=options["PAD_RANK"],
        EARLY=early,
        num_warps=4,
        launch_pdl=early,
        **IN_ORDER,
    )
    return output


def latent_prefill(
    query: Tensor,
    turned: Tensor,
    cache: Tensor,
    tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Attend each request's new tokens to its tokens in the cache, causally, their own included: `[T, heads, rank]`.

    `query_starts` `[N + 1]` and `context_lens` `[N]` int32 are as in `prefill_attention`. A request of context length 0
    is skipped: its rows of `out` keep their contents, or are zeros without `out`.
    """
    num_tokens, heads, _ = query.shape
    num_requests = len(context_lens)
    if out is None:
        out = query.new_zeros(query.shape)
    if num_tokens == 0 or num_requests == 0:
        return out
    tile_rows = 16 if query.dtype == torch.float32 else 32
    options = _options(query, turned, cache, tile_rows)
    tile_heads = min(tile_rows, triton.next_power_of_2(heads))
    num_tiles = num_tokens // (tile_rows // tile_heads) + num_requests
    prefill_kernel[num_tiles, triton.cdiv(heads, tile_heads)](
        query,
        turned,
        cache,
        tables,
        query_starts,
        context_lens,
        out,
        num_requests,
        scale * math.log2(math.e),
        query.stride(0),
        query.stride(1),
        tables.stride(0),
        TILE_HEADS=tile_heads,
        **options,
    )
    return out


def _options(query: Tensor, turned: Tensor, cache: Tensor, tile_rows: int) -> dict[str, Any]:
    """The options of both kernels. They must not depend on the number of rows, so that no row's result does.

    One accumulator of 64 x 512, or two of 32 x 512 for a prompt's chunk and its previous chunks, take 128 registers in
    each of 256 threads.
    """
    heads, rank = query.shape[1:]
    rope, block_size = turned.shape[2], cache.shape[1]
    tile = TILES[0 if query.dtype == torch.float32 else min(tile_rows, 32)]
    return {
        "HEADS": heads,
        "RANK": rank,
        "ROPE": rope,
        "PAD_RANK": max(16, triton.next_power_of_2(rank)),
        "PAD_ROPE": max(16, triton.next_power_of_2(rope)),
        "BLOCK_SIZE": block_size,
        "TILE_ROWS": tile_rows,
        "TILE_KEYS": tile.keys,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **IN_ORDER,
    }


def latent_attention_torch(
    query: Tensor,
    turned: Tensor,
    cache: Tensor,
    tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
) -> Tensor:
    """The reference of decode and prefill, one request after another, in float32."""
    rank = query.shape[2]
    out = torch.zeros_like(query)
    starts = query_starts.tolist()
    for request, context_len in enumerate(context_lens.tolist()):
        if context_len == 0:
            continue
        own = slice(starts[request], starts[request + 1])
        blocks = tables[request, : -(-context_len // cache.shape[1])].long()
        keys = cache[blocks].flatten(0, 1)[:context_len, 0, 0].float()
        queries = torch.cat((query[own], turned[own]), dim=-1).float()
        score = torch.einsum("qhd,td->hqt", queries, keys) * scale
        places = torch.arange(context_len, device=query.device)
        is_seen = places <= places[context_len - len(queries) :, None]
        weight = score.masked_fill(~is_seen, float("-inf")).softmax(-1)
        out[own] = torch.einsum("hqt,td->qhd", weight, keys[:, :rank].nan_to_num(0.0)).to(query.dtype)
    return out
