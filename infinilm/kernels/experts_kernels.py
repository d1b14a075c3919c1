"""The Triton kernels of `experts`."""

import triton
import triton.language as tl

from infinilm.kernels.activation import add_bias, gated
from infinilm.kernels.early_launch import let_next_start, wait_for_inputs
from infinilm.kernels.unpack import unpack_tile

NAN_RANK = tl.constexpr(-1e30)
OUT_RANK = tl.constexpr(-1e31)
"""Below all scores."""


@triton.jit
def choose_kernel(
    logits,
    bias,
    ids,
    weights,
    num_experts,
    stride,
    scale,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    RENORMALIZES: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program i: row i."""
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK)
    inside = experts < num_experts
    values = tl.load(logits + row * stride + experts, mask=inside, other=float("-inf")).to(tl.float32)
    if IS_SIGMOID:
        shares = 1.0 / (1.0 + tl.exp(-values))
    else:
        shares = tl.exp(values - tl.max(values, axis=0))
        shares = shares / tl.sum(shares, axis=0)
    rank = shares
    if bias is not None:
        rank += tl.load(bias + experts, mask=inside, other=0.0)
    # NaN ranks above excluded and already chosen experts, so that ids are valid for any logits.
    rank = tl.where(inside, tl.where(rank == rank, rank, NAN_RANK), OUT_RANK)  # noqa: PLR0124
    if GROUPS > 1:
        own_group = experts * GROUPS // num_experts
        groups = tl.arange(0, BLOCK_GROUPS)
        sums = tl.full((BLOCK_GROUPS,), OUT_RANK, tl.float32)
        for group in tl.static_range(GROUPS):
            members = tl.where(own_group == group, rank, OUT_RANK)
            best = tl.max(members, axis=0)
            second = tl.max(tl.where(experts == tl.argmax(members, axis=0), OUT_RANK, members), axis=0)
            sums = tl.where(groups == group, best + second if GROUP_BEST == 2 else best, sums)
        is_in = experts < 0
        for _ in tl.static_range(TOP_GROUPS):
            best_group = tl.argmax(sums, axis=0)
            is_in = is_in | (own_group == best_group)
            sums = tl.where(groups == best_group, 2 * OUT_RANK, sums)
        rank = tl.where(is_in | (rank == OUT_RANK), rank, OUT_RANK / 2)
    places = tl.arange(0, BLOCK_K)
    chosen = tl.zeros((BLOCK_K,), tl.int32)
    parts = tl.zeros((BLOCK_K,), tl.float32)
    for place in tl.static_range(K):
        best = tl.argmax(rank, axis=0)
        chosen = tl.where(places == place, best, chosen)
        parts = tl.where(places == place, tl.sum(tl.where(experts == best, shares, 0.0), axis=0), parts)
        rank = tl.where(experts == best, 2 * OUT_RANK, rank)
    if RENORMALIZES:
        parts = parts / tl.sum(parts, axis=0)
    parts = parts * scale
    tl.store(ids + row * K + places, chosen, mask=places < K)
    tl.store(weights + row * K + places, parts, mask=places < K)


@triton.jit
def count_kernel(ids, counts, num_pairs, CHUNK: tl.constexpr, EARLY: tl.constexpr):
    """Program e: how many pairs have expert e."""
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    expert = tl.program_id(0)
    offsets = tl.arange(0, CHUNK)
    found = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, num_pairs, CHUNK):
        found += (tl.load(ids + start + offsets, mask=start + offsets < num_pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, axis=0))


@triton.jit
def place_kernel(
    ids,
    counts,
    order,
    tiles,
    num_pairs,
    num_experts,
    num_tiles,
    GROUP_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program e: the pairs of expert e in order, and its groups. The last program marks unused groups."""
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    expert = tl.program_id(0)
    experts = tl.arange(0, BLOCK)
    sizes = tl.load(counts + experts, mask=experts < num_experts, other=0)
    groups = (sizes + GROUP_ROWS - 1) // GROUP_ROWS
    size = tl.sum(tl.where(experts == expert, sizes, 0), axis=0)
    first = tl.sum(tl.where(experts < expert, sizes, 0), axis=0)
    first_tile = tl.sum(tl.where(experts < expert, groups, 0), axis=0)
    end_tile = first_tile + (size + GROUP_ROWS - 1) // GROUP_ROWS

    offsets = tl.arange(0, CHUNK)
    place = first
    for start in range(0, num_pairs, CHUNK):
        pairs = start + offsets
        is_own = (tl.load(ids + pairs, mask=pairs < num_pairs, other=-1) == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(is_own, axis=0) - 1, pairs, mask=is_own > 0)
        place += tl.sum(is_own, axis=0)
    for start in range(0, end_tile - first_tile, CHUNK):
        own = first_tile + start + offsets
        begin = first + (start + offsets) * GROUP_ROWS
        tl.store(tiles + own * 3, expert + tl.zeros_like(own), mask=own < end_tile)
        tl.store(tiles + own * 3 + 1, begin, mask=own < end_tile)
        tl.store(tiles + own * 3 + 2, tl.minimum(begin + GROUP_ROWS, first + size), mask=own < end_tile)
    if expert == num_experts - 1:
        for start in range(end_tile, num_tiles, CHUNK):
            tl.store(tiles + (start + offsets) * 3, tl.full((CHUNK,), -1, tl.int32), mask=start + offsets < num_tiles)


@triton.jit(do_not_specialize=["magic_bits"])
def product_kernel(
    x,
    matrix,
    scales,  # or None: the matrix is dense
    factors,  # or None
    zeros,  # or None
    bias,
    out,
    ids,
    order,
    tiles,
    num_rows,
    out_size,
    x_stride,
    alpha,
    limit,
    magic_bits,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IN: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
    IS_GELU: tl.constexpr,
    IS_SORTED: tl.constexpr,
    BY_EXPERT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
    WIDEN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (block, group): `BLOCK_OUT` outputs of a group of pairs with the same expert.

    If `IS_GATED`, `x` has one row per row of the batch, else one per pair. `out` has one row per pair.
    """
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    group = tl.program_id(1)
    rows = tl.arange(0, BLOCK_ROWS)
    if IS_SORTED:
        expert = tl.load(tiles + group * 3)
        if expert < 0:
            return
        places = tl.load(tiles + group * 3 + 1) + rows
        has_pair = places < tl.load(tiles + group * 3 + 2)
        pairs = tl.load(order + places, mask=has_pair, other=0)
    else:
        choices = tl.arange(0, BLOCK_K)[None, :]
        numbers = rows[:, None] * K + choices
        is_pair = (rows[:, None] < num_rows) & (choices < K)
        expert = group if BY_EXPERT else tl.load(ids + group)
        is_own = (tl.load(ids + numbers, mask=is_pair, other=-1) == expert) & is_pair
        pairs = tl.sum(tl.where(is_own, numbers, 0), axis=1)
        has_pair = tl.sum(is_own.to(tl.int32), axis=1) > 0
        # If several groups have the same expert, the group of the expert's first pair computes all its pairs.
        least = tl.min(tl.where(has_pair, pairs, num_rows * K), axis=0)
        if (least == num_rows * K) if BY_EXPERT else (least != group):
            return

    outputs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    inputs = tl.arange(0, BLOCK_IN)
    has_output = outputs < out_size
    # All gates come first, or each gate precedes its up.
    LINES: tl.constexpr = 2 if IS_GATED else 1
    STEP: tl.constexpr = 2 if IS_GATED and IS_CLAMPED else 1
    to_up = 1 if IS_CLAMPED else out_size
    numbers_of_lines = expert.to(tl.int64) * LINES * out_size + outputs * STEP
    source = pairs // K if IS_GATED else pairs
    x += source.to(tl.int64)[:, None] * x_stride + inputs[None, :]
    FIRST: tl.constexpr = BLOCK_OUT if IS_SWAPPED else BLOCK_ROWS
    SECOND: tl.constexpr = BLOCK_ROWS if IS_SWAPPED else BLOCK_OUT
    sums = tl.zeros((FIRST, SECOND), tl.float32)
    more = tl.zeros((FIRST, SECOND), tl.float32)
    for start in range(0, IN, BLOCK_IN):
        is_value = has_pair[:, None]
        if IN % BLOCK_IN != 0:
            is_value = is_value & (start + inputs < IN)[None, :]
        values = tl.load(x + start, mask=is_value, other=0.0)
        for half in tl.static_range(LINES):
            lines = _load_lines(
                matrix,
                scales,
                factors,
                zeros,
                numbers_of_lines + half * to_up,
                has_output,
                start,
                magic_bits,
                IN,
                BITS,
                GROUP,
                RUN,
                MIDDLE,
                HAS_MINIMUMS,
                BLOCK_OUT,
                BLOCK_IN,
            ).to(x.dtype.element_ty)
            if half == 0:
                sums = _added(sums, values, lines, IS_SWAPPED, WIDEN)
            else:
                more = _added(more, values, lines, IS_SWAPPED, WIDEN)
    if IS_SWAPPED:
        sums, more = sums.trans(), more.trans()
    if bias is not None:
        added = tl.load(bias + numbers_of_lines, mask=has_output, other=0.0).to(tl.float32)
        sums = add_bias(sums, added[None, :])
        if IS_GATED:
            added = tl.load(bias + numbers_of_lines + to_up, mask=has_output, other=0.0).to(tl.float32)
            more = add_bias(more, added[None, :])
    result = sums.to(out.dtype.element_ty)
    if IS_GATED:
        up = more.to(out.dtype.element_ty)
        result = _gated_by_limits(result, up, alpha, limit) if IS_CLAMPED else gated(result, up, IS_GELU)
    target = out + pairs.to(tl.int64)[:, None] * out_size + outputs[None, :]
    tl.store(target, result, mask=has_pair[:, None] & has_output[None, :])


@triton.jit
def _load_lines(
    matrix,
    scales,  # or None
    factors,  # or None
    zeros,  # or None
    numbers,
    has_line,
    start,
    magic_bits,
    IN: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """Inputs from `start` on of the lines `numbers`, `[BLOCK_IN, BLOCK_OUT]`."""
    if scales is None:
        inputs = start + tl.arange(0, BLOCK_IN)
        inside = has_line[None, :]
        if IN % BLOCK_IN != 0:
            inside = inside & (inputs < IN)[:, None]
        lines = tl.load(matrix + numbers[None, :] * IN + inputs[:, None], mask=inside, other=0.0)
    else:
        lines = unpack_tile(
            matrix,
            scales,
            factors,
            zeros,
            numbers,
            has_line,
            start,
            magic_bits,
            IN,
            BITS,
            GROUP,
            RUN,
            MIDDLE,
            HAS_MINIMUMS,
            BLOCK_OUT,
            BLOCK_IN,
        ).trans()
    return lines


@triton.jit
def _gated_by_limits(gate, up, alpha, limit):
    """See `ClampedGate`."""
    wide = tl.minimum(gate.to(tl.float32), limit)
    shifted = tl.minimum(tl.maximum(up.to(tl.float32), -limit), limit) + 1.0
    return (shifted * (wide / (1.0 + tl.exp(-alpha * wide)))).to(gate.dtype)


@triton.jit
def _added(sums, values, lines, IS_SWAPPED: tl.constexpr, WIDEN: tl.constexpr):
    """`sums + values · lines`, or all of this transposed."""
    if WIDEN:
        values, lines = values.to(tl.float32), lines.to(tl.float32)
    if IS_SWAPPED:
        sums = tl.dot(lines.trans(), values.trans(), sums, input_precision="ieee")
    else:
        sums = tl.dot(values, lines, sums, input_precision="ieee")
    return sums


@triton.jit
def combine_kernel(
    results, weights, residual, out, size, residual_stride, K: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """Program (row, block): `BLOCK` numbers of a row."""
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    mixed = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(K):
        part = tl.load(results + (row * K + place) * size + columns, mask=inside, other=0.0).to(tl.float32)
        mixed += tl.load(weights + row * K + place) * part
    if residual is not None:
        mixed += tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + columns, mixed.to(out.dtype.element_ty), mask=inside)
