"""The Triton kernels of `latent_attention`.

All query heads share one key, a latent vector of `RANK` numbers and a rotated part of `ROPE`; the vector is the value,
too. So heads are the rows of a tile, and a tile of keys is read once for both products.

*Decoding.* A row's tokens are split into chunks by its number of tokens alone (`chunk_size`), each attended to by a
program; a second kernel adds up the chunks' results in their order. So a row's output is bitwise the same in any batch.

*Prompts.* A program has some heads of a few tokens of one request. Tiles of keys begin at multiples of their size in
the request, however much of it is cached.

Tokens that are not finite are NaN in the cache as a whole (`nonfinite.py`). A key that some rows of a tile don't see is
0 as a value if it is NaN, so that only rows that see it become NaN.
"""

import triton
import triton.language as tl

from infinilm.kernels.early_launch import let_next_start, wait_for_inputs
from infinilm.kernels.norm import inverse_rms, scale_and_weigh
from infinilm.kernels.prefill_attention import _find_request
from infinilm.kernels.store_kv import zero_if_finite

MAX_CHUNKS = tl.constexpr(16)
MIN_CHUNK = tl.constexpr(128)


@triton.jit
def chunk_size(num_tokens):
    """Tokens of a chunk: a power of 2, such that there are 8 to 16, or fewer of the least size."""
    size = num_tokens * 0 + MIN_CHUNK
    while size * MAX_CHUNKS < num_tokens:
        size *= 2
    return size


@triton.jit
def store_kernel(
    latents,  # at a token's vector
    weight,
    query,  # at the part of a head to rotate
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
def _attend(
    query,  # [rows, PAD_RANK]
    turned,  # [rows, PAD_ROPE]
    positions,  # [rows], the last token that each row sees
    cache,
    table,
    begin,  # a multiple of TILE_KEYS
    middle,  # likewise; tiles before it are seen by all rows
    end,
    scale,  # log2(e) included: the exponentials are of base 2
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    MASKS: tl.constexpr,  # whether there are tiles from `middle` on
):
    """Attend to the tokens from `begin` to before `end`: output, its sums of exponentials, and largest scores."""
    output = tl.zeros(query.shape, tl.float32)
    total = tl.zeros([query.shape[0]], tl.float32)
    largest = tl.full([query.shape[0]], float("-inf"), tl.float32)
    ranks, ropes = tl.arange(0, query.shape[1]), tl.arange(0, turned.shape[1])
    for first in range(begin, middle, TILE_KEYS):
        keys = first + tl.arange(0, TILE_KEYS)
        block = tl.load(table + keys // BLOCK_SIZE).to(tl.int64)
        places = cache + (block * BLOCK_SIZE + keys % BLOCK_SIZE)[:, None] * (RANK + ROPE)
        latent = tl.load(places + ranks[None, :], mask=(ranks < RANK)[None, :], other=0.0)
        key = tl.load(places + RANK + ropes[None, :], mask=(ropes < ROPE)[None, :], other=0.0)
        score = tl.dot(query, latent.trans(), input_precision="ieee")
        score = tl.dot(turned, key.trans(), score, input_precision="ieee") * scale
        output, total, largest = _weighed(output, total, largest, score, latent)
    if MASKS:
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
            score = tl.dot(turned, key.trans(), score, input_precision="ieee") * scale
            score = tl.where(keys[None, :] <= positions[:, None], score, float("-inf"))
            latent = tl.where(latent == latent, latent, 0.0)  # noqa: PLR0124
            output, total, largest = _weighed(output, total, largest, score, latent)
    return output, total, largest


@triton.jit
def _weighed(output, total, largest, score, value):
    """Add a tile of values, of whose tokens every row sees at least one or has seen one before."""
    new_largest = tl.maximum(largest, tl.max(score, 1))
    weight = tl.exp2(score - new_largest[:, None])
    fade = tl.exp2(largest - new_largest)
    output = tl.dot(weight.to(value.dtype), value, output * fade[:, None], input_precision="ieee")
    return output, total * fade + tl.sum(weight, 1), new_largest


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tables", "context_lens"])
def decode_kernel(
    query,
    turned,
    cache,
    tables,
    context_lens,
    results,
    log_sums,
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
    size = chunk_size(num_tokens)
    begin = index * size
    if begin >= num_tokens:
        return
    end = tl.minimum(begin + size, num_tokens)
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
        True,
    )
    places = (row * HEADS + heads) * tl.num_programs(2) + index
    mask = is_head[:, None] & (ranks < RANK)[None, :]
    tl.store(results + places[:, None] * RANK + ranks[None, :], output / total[:, None], mask=mask)
    tl.store(log_sums + places, largest + tl.log2(total), mask=is_head)


@triton.jit(do_not_specialize=["num_chunks"], do_not_specialize_on_alignment=["context_lens"])
def merge_kernel(
    results,
    log_sums,
    context_lens,
    target,
    num_chunks,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    PAD_RANK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (head, row): adds up the chunks' results; a row of no tokens gives zeros."""
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    row = tl.program_id(1)
    place = row.to(tl.int64) * HEADS + tl.program_id(0)
    ranks = tl.arange(0, PAD_RANK)
    inside = ranks < RANK
    num_tokens = tl.load(context_lens + row)
    num_used = tl.cdiv(num_tokens, chunk_size(num_tokens))
    chunks = tl.arange(0, MAX_CHUNKS)
    is_used = chunks < num_used
    own = place * num_chunks + chunks
    sums = tl.load(log_sums + own, mask=is_used, other=float("-inf"))
    mask = is_used[:, None] & inside[None, :]
    parts = tl.load(results + own[:, None] * RANK + ranks[None, :], mask=mask, other=0.0)
    weight = tl.exp2(sums - tl.maximum(tl.max(sums, 0), -1e30))  # a row of no tokens has no largest
    output = tl.sum(parts * weight[:, None], 0) / tl.sum(weight, 0)
    output = tl.where(num_used > 0, output, 0.0)
    tl.store(target + place * RANK + ranks, output.to(target.dtype.element_ty), mask=inside)


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
    """Program (tile, heads): `TILE_HEADS` heads of each of some tokens. The tiles with the most keys come first."""
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
    output, total, _ = _attend(
        packed,
        packed_rope,
        tokens + shift,
        cache,
        tables + request.to(tl.int64) * table_stride,
        0,
        (first + shift + 1) // TILE_KEYS * TILE_KEYS,
        last + shift + 1,
        scale,
        RANK,
        ROPE,
        BLOCK_SIZE,
        TILE_KEYS,
        True,
    )
    target += (tokens * HEADS + heads)[:, None] * RANK + ranks[None, :]
    rounded = (output / total[:, None]).to(target.dtype.element_ty)
    tl.store(target, rounded, mask=is_real[:, None] & (ranks < RANK)[None, :])


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
    """Program (head, outputs, rows). The tile is the same for any number of rows, and so is a row's result."""
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
