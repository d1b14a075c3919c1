"""The Triton kernels of `decode_attention`.

The work is memory-bound: a row's keys and values are read once, with little computation. So every multiprocessor must
have loads in flight, for one short row as well as for hundreds of long ones.

*Packing.* The query heads that share a kv head are the rows of one tile, so that each key and value is read once for
all of them.

*Splitting.* The tokens that a row sees are split into chunks, attended to independently; the chunks' results are then
weighted by their sums of exponentials. The split depends on the number of tokens alone (`_chunking`), and results are
added in chunk order, so a row's output is bitwise the same in any batch. One row needs many small chunks to occupy the
device; but each costs a result of `head_dim` floats per query head, written and read again. Up to 256 tokens are one
chunk, because combining would take longer than reading them; up to 512 are split into chunks of 128, more into chunks
of 256, or of the size that makes 16 chunks.

*Sharing.* Only the assignment of chunks to programs depends on the batch. A program computes a range of chunks in one
loop: for few rows a single chunk, so that all multiprocessors work; for many rows several hundred tokens, because a
program takes microseconds to start and end, in which it reads nothing. The host decides (`min_tokens`).

*Combining.* A row of one chunk is written at once. Otherwise the last program of a row and kv head to finish adds the
results, which is faster than launching a second kernel. A counter identifies the last of several programs, which resets
it to 0 for the next launch.

*Shared prefix.* If all rows begin with the same blocks, a kernel before this one attends the queries of many rows at a
time to them, so that they are read once, and stores its results among those to be combined. As there are many rows
then, and results to combine anyway, a row's own tokens are split into chunks of 256, or of the size that makes 8.

*Sinks.* A sink is a score without a value, so it is added once, where a row's output is made.
"""

import triton
import triton.language as tl

from infinilm.kernels.early_launch import let_next_start, wait_for_inputs

# Results per row and query head. With a shared prefix, those from FEW_CHUNKS on are the prefix's.
MAX_CHUNKS = tl.constexpr(16)
FEW_CHUNKS = tl.constexpr(8)
# Chunks are multiples of this many tokens, and so of all tiles.
_CHUNK_UNIT = tl.constexpr(64)
_SHARED_CHUNK_UNIT = tl.constexpr(256)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _chunking(num_tokens, num_shared):
    """How `num_tokens` >= 1 are split: tokens per chunk and number of chunks, besides `num_shared` others."""
    is_alone = num_shared == 0
    shift = tl.where((num_tokens > 256) & (num_tokens <= 512) & is_alone, 7, 8)  # a division takes longer
    chunk = 1 << shift
    num_chunks = (num_tokens + chunk - 1) >> shift
    most = tl.where(is_alone, MAX_CHUNKS, FEW_CHUNKS)
    if num_chunks > most:
        chunk = _CHUNK_UNIT * tl.cdiv(num_tokens, _CHUNK_UNIT * most)
        num_chunks = tl.cdiv(num_tokens, chunk)
    return chunk, num_chunks


@triton.jit
def _shared_chunking(num_tokens):
    """The same for a shared prefix, each of whose chunks has results for all rows; no chunks for no tokens."""
    chunk = _SHARED_CHUNK_UNIT
    num_chunks = tl.cdiv(num_tokens, chunk)
    if num_chunks > MAX_CHUNKS - FEW_CHUNKS:
        chunk *= tl.cdiv(num_chunks, MAX_CHUNKS - FEW_CHUNKS)
        num_chunks = tl.cdiv(num_tokens, chunk)
    return chunk, num_chunks


@triton.jit
def _log_parts(num_tokens, min_tokens):
    """Binary logarithm of the number of programs that share a row: as many as there are and leave each `min_tokens`."""
    log_parts = 0
    for i in tl.static_range(1, 5):
        log_parts += ((min_tokens << i <= num_tokens) & (1 << i <= tl.num_programs(2))).to(tl.int32)
    return log_parts


@triton.jit
def capped(score, cap):
    """`cap * tanh(score / cap)`."""
    return cap - 2 * cap / (1 + tl.exp2(score * (2 * _LOG2_E / cap)))


@triton.jit
def _attend(
    query,  # [M, PAD_DIM]
    cache,
    table,
    head,
    begin,
    end,
    scale,  # log2(e) included: the exponentials are of base 2
    cap,  # log2(e) included; None: scores are not capped
    chunk,  # a multiple of TILE; None: all tokens are one chunk
    results,
    log_sums,
    slots,  # [M], of the first chunk's results; those of the others follow
    is_query,  # [M]
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend to the tokens from `begin` to before `end`, at least one.

    Returns the last chunk's index, output `[M, PAD_DIM]` and the base-2 logarithms of its sums of exponentials `[M]`;
    the results of those before it are stored. All chunks are one loop, so that the next one's loads are in flight
    when a chunk ends.
    """
    cache += head * HEAD_DIM
    dims = tl.arange(0, query.shape[1])
    largest = tl.full([query.shape[0]], float("-inf"), tl.float32)
    # Added up at a chunk's end: a sum over the warps in every iteration would synchronise them.
    sums = tl.zeros([query.shape[0], TILE], tl.float32)
    output = tl.zeros(query.shape, tl.float32)
    index = 0
    chunk_end = end if chunk is None else begin + chunk
    limit = end.to(tl.uint32)  # unsigned numbers are quicker to divide
    position = (begin + tl.arange(0, TILE)).to(tl.uint32)
    block = tl.load(table + position // BLOCK_SIZE, mask=position < limit, other=0)
    for first in range(begin, end, TILE):
        visible = position < limit
        token = block * BLOCK_SIZE + position % BLOCK_SIZE
        pointers = cache + (token.to(tl.int64) * (2 * KV_HEADS * HEAD_DIM))[:, None] + dims[None, :]
        mask = visible[:, None] & (dims < HEAD_DIM)[None, :]
        # One iteration ahead of its keys: their loads are pipelined, too, and must not wait for it.
        position += TILE
        block = tl.load(table + position // BLOCK_SIZE, mask=position < limit, other=0)
        key = tl.load(pointers, mask=mask, other=0.0)
        score = tl.dot(query, key.trans(), input_precision=PRECISION) * scale
        if cap is not None:
            score = capped(score, cap)
        score = tl.where(visible[None, :], score, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, 1))
        weight = tl.exp2(score - new_largest[:, None])
        fade = tl.exp2(largest - new_largest)
        value = tl.load(pointers + KV_HEADS * HEAD_DIM, mask=mask, other=0.0)
        output = tl.dot(weight.to(value.dtype), value, output * fade[:, None], input_precision=PRECISION)
        sums = sums * fade[:, None] + weight
        largest = new_largest
        if chunk is not None and (first + TILE == chunk_end) & (chunk_end < end):
            result, log_sum = _finish(largest, sums, output)
            _store(results, log_sums, slots + index, is_query, result, log_sum, HEAD_DIM)
            index += 1
            chunk_end += chunk
            largest = tl.full([query.shape[0]], float("-inf"), tl.float32)
            sums = tl.zeros([query.shape[0], TILE], tl.float32)
            output = tl.zeros(query.shape, tl.float32)
    output, log_sum = _finish(largest, sums, output)
    return index, output, log_sum


@triton.jit
def _finish(largest, sums, output):
    total = tl.sum(sums, 1)
    return output / total[:, None], largest + tl.log2(total)


@triton.jit
def _store(results, log_sums, slots, is_query, output, log_sum, HEAD_DIM: tl.constexpr):
    dims = tl.arange(0, output.shape[1])
    mask = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(results + slots[:, None] * HEAD_DIM + dims[None, :], output, mask=mask)
    tl.store(log_sums + slots, log_sum, mask=is_query)


@triton.jit
def _combine(
    results,
    log_sums,
    target,
    sinks,  # at the kv head's; None: there are none
    first_head,  # the program's, in all others
    num_chunks,
    num_shared,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,  # at a time
):
    """Weigh a row's results and write the output of its `GROUP` query heads."""
    dims = tl.arange(0, PAD_DIM)
    for member in tl.range(0, GROUP, HEADS, num_stages=1):
        head = first_head + member + tl.arange(0, HEADS)
        is_head = head < first_head + GROUP
        mask = is_head[:, None] & (dims < HEAD_DIM)[None, :]
        largest = tl.where(is_head, float("-inf"), 0.0)  # padding heads must not give NaN
        chunk_results = ()
        output_places = results + (head * MAX_CHUNKS * HEAD_DIM)[:, None] + dims[None, :]
        sum_places = log_sums + head * MAX_CHUNKS
        # All loads start before the first result is used: a single wait. They must not bypass the L1 cache, which
        # may hold results that this program's own warps have just written.
        for index in tl.static_range(MAX_CHUNKS):
            is_used = (index < num_chunks) | ((index >= FEW_CHUNKS) & (index < FEW_CHUNKS + num_shared))
            result = tl.load(output_places + index * HEAD_DIM, mask=is_used & mask, other=0.0)
            log_sum = tl.load(sum_places + index, mask=is_used & is_head, other=float("-inf"))
            chunk_results += ((result, log_sum),)  # type: ignore[assignment]
            largest = tl.maximum(largest, log_sum)
        total = tl.zeros([HEADS], tl.float32)
        if sinks is not None:
            sink = tl.load(sinks + member + tl.arange(0, HEADS), mask=is_head, other=0.0) * _LOG2_E
            largest = tl.maximum(largest, sink)
            total += tl.exp2(sink - largest)
        output = tl.zeros([HEADS, PAD_DIM], tl.float32)
        for index in tl.static_range(MAX_CHUNKS):
            result, log_sum = chunk_results[index]
            weight = tl.exp2(log_sum - largest)
            total += weight
            output += result * weight[:, None]
        tl.store(
            target + head[:, None] * HEAD_DIM + dims[None, :],
            (output / total[:, None]).to(target.dtype.element_ty),
            mask=mask,
        )


@triton.jit(
    do_not_specialize=["window", "table_stride", "min_tokens"],
    do_not_specialize_on_alignment=["tables", "context_lens"],
)
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
    sinks,  # None: there are none
    scale,
    cap,  # None: scores are not capped
    window,
    min_tokens,  # a program's least share of a long enough row
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
    """Program (head, row, part): the `part`-th share of the row's chunks, for one kv head."""
    # The heads of a token are adjacent in memory, and so are the programs that read them.
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
    # All loads start before the first is used: a single wait.
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
    begin = tl.maximum(end - window, shared_end)
    num_shared = _shared_chunking(shared_end)[1]
    chunk, num_chunks = _chunking(end - begin, num_shared)
    log_parts = _log_parts(end - begin, min_tokens)
    first_chunk = part * num_chunks >> log_parts
    next_chunk = tl.minimum((part + 1) * num_chunks >> log_parts, num_chunks)
    if first_chunk >= next_chunk:
        return
    slots = (first_head + group) * MAX_CHUNKS + first_chunk
    index, output, log_sum = _attend(
        packed,
        cache,
        tables + row.to(tl.int64) * table_stride,
        head,
        begin + first_chunk * chunk,
        tl.minimum(begin + next_chunk * chunk, end),
        scale,
        cap,
        chunk,
        results,
        log_sums,
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
    if num_chunks + num_shared == 1:
        if sinks is not None:
            sink = tl.load(sinks + group, mask=group < GROUP, other=0.0) * _LOG2_E
            output /= (1 + tl.exp2(sink - log_sum))[:, None]
        tl.store(target + target_places, output.to(target.dtype.element_ty), mask=mask)
        return
    _store(results, log_sums, slots + index, group < GROUP, output, log_sum, HEAD_DIM)
    # Results of all threads must be visible before others read them or one announces them.
    tl.debug_barrier()
    num_parts = tl.minimum(1 << log_parts, num_chunks)
    arrived = num_parts
    if num_parts > 1:
        arrived = tl.atomic_add(arrivals + row * KV_HEADS + head, 1, sem="acq_rel") + 1
    if arrived == num_parts:
        _combine(
            results,
            log_sums,
            target,
            sinks,
            first_head,
            num_chunks,
            num_shared,
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
    table,
    num_tokens,
    results,
    log_sums,
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
    slots = ((row * KV_HEADS + head) * GROUP + member) * MAX_CHUNKS + FEW_CHUNKS + index
    _, output, log_sum = _attend(
        queries,
        cache,
        table,
        head,
        first,
        last,
        scale,
        cap,
        None,
        results,
        log_sums,
        slots,
        is_query,
        KV_HEADS,
        HEAD_DIM,
        BLOCK_SIZE,
        TILE,
        PRECISION,
    )
    _store(results, log_sums, slots, is_query, output, log_sum, HEAD_DIM)
