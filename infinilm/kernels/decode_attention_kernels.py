"""The Triton kernels of `decode_attention`.

The work is memory-bound: a row's keys and values are read once, with little computation. So every multiprocessor must
have loads in flight, for one short row as well as for hundreds of long ones.

*Packing.* The query heads that share a kv head are the rows of one tile, so that each key and value is read once for
all of them.

*Splitting.* The chunks of a row's context (`attention_order`) are computed independently, and merged in order.

*Sharing.* Which program computes which chunks depends on the batch. A program computes a range of chunks in one loop.
With few rows that is a single chunk, so that all multiprocessors work. With many rows it is several hundred tokens,
because a program takes microseconds to start and end, during which it reads nothing. The host decides (`min_tokens`).

*Combining.* The result of a row with one chunk is written at once. Otherwise the last program of a row and kv head to
finish merges the chunks, which is faster than launching a second kernel. A counter identifies the last of several
programs, which resets it to 0 for the next launch.

*Shared prefix.* If all rows begin with the same blocks, a kernel before this one computes the whole chunks in these
blocks for the queries of many rows at a time, so that the chunks are read once. A row's own programs do the rest.
"""

import triton
import triton.language as tl

from infinilm.kernels.attention_order import (
    MAX_CHUNKS,
    MIN_SHIFT,
    NO_WINDOW,
    add_tile,
    capped,
    chunk_shift,
    finish,
    merge,
    no_keys,
)
from infinilm.kernels.early_launch import let_next_start, wait_for_inputs
from infinilm.kernels.fp8_kernels import add_pairs, join_pairs, scale_place, score_pairs, split_pairs, split_scales


@triton.jit
def _log_parts(num_tokens, min_tokens):
    """Binary logarithm of the number of programs that share a row: as many as launched, with `min_tokens` for each."""
    log_parts = 0
    for i in tl.static_range(1, 5):
        log_parts += ((min_tokens << i <= num_tokens) & (1 << i <= tl.num_programs(1))).to(tl.int32)
    return log_parts


@triton.jit
def _attend(
    query,  # [M, PAD_DIM]
    cache,
    scales,  # the cache has codes in pairs, see `fp8_kernels`, with these scales; None: it has the query's type
    table,
    head,
    begin,  # a multiple of TILE
    first_seen,  # keys before it are not seen
    end,
    scale,  # log2(e) included: the exponentials are of base 2
    cap,  # log2(e) included; None: scores are not capped
    chunk,  # a multiple of TILE; None: all tokens are in one chunk
    results,
    sums,
    slots,  # [M], the slots of the first chunk's results; those of the other chunks follow
    is_query,  # [M]
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend to the tokens from `begin` to before `end`, at least one.

    Returns the last chunk's index and state. The results of earlier chunks are stored. All chunks are one loop, so that
    the loads of the next chunk are in flight when a chunk ends.
    """
    M: tl.constexpr = query.shape[0]
    IN_PAIRS: tl.constexpr = scales is not None
    WIDTH: tl.constexpr = HEAD_DIM // 2 if IN_PAIRS else HEAD_DIM
    PAD_WIDTH: tl.constexpr = query.shape[1] // 2 if IN_PAIRS else query.shape[1]
    cache += head * WIDTH
    dims = tl.arange(0, PAD_WIDTH)
    output, total, largest = no_keys(M, PAD_WIDTH)
    if IN_PAIRS:
        even_query, odd_query = split_pairs(query)
        odd_output = output
    index = 0
    chunk_end = end if chunk is None else (begin // chunk + 1) * chunk
    limit = end.to(tl.uint32)  # unsigned division is faster
    position = (begin + tl.arange(0, TILE)).to(tl.uint32)
    block = tl.load(table + position // BLOCK_SIZE, mask=position < limit, other=0)
    for first in range(begin, end, TILE):
        visible = position < limit
        is_seen = visible & (position >= first_seen)
        token = block * BLOCK_SIZE + position % BLOCK_SIZE
        pointers = cache + (token.to(tl.int64) * (2 * KV_HEADS * WIDTH))[:, None] + dims[None, :]
        mask = is_seen[:, None] & (dims < WIDTH)[None, :]
        if IN_PAIRS:
            scale_pointers = scales + scale_place(block, head, position % BLOCK_SIZE, KV_HEADS, BLOCK_SIZE)
        # The block is loaded one iteration ahead of its keys, whose loads are pipelined and must not wait for it.
        position += TILE
        block = tl.load(table + position // BLOCK_SIZE, mask=position < limit, other=0)
        key = tl.load(pointers, mask=mask, other=0.0)
        if IN_PAIRS:
            key_scale, value_scale = split_scales(tl.load(scale_pointers, mask=is_seen, other=0))
            score = score_pairs(even_query, odd_query, key, key_scale, PRECISION)
        else:
            score = tl.dot(query, key.trans(), input_precision=PRECISION)
        factor = scale
        if cap is not None:
            score = capped(score * scale, cap)
            factor = 1.0
        score = tl.where(is_seen[None, :], score, float("-inf"))
        value = tl.load(pointers + KV_HEADS * WIDTH, mask=mask, other=0.0)
        if IN_PAIRS:
            output, odd_output, total, largest = add_pairs(
                output, odd_output, total, largest, score, value, value_scale, factor, query.dtype, PRECISION
            )
        else:
            output, total, largest = add_tile(output, total, largest, score, value, factor, PRECISION)
        if chunk is not None and (first + TILE == chunk_end) & (chunk_end < end):
            whole = join_pairs(output, odd_output) if IN_PAIRS else output
            _store(results, sums, slots + index, is_query, whole, tl.max(total, 1), largest, HEAD_DIM)
            index += 1
            chunk_end += chunk
            output, total, largest = no_keys(M, PAD_WIDTH)
            if IN_PAIRS:
                odd_output = output
    whole = join_pairs(output, odd_output) if IN_PAIRS else output
    return index, whole, tl.max(total, 1), largest


@triton.jit
def _store(results, sums, slots, is_query, output, total, largest, HEAD_DIM: tl.constexpr):
    dims = tl.arange(0, output.shape[1])
    mask = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(results + slots[:, None] * HEAD_DIM + dims[None, :], output, mask=mask)
    tl.store(sums + slots * 2, total, mask=is_query)
    tl.store(sums + slots * 2 + 1, largest, mask=is_query)


@triton.jit
def _combine(
    results,
    sums,
    target,
    sinks,  # at the kv head's sinks; None: there are none
    first_head,  # the program's first head, counted over all rows
    num_chunks,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,  # heads at a time
):
    """Merge a row's chunks and write the output of its `GROUP` query heads."""
    dims = tl.arange(0, PAD_DIM)
    for member in tl.range(0, GROUP, HEADS, num_stages=1):
        head = first_head + member + tl.arange(0, HEADS)
        is_head = head < first_head + GROUP
        mask = is_head[:, None] & (dims < HEAD_DIM)[None, :]
        chunks = ()
        output_places = results + (head * MAX_CHUNKS * HEAD_DIM)[:, None] + dims[None, :]
        sum_places = sums + head * (2 * MAX_CHUNKS)
        # All loads start before the first result is used, so there is a single wait. They must not bypass the L1 cache,
        # which may hold results that this program's own warps have just written.
        for index in tl.static_range(MAX_CHUNKS):
            is_used = index < num_chunks
            result = tl.load(output_places + index * HEAD_DIM, mask=is_used & mask, other=0.0)
            total = tl.load(sum_places + 2 * index, mask=is_used & is_head, other=0.0)
            largest = tl.load(sum_places + 2 * index + 1, mask=is_used & is_head, other=float("-inf"))
            chunks += ((result, total[:, None], largest),)  # type: ignore[assignment]
        output, total, largest = chunks[0]  # type: ignore[misc]
        for index in tl.static_range(1, MAX_CHUNKS):
            if index < num_chunks:
                output, total, largest = merge(output, total, largest, *chunks[index])
        sink = None
        if sinks is not None:
            sink = tl.load(sinks + member + tl.arange(0, HEADS), mask=is_head, other=0.0)
        # Padding heads have no weights; their 0 / 0 is not stored.
        attended = finish(output, tl.max(total, 1), largest, sink)
        tl.store(target + head[:, None] * HEAD_DIM + dims[None, :], attended.to(target.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["window", "table_stride", "min_tokens"],
    do_not_specialize_on_alignment=["tables", "context_lens"],
)
def decode_kernel(
    query,
    cache,
    scales,  # see `_attend`
    tables,
    context_lens,
    shared_tokens,  # None: no prefix is shared
    results,
    sums,
    arrivals,
    target,
    sinks,  # None: there are none
    scale,
    cap,  # None: scores are not capped
    window,
    min_tokens,  # the least tokens of a program, if the row is long enough
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
    """Program (head, part, row): the `part`-th share of the row's chunks, for one kv head."""
    # The heads of a token are adjacent in memory, and so are the programs that read them. Rows of long texts come first
    # (`Scheduler`), and short ones last, so that multiprocessors end at about the same time.
    head = tl.program_id(0)
    part = tl.program_id(1)
    row = tl.program_id(2)
    group = tl.arange(0, PAD_GROUP)
    dims = tl.arange(0, PAD_DIM)
    mask = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    first_head = (row * KV_HEADS + head).to(tl.int64) * GROUP
    target_places = (first_head + group)[:, None] * HEAD_DIM + dims[None, :]
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    # All loads start before the first is used, so there is a single wait.
    end = tl.load(context_lens + row)
    shared_end = 0
    if shared_tokens is not None:
        shared_end = tl.load(shared_tokens)
    query += row.to(tl.int64) * query_stride + head * GROUP * HEAD_DIM
    packed = tl.load(query + group[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    if end == 0:
        if part == 0:
            nothing = tl.zeros([PAD_GROUP, PAD_DIM], target.dtype.element_ty)
            tl.store(target + target_places, nothing, mask=mask)
        return
    first_seen = tl.maximum(end - window, 0)
    shift = chunk_shift(end, window)
    # Chunks are numbered from the first one that is seen. Chunks of the shared prefix have their results already.
    base = first_seen >> shift
    num_chunks = ((end - 1) >> shift) - base + 1
    num_shared = shared_end >> shift
    begin = tl.maximum(first_seen, num_shared << shift)
    log_parts = _log_parts(end - begin, min_tokens)
    num_own = num_chunks - num_shared
    first_chunk = num_shared + (part * num_own >> log_parts)
    next_chunk = num_shared + tl.minimum((part + 1) * num_own >> log_parts, num_own)
    if first_chunk >= next_chunk:
        return
    slots = (first_head + group) * MAX_CHUNKS + first_chunk
    index, output, total, largest = _attend(
        packed,
        cache,
        scales,
        tables + row.to(tl.int64) * table_stride,
        head,
        tl.maximum((base + first_chunk) << shift, first_seen // TILE * TILE),
        first_seen.to(tl.uint32),
        tl.minimum((base + next_chunk) << shift, end),
        scale,
        cap,
        1 << shift,
        results,
        sums,
        slots,
        group < GROUP,
        KV_HEADS,
        HEAD_DIM,
        BLOCK_SIZE,
        TILE,
        PRECISION,
    )
    if sinks is not None:
        sinks += head * GROUP
    if num_chunks == 1:
        sink = None
        if sinks is not None:
            sink = tl.load(sinks + group, mask=group < GROUP, other=0.0)
        attended = finish(output, total, largest, sink)
        tl.store(target + target_places, attended.to(target.dtype.element_ty), mask=mask)
        return
    _store(results, sums, slots + index, group < GROUP, output, total, largest, HEAD_DIM)
    # The results of all threads must be visible before other threads read them or one thread counts the arrival.
    tl.debug_barrier()
    num_parts = tl.minimum(1 << log_parts, num_own)
    arrived = num_parts
    if num_parts > 1:
        arrived = tl.atomic_add(arrivals + row * KV_HEADS + head, 1, sem="acq_rel") + 1
    if arrived == num_parts:
        _combine(
            results,
            sums,
            target,
            sinks,
            first_head,
            num_chunks,
            GROUP,
            HEAD_DIM,
            PAD_DIM,
            COMBINED_HEADS,
        )
        if num_parts > 1:
            tl.store(arrivals + row * KV_HEADS + head, 0)


@triton.jit(do_not_specialize=["num_rows"])
def shared_kernel(
    query,
    cache,
    scales,  # see `_attend`
    table,
    num_tokens,
    context_lens,
    results,
    sums,
    num_rows,
    scale,
    cap,  # None: scores are not capped
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
    """Program (head, i, j): chunks j, j + n, j + 2n, … of the prefix, with n programs along this axis.

    It computes `QUERIES` query heads of consecutive rows and a kv head.
    """
    head = tl.program_id(0)
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    tokens = tl.load(num_tokens)
    if (tl.program_id(2) + 1) << MIN_SHIFT > tokens:
        return
    packed = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    row = (packed // PAD_GROUP).to(tl.int64)
    member = packed % PAD_GROUP
    dims = tl.arange(0, PAD_DIM)
    is_query = (row < num_rows) & (member < GROUP)
    context_len = tl.load(context_lens + row, mask=is_query, other=0)
    is_query &= context_len > 0
    shift = chunk_shift(context_len, NO_WINDOW)
    longest = tl.max(tl.where(is_query, shift, 0), 0)
    shortest = tl.min(tl.where(is_query, shift, 31), 0)
    for turn in range(0, tokens >> MIN_SHIFT, tl.num_programs(2)):
        index = tl.program_id(2) + turn
        # Rows of different lengths may have chunks of different sizes. Usually all chunks have one size.
        for size in range(shortest, longest + 1):
            if index < (tokens >> size):
                is_member = is_query & (shift == size)
                mask = is_member[:, None] & (dims < HEAD_DIM)[None, :]
                places = row * query_stride + (head * GROUP + member) * HEAD_DIM
                queries = tl.load(query + places[:, None] + dims[None, :], mask=mask, other=0.0)
                slots = ((row * KV_HEADS + head) * GROUP + member) * MAX_CHUNKS + index
                _, output, total, largest = _attend(
                    queries,
                    cache,
                    scales,
                    table,
                    head,
                    index << size,
                    tl.zeros([], tl.uint32),
                    (index + 1) << size,
                    scale,
                    cap,
                    None,
                    results,
                    sums,
                    slots,
                    is_member,
                    KV_HEADS,
                    HEAD_DIM,
                    BLOCK_SIZE,
                    TILE,
                    PRECISION,
                )
                _store(results, sums, slots, is_member, output, total, largest, HEAD_DIM)
