"""The Triton kernels of `latent_attention`.

All query heads share one key, a latent vector of `RANK` numbers and a rotated part of `ROPE` numbers. The vector is
also the value. So heads are the rows of a tile, and a tile of keys is read once for both products.

Keys are processed in the order of `attention_order`. When decoding, a separate program computes each chunk of a row's
context, and a second kernel merges the chunks. For prompts, a program computes some heads of a few tokens.

The cache holds only NaN for tokens that are not finite (`nonfinite.py`). If some rows of a tile don't see a key that is
NaN, it is 0 as a value, so that only rows that see it become NaN.
"""

import triton
import triton.language as tl

from infinilm.kernels.attention_order import MAX_CHUNKS, NO_WINDOW, add_tile, chunk_shift, finish, merge
from infinilm.kernels.early_launch import let_next_start, wait_for_inputs
from infinilm.kernels.norm import inverse_rms, scale_and_weigh
from infinilm.kernels.prefill_attention import _find_request
from infinilm.kernels.store_kv import zero_if_finite


@triton.jit
def store_kernel(
    latents,  # at a token's vector
    weight,
    query,  # at the part of a head that is rotated
    positions,
    table,
    slots,
    cache,
    rotated,
    latent_stride,
    query_stride,
    head_stride,
    eps,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAD_HEADS: tl.constexpr,
    PAD_RANK: tl.constexpr,
    PAD_PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (token): norms its vector, rotates its key and its queries, and stores vector and key."""
    let_next_start(EARLY)
    token = tl.program_id(0).to(tl.int64)
    ranks = tl.arange(0, PAD_RANK)
    pairs = tl.arange(0, PAD_PAIRS)
    heads = tl.arange(0, PAD_HEADS)
    HALF: tl.constexpr = ROPE // 2
    in_rank, is_pair = ranks < RANK, pairs < HALF
    lefts = 2 * pairs if INTERLEAVED else pairs
    rights = 2 * pairs + 1 if INTERLEAVED else pairs + HALF
    DTYPE: tl.constexpr = latents.dtype.element_ty
    KEPT: tl.constexpr = cache.dtype.element_ty
    wait_for_inputs(EARLY)
    position, slot = tl.load(positions + token), tl.load(slots + token).to(tl.int64)
    cos = tl.load(table + position * ROPE + pairs, mask=is_pair, other=1.0).to(DTYPE).to(tl.float32)
    sin = tl.load(table + position * ROPE + HALF + pairs, mask=is_pair, other=0.0).to(DTYPE).to(tl.float32)

    own = query + token * query_stride + heads[:, None] * head_stride
    target = rotated + (token * HEADS + heads)[:, None] * ROPE
    inside = (heads < HEADS)[:, None] & is_pair[None, :]
    first = tl.load(own + lefts[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(own + rights[None, :], mask=inside, other=0.0).to(tl.float32)
    first, second = _turned(first, second, cos[None, :], sin[None, :], DTYPE)
    tl.store(target + lefts[None, :], first, mask=inside)
    tl.store(target + rights[None, :], second, mask=inside)

    latents += token * latent_stride
    wide = tl.load(latents + ranks, mask=in_rank, other=0.0).to(tl.float32)
    factor = tl.load(weight + ranks, mask=in_rank, other=0.0)
    normed = scale_and_weigh(wide, inverse_rms(tl.sum(wide * wide), RANK, eps), factor, DTYPE).to(KEPT)
    first = tl.load(latents + RANK + lefts, mask=is_pair, other=0.0).to(tl.float32)
    second = tl.load(latents + RANK + rights, mask=is_pair, other=0.0).to(tl.float32)
    first, second = _turned(first, second, cos, sin, DTYPE)
    first, second = first.to(KEPT), second.to(KEPT)
    zero = tl.sum(zero_if_finite(normed)) + tl.sum(zero_if_finite(first) + zero_if_finite(second))
    is_nonfinite = zero != 0.0
    nan = tl.full((1,), float("nan"), tl.float32).to(KEPT)
    cache += slot * (RANK + ROPE)
    tl.store(cache + ranks, tl.where(is_nonfinite, nan, normed), mask=in_rank & (slot >= 0))
    tl.store(cache + RANK + lefts, tl.where(is_nonfinite, nan, first), mask=is_pair & (slot >= 0))
    tl.store(cache + RANK + rights, tl.where(is_nonfinite, nan, second), mask=is_pair & (slot >= 0))


@triton.jit
def _turned(first, second, cos, sin, DTYPE: tl.constexpr):
    """Rotated pairs; products and sums are rounded."""
    turned = ((first * cos).to(DTYPE).to(tl.float32) - second * sin).to(DTYPE)
    return turned, ((second * cos).to(DTYPE).to(tl.float32) + first * sin).to(DTYPE)


@triton.jit
def _no_keys(M: tl.constexpr, PAD_RANK: tl.constexpr):
    """Like `no_keys`, with more columns of sums than rows. The compiler divides all products among warps like this one,
    and with fewer columns every warp would compute all rows."""
    COLUMNS: tl.constexpr = 2 * M
    output = tl.zeros([M, PAD_RANK], tl.float32)
    return output, tl.zeros([M, COLUMNS], tl.float32), tl.full([M], float("-inf"), tl.float32)


@triton.jit
def _attend(
    query,  # [rows, PAD_RANK]
    turned,  # [rows, PAD_ROPE]
    positions,  # [rows], the last token that each row sees
    cache,
    table,
    begin,  # a multiple of TILE_KEYS
    middle,  # likewise; all rows see the tiles before it
    end,
    scale,  # log2(e) included: the exponentials are of base 2
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """The state (see `attention_order`) after a chunk, the tokens from `begin` to before `end`."""
    output, total, largest = _no_keys(query.shape[0], query.shape[1])
    ranks, ropes = tl.arange(0, query.shape[1]), tl.arange(0, turned.shape[1])
    for first in range(begin, middle, TILE_KEYS):
        keys = first + tl.arange(0, TILE_KEYS)
        block = tl.load(table + keys // BLOCK_SIZE).to(tl.int64)
        places = cache + (block * BLOCK_SIZE + keys % BLOCK_SIZE)[:, None] * (RANK + ROPE)
        latent = tl.load(places + ranks[None, :], mask=(ranks < RANK)[None, :], other=0.0)
        key = tl.load(places + RANK + ropes[None, :], mask=(ropes < ROPE)[None, :], other=0.0)
        score = tl.dot(query, latent.trans(), input_precision="ieee")
        score = tl.dot(turned, key.trans(), score, input_precision="ieee")
        output, total, largest = add_tile(output, total, largest, score, latent, scale, "ieee")
    for first in range(middle, end, TILE_KEYS):
        keys = first + tl.arange(0, TILE_KEYS)
        inside = keys < end
        block = tl.load(table + keys // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        places = cache + (block * BLOCK_SIZE + keys % BLOCK_SIZE)[:, None] * (RANK + ROPE)
        mask = inside[:, None] & (ranks < RANK)[None, :]
        latent = tl.load(places + ranks[None, :], mask=mask, other=0.0)
        mask = inside[:, None] & (ropes < ROPE)[None, :]
        key = tl.load(places + RANK + ropes[None, :], mask=mask, other=0.0)
        score = tl.dot(query, latent.trans(), input_precision="ieee")
        score = tl.dot(turned, key.trans(), score, input_precision="ieee")
        score = tl.where(keys[None, :] <= positions[:, None], score, float("-inf"))
        latent = tl.where(latent == latent, latent, 0.0)  # noqa: PLR0124
        output, total, largest = add_tile(output, total, largest, score, latent, scale, "ieee")
    return output, total, largest


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tables", "context_lens"])
def decode_kernel(
    query,
    turned,
    cache,
    tables,
    context_lens,
    results,
    sums,
    scale,
    query_stride,
    head_stride,
    table_stride,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAD_RANK: tl.constexpr,
    PAD_ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (heads, row, chunk)."""
    row, index = tl.program_id(1).to(tl.int64), tl.program_id(2)
    heads = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_head = heads < HEADS
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    num_tokens = tl.load(context_lens + row)
    size = chunk_shift(num_tokens, NO_WINDOW)
    begin = index << size
    if begin >= num_tokens:
        return
    end = tl.minimum((index + 1) << size, num_tokens)
    ranks, ropes = tl.arange(0, PAD_RANK), tl.arange(0, PAD_ROPE)
    own = query + row * query_stride + heads[:, None] * head_stride + ranks[None, :]
    packed = tl.load(own, mask=is_head[:, None] & (ranks < RANK)[None, :], other=0.0)
    own = turned + (row * HEADS + heads)[:, None] * ROPE + ropes[None, :]
    packed_rope = tl.load(own, mask=is_head[:, None] & (ropes < ROPE)[None, :], other=0.0)
    output, total, largest = _attend(
        packed,
        packed_rope,
        tl.zeros_like(heads) + end - 1,
        cache,
        tables + row * table_stride,
        begin,
        begin + (end - begin) // TILE_KEYS * TILE_KEYS,
        end,
        scale,
        RANK,
        ROPE,
        BLOCK_SIZE,
        TILE_KEYS,
    )
    places = (row * HEADS + heads) * tl.num_programs(2) + index
    mask = is_head[:, None] & (ranks < RANK)[None, :]
    tl.store(results + places[:, None] * RANK + ranks[None, :], output, mask=mask)
    tl.store(sums + 2 * places, tl.max(total, 1), mask=is_head)
    tl.store(sums + 2 * places + 1, largest, mask=is_head)


@triton.jit(do_not_specialize=["num_chunks"], do_not_specialize_on_alignment=["context_lens"])
def merge_kernel(
    results,
    sums,
    context_lens,
    target,
    num_chunks,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    PAD_RANK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (head, row): merges the row's chunks; a row of no tokens gives zeros."""
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    row = tl.program_id(1)
    place = row.to(tl.int64) * HEADS + tl.program_id(0)
    ranks = tl.arange(0, PAD_RANK)[None, :]
    one = tl.arange(0, 1)
    num_tokens = tl.load(context_lens + row)
    num_used = tl.cdiv(num_tokens, 1 << chunk_shift(num_tokens, NO_WINDOW))
    chunks = ()
    # All loads start before the first result is used, so there is a single wait.
    for index in tl.static_range(MAX_CHUNKS):
        is_used = index < num_used
        own = place * num_chunks + index
        result = tl.load(results + own * RANK + ranks, mask=is_used & (ranks < RANK), other=0.0)
        total = tl.load(sums + 2 * own + one, mask=is_used & (one == 0), other=0.0)
        largest = tl.load(sums + 2 * own + 1 + one, mask=is_used & (one == 0), other=float("-inf"))
        chunks += ((result, total[:, None], largest),)  # type: ignore[assignment]
    output, total, largest = chunks[0]  # type: ignore[misc]
    for index in tl.static_range(1, MAX_CHUNKS):
        result, chunk_total, chunk_largest = chunks[index]  # type: ignore[var-annotated]
        output, total, largest = merge(output, total, largest, result, chunk_total, chunk_largest)
    output = tl.where(num_used > 0, finish(output, tl.max(total, 1), largest, None), 0.0)
    tl.store(target + place * RANK + ranks, output.to(target.dtype.element_ty), mask=ranks < RANK)


@triton.jit(
    do_not_specialize=["num_requests", "table_stride"],
    do_not_specialize_on_alignment=["tables", "query_starts", "context_lens"],
)
def prefill_kernel(
    query,
    turned,
    cache,
    tables,
    query_starts,
    context_lens,
    target,
    num_requests,
    scale,
    query_stride,
    head_stride,
    table_stride,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAD_RANK: tl.constexpr,
    PAD_ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Program (tile, heads): `TILE_HEADS` heads of some tokens. The tiles with the most keys come first."""
    TOKENS: tl.constexpr = TILE_ROWS // TILE_HEADS
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    request = _find_request(query_starts, num_requests, tile, TOKENS)
    begin = tl.load(query_starts + request)
    end = tl.load(query_starts + request + 1)
    context_len = tl.load(context_lens + request)
    first = begin + (tile - begin // TOKENS - request) * TOKENS
    if (first >= end) | (context_len == 0):
        return
    last = tl.minimum(first + TOKENS, end) - 1
    rows = tl.arange(0, TILE_ROWS)
    heads = tl.program_id(1) * TILE_HEADS + rows % TILE_HEADS
    tokens = tl.minimum(first + rows // TILE_HEADS, last).to(tl.int64)  # rows past the last repeat it
    is_real = (first + rows // TILE_HEADS <= last) & (heads < HEADS)
    shift = context_len - end  # from places in the batch to places in the request
    ranks, ropes = tl.arange(0, PAD_RANK), tl.arange(0, PAD_ROPE)
    own = query + tokens[:, None] * query_stride + heads[:, None] * head_stride + ranks[None, :]
    packed = tl.load(own, mask=is_real[:, None] & (ranks < RANK)[None, :], other=0.0)
    own = turned + (tokens * HEADS + heads)[:, None] * ROPE + ropes[None, :]
    packed_rope = tl.load(own, mask=is_real[:, None] & (ropes < ROPE)[None, :], other=0.0)
    positions = tokens + shift
    sizes = chunk_shift(positions + 1, NO_WINDOW)
    num_unmasked = (first + shift + 1) // TILE_KEYS * TILE_KEYS  # keys that all rows see
    end_key = last + shift + 1
    target += (tokens * HEADS + heads)[:, None] * RANK + ranks[None, :]
    table = tables + request.to(tl.int64) * table_stride
    for size in range(chunk_shift(first + shift + 1, NO_WINDOW), chunk_shift(end_key, NO_WINDOW) + 1):
        output, total, largest = _no_keys(TILE_ROWS, PAD_RANK)
        for chunk in range(0, ((end_key - 1) >> size) + 1):
            begin_key = chunk << size
            chunk_end = tl.minimum((chunk + 1) << size, end_key)
            chunk_output, chunk_total, chunk_largest = _attend(
                packed,
                packed_rope,
                positions,
                cache,
                table,
                begin_key,
                tl.minimum(tl.maximum(begin_key, num_unmasked), chunk_end),
                chunk_end,
                scale,
                RANK,
                ROPE,
                BLOCK_SIZE,
                TILE_KEYS,
            )
            output, total, largest = merge(output, total, largest, chunk_output, chunk_total, chunk_largest)
        attended = finish(output, tl.max(total, 1), largest, None).to(target.dtype.element_ty)
        tl.store(target, attended, mask=(is_real & (sizes == size))[:, None] & (ranks < RANK)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def heads_kernel(
    x,
    matrix,
    target,
    num_rows,
    row_stride,
    head_stride,
    matrix_stride,
    in_stride,
    out_stride,
    HEADS: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (head, outputs, rows). The tile, and so a row's result, does not depend on the number of rows."""
    head = tl.program_id(0)
    rows = (tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    inputs = tl.arange(0, BLOCK_IN)
    is_row, is_output = rows < num_rows, outputs < OUT
    lines = matrix + head * matrix_stride + inputs[:, None] * in_stride + outputs[None, :] * out_stride
    values = x + rows[:, None] * row_stride + head * head_stride + inputs[None, :]
    sums = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    for start in range(0, IN, BLOCK_IN):
        inside = start + inputs < IN
        value = tl.load(values + start, mask=is_row[:, None] & inside[None, :], other=0.0)
        line = tl.load(lines + start * in_stride, mask=inside[:, None] & is_output[None, :], other=0.0)
        sums = tl.dot(value, line, sums, input_precision="ieee")
    target += (rows * HEADS + head)[:, None] * OUT + outputs[None, :]
    tl.store(target, sums.to(target.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])
