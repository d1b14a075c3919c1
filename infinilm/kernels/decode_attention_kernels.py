"""The Triton kernels of `decode_attention`.

The work is reading: a row's keys and values are read once and hardly computed with, so all that matters is that
every multiprocessor has loads under way, for one short row as well as for hundreds of long ones.

*Packing.* The query heads that share a kv head are the rows of one tile (at least 16, what a tensor core takes), so
that each key and value is read once for all of them.

*Splitting.* The tokens a row sees are cut into chunks, attended to independently; the chunks' results are then
weighed by their sums of exponentials. The cut follows from the number of tokens alone (`_chunking`), and results are
added in the chunks' order, so a row's output is the same bits whatever it is batched with; only which program
computes which chunk depends on the batch. One row needs many small chunks to occupy the device; but each costs a
result of `head_dim` floats per query head, written and read again, and the beginning of a pipeline, so that many
rows are read faster in large ones. Hence 64 tokens for rows of up to 256, 128 up to 512, 256 up to 1024 and 512
beyond, but never more than 16 chunks.

*Combining.* Whichever program of a row and kv head is the last to finish adds the results up, which takes less than
the launch of a second kernel. A counter tells it, and is set back to 0 for the next launch. A row of one chunk is
written at once.

*Shared prefix.* Where all rows begin with the same blocks, a kernel before this one attends the queries of many rows
at a time to them, so that they come from memory once, and leaves its results among those to be added up.
"""

import triton
import triton.language as tl

from infinilm.kernels.early_launch import let_next_start, wait_for_inputs

# Results per row and query head. With a shared prefix, those from FEW_CHUNKS on are the prefix's.
MAX_CHUNKS = tl.constexpr(16)
FEW_CHUNKS = tl.constexpr(8)
# Chunks are multiples of so many tokens.
_CHUNK_UNIT = tl.constexpr(64)
_SHARED_CHUNK_UNIT = tl.constexpr(256)


@triton.jit
def _chunking(num_tokens, num_shared):
    """How `num_tokens` >= 1 are cut: the tokens per chunk and the number of chunks, beside `num_shared` others."""
    chunk = tl.where(num_tokens <= 256, 64, tl.where(num_tokens <= 512, 128, tl.where(num_tokens <= 1024, 256, 512)))
    most = tl.where(num_shared > 0, FEW_CHUNKS, MAX_CHUNKS)
    chunk = tl.maximum(chunk, _CHUNK_UNIT * tl.cdiv(num_tokens, _CHUNK_UNIT * most))
    return chunk, tl.cdiv(num_tokens, chunk)


@triton.jit
def _shared_chunking(num_tokens):
    """The same for a shared prefix: larger chunks, as each leaves results for all rows; none of no tokens."""
    units = tl.cdiv(num_tokens, _SHARED_CHUNK_UNIT * (MAX_CHUNKS - FEW_CHUNKS))
    chunk = _SHARED_CHUNK_UNIT * tl.maximum(units, 1)
    return chunk, tl.cdiv(num_tokens, chunk)


@triton.jit
def _attend(
    query,  # [M, PAD_DIM]
    cache,
    table,
    head,
    begin,
    end,
    scale,  # log2(e) included: the exponentials are of base 2
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend to the tokens from `begin` to before `end`, at least one.

    Returns the output `[M, PAD_DIM]` and the base-2 logarithms of the sums of exponentials `[M]`.
    """
    cache += head * HEAD_DIM
    dims = tl.arange(0, query.shape[1])
    largest = tl.full([query.shape[0]], float("-inf"), tl.float32)
    # Added up after the loop: a sum over the warps in every iteration would hold them all up.
    sums = tl.zeros([query.shape[0], TILE], tl.float32)
    output = tl.zeros(query.shape, tl.float32)
    num_tiles = tl.cdiv(end - begin, TILE)
    end = end.to(tl.uint32)  # unsigned numbers are quicker to divide
    position = (begin + tl.arange(0, TILE)).to(tl.uint32)
    block = tl.load(table + position // BLOCK_SIZE, mask=position < end, other=0)
    for _ in range(num_tiles):
        visible = position < end
        token = block * BLOCK_SIZE + position % BLOCK_SIZE
        pointers = cache + (token.to(tl.int64) * (2 * KV_HEADS * HEAD_DIM))[:, None] + dims[None, :]
        mask = visible[:, None] & (dims < HEAD_DIM)[None, :]
        # An iteration ahead of the keys it leads to: their loads are started two ahead, and must not wait for it.
        position += TILE
        block = tl.load(table + position // BLOCK_SIZE, mask=position < end, other=0)
        key = tl.load(pointers, mask=mask, other=0.0)
        score = tl.dot(query, key.trans(), input_precision=PRECISION) * scale
        score = tl.where(visible[None, :], score, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, 1))
        weight = tl.exp2(score - new_largest[:, None])
        fade = tl.exp2(largest - new_largest)
        value = tl.load(pointers + KV_HEADS * HEAD_DIM, mask=mask, other=0.0)
        output = tl.dot(weight.to(value.dtype), value, output * fade[:, None], input_precision=PRECISION)
        sums = sums * fade[:, None] + weight
        largest = new_largest
    total = tl.sum(sums, 1)
    return output / total[:, None], largest + tl.log2(total)


@triton.jit
def _combine(
    results,
    log_sums,
    target,
    first_head,  # the program's, in all three
    num_chunks,
    num_shared,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,  # at a time
):
    """Weigh a row's results and write the output of its `GROUP` query heads."""
    dims = tl.arange(0, PAD_DIM)
    for member in tl.static_range(0, GROUP, HEADS):
        head = first_head + member + tl.arange(0, HEADS)
        is_head = head < first_head + GROUP
        largest = tl.full([HEADS], float("-inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        output = tl.zeros([HEADS, PAD_DIM], tl.float32)
        for first in range(0, tl.where(num_shared > 0, MAX_CHUNKS, num_chunks), FEW_CHUNKS):
            chunk = first + tl.arange(0, FEW_CHUNKS)
            is_used = (chunk < num_chunks) | ((chunk >= FEW_CHUNKS) & (chunk < FEW_CHUNKS + num_shared))
            slot = head[None, :] * MAX_CHUNKS + chunk[:, None]
            mask = is_used[:, None] & is_head[None, :]
            # Not from the first-level cache, which knows nothing of what other programs wrote.
            log_sum = tl.load(log_sums + slot, mask=mask, other=float("-inf"), cache_modifier=".cg")
            log_sum = tl.where(is_head[None, :], log_sum, 0.0)
            result = tl.load(
                results + slot[:, :, None] * HEAD_DIM + dims[None, None, :],
                mask=mask[:, :, None] & (dims < HEAD_DIM)[None, None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            new_largest = tl.maximum(largest, tl.max(log_sum, 0))
            weight = tl.exp2(log_sum - new_largest[None, :])
            fade = tl.exp2(largest - new_largest)
            output = output * fade[:, None] + tl.sum(result * weight[:, :, None], 0)
            total = total * fade + tl.sum(weight, 0)
            largest = new_largest
        tl.store(
            target + head[:, None] * HEAD_DIM + dims[None, :],
            (output / total[:, None]).to(target.dtype.element_ty),
            mask=is_head[:, None] & (dims < HEAD_DIM)[None, :],
        )


@triton.jit(do_not_specialize=["window", "table_stride"])
def decode_kernel(
    query,
    cache,
    tables,
    context_lens,
    shared_tokens,  # None: no prefix is shared
    results,
    log_sums,
    arrivals,
    target,
    scale,
    window,
    query_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_GROUP: tl.constexpr,
    PAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    COMBINED_HEADS: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (head, row, part): every `num_programs(2)`-th chunk of the row, from the `part`-th, for one kv head."""
    # The heads of a token lie next to each other, and so do the programs that read them.
    head = tl.program_id(0)
    row = tl.program_id(1)
    part = tl.program_id(2)
    group = tl.arange(0, PAD_GROUP)
    dims = tl.arange(0, PAD_DIM)
    mask = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    first_head = (row * KV_HEADS + head).to(tl.int64) * GROUP
    target_places = (first_head + group)[:, None] * HEAD_DIM + dims[None, :]
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    end = tl.load(context_lens + row)
    # Started before the length is known: one wait for both.
    query += row.to(tl.int64) * query_stride + head * GROUP * HEAD_DIM
    packed = tl.load(query + group[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    if end == 0:
        if part == 0:
            nothing = tl.zeros([PAD_GROUP, PAD_DIM], target.dtype.element_ty)
            tl.store(target + target_places, nothing, mask=mask)
        return
    begin = tl.maximum(end - window, 0)
    num_shared = 0
    if shared_tokens is not None:
        begin = tl.load(shared_tokens)
        num_shared = _shared_chunking(begin)[1]
    chunk, num_chunks = _chunking(end - begin, num_shared)
    if part >= num_chunks:
        return
    is_whole = (num_chunks == 1) & (num_shared == 0)
    table = tables + row.to(tl.int64) * table_stride
    for index in range(part, num_chunks, tl.num_programs(2)):
        first = begin + index * chunk
        last = tl.minimum(first + chunk, end)
        output, log_sum = _attend(
            packed, cache, table, head, first, last, scale, KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE, PRECISION
        )
        if is_whole:
            tl.store(target + target_places, output.to(target.dtype.element_ty), mask=mask)
        else:
            slot = (first_head + group) * MAX_CHUNKS + index
            tl.store(results + slot[:, None] * HEAD_DIM + dims[None, :], output, mask=mask)
            tl.store(log_sums + slot, log_sum, mask=group < GROUP)
    if is_whole:
        return
    # One thread reports for all: they must have written their results before.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals + row * KV_HEADS + head, 1, sem="acq_rel") + 1
    if arrived == tl.minimum(num_chunks, tl.num_programs(2)):
        _combine(
            results, log_sums, target, first_head, num_chunks, num_shared, GROUP, HEAD_DIM, PAD_DIM, COMBINED_HEADS
        )
        tl.store(arrivals + row * KV_HEADS + head, 0)


@triton.jit(do_not_specialize=["num_rows"])
def shared_kernel(
    query,
    cache,
    table,
    num_tokens,
    results,
    log_sums,
    num_rows,
    scale,
    query_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_GROUP: tl.constexpr,
    PAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    QUERIES: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (head, i, chunk): one chunk of the prefix for `QUERIES` query heads of consecutive rows and a kv head."""
    head = tl.program_id(0)
    index = tl.program_id(2)
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    tokens = tl.load(num_tokens)
    chunk, num_chunks = _shared_chunking(tokens)
    if index >= num_chunks:
        return
    packed = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    row = (packed // PAD_GROUP).to(tl.int64)
    member = packed % PAD_GROUP
    dims = tl.arange(0, PAD_DIM)
    is_query = (row < num_rows) & (member < GROUP)
    mask = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    places = row * query_stride + (head * GROUP + member) * HEAD_DIM
    queries = tl.load(query + places[:, None] + dims[None, :], mask=mask, other=0.0)
    first = index * chunk
    last = tl.minimum(first + chunk, tokens)
    output, log_sum = _attend(
        queries, cache, table, head, first, last, scale, KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE, PRECISION
    )
    slot = ((row * KV_HEADS + head) * GROUP + member) * MAX_CHUNKS + FEW_CHUNKS + index
    tl.store(results + slot[:, None] * HEAD_DIM + dims[None, :], output, mask=mask)
    tl.store(log_sums + slot, log_sum, mask=is_query)
