"""Draws tokens from logits in two kernels: a scan that reads all logits once, and one that settles each row.

The rules are those of `infinilm.sampling`, whose torch code is the reference: the Gumbel argmax of `noise` over the
tokens that the cut-off of `truncation` leaves. All settings are read on the device, so a captured graph works for any
mix of rows.

*Scan.* A token's exact score needs the row's greatest logit and two logarithms, which is too slow for every token: only
the integer hash can be computed at memory speed. But a number's bits, read as an integer, bound its −log₂ from above,
and an exponential variate −log(1 − v) is at least v. So an upper bound of the score is cheap, and the scan reduces each
block of the vocabulary to two numbers: its greatest logit and the greatest bound of its scores.

*Settle.* The block with the greatest bound is computed exactly. Another block can only win if its bound reaches the
best score found. So usually one block is enough, and the token is always the same as if all scores were computed.

*Truncation.* A cut-off is found by halving the range of logits that contains it. Each step reads only the blocks whose
greatest logit is in or above the range, and moves an end of the range to an existing logit, so that a dozen steps
suffice. Tokens more than `_REACH` temperatures below the greatest have no weight in truncation's units, and no noise
can make them win, so the range is finite from the start. The bounds of the remaining blocks are then computed again,
without the tokens that are cut off.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinilm.errors import InvalidValueError
from infinilm.kernels.early_launch import launches_early, let_next_start, wait_for_inputs

NUM_SETTINGS = 5  # columns of the settings that `draw` takes

_COLUMNS = tl.constexpr(NUM_SETTINGS)
_BLOCK = tl.constexpr(1024)  # tokens
# A program of the scan has 4 warps, each with its own block. Every thread holds 4 times 16 bytes of bfloat16 of it.
_SCAN_BLOCKS = tl.constexpr(4)
_SCAN_WIDTH = tl.constexpr(256)
# Blocks that the search reads together: 16 bytes of bfloat16 for each of 512 threads.
_GROUP = tl.constexpr(4)
# Two programs fit on a multiprocessor, so all of 256 rows are settled at once.
_SETTLE_LAUNCH = {"num_warps": 16, "maxnreg": 64}

_REACH = tl.constexpr(40.0)
_WEIGHT_UNITS = tl.constexpr(2.0**40)
_HASH_SCALE = tl.constexpr(2.0**-32 * (1 - 2.0**-24))
_LOG2_E = tl.constexpr(1.4426950408889634)
_ULP = tl.constexpr(2.0**-23)
# The offset of bounds: the exponent bias of float32, and 32 because hashes are in units of 2⁻³².
_BOUND_OFFSET = tl.constexpr(127.0 + 32.0)
# Bounds and scores are rounded a few times, each time by 2⁻²⁴ of their terms.
_ROUNDING = tl.constexpr(2.0**-20)
_LARGEST_TERM = tl.constexpr(512.0)
_LOWEST = tl.constexpr(-3.4e38)
_INF = tl.constexpr(float("inf"))


@triton.jit
def _number(settings, row, column: tl.constexpr):
    return tl.load(settings + row * _COLUMNS + column).to(tl.float64, bitcast=True)


@triton.jit
def _draw_key(settings, row, position):
    seed = tl.load(settings + row * _COLUMNS).to(tl.uint64, bitcast=True)
    key = seed + (position.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9
    key = (key ^ (key >> 27)) * 0x94D049BB133111EB
    key = key ^ (key >> 31)
    return (key >> 32).to(tl.uint32), key.to(tl.uint32)


@triton.jit
def _mix(value, upper, lower):
    value = ((value ^ upper) * 0x85EBCA6B) ^ lower
    value = (value ^ (value >> 13)) * 0xC2B2AE35
    return value ^ (value >> 16)


@triton.jit
def _token_part(token_ids):
    return _mix(token_ids.to(tl.uint32), 0, 0)


@triton.jit
def _bound(logits, parts, upper, lower, rate):
    """An upper bound of the tokens' scores in bits, except for rounding: see `_threshold`."""
    noise = _mix(parts, upper, lower).to(tl.float32).to(tl.int32, bitcast=True)
    return logits * rate - noise.to(tl.float32) * _ULP


@triton.jit
def _threshold(score, row_max, rate):
    """The least bound of a block that has a token with at least this score.

    If logits divided by the temperature exceed float32, it is NaN, and no bound is below it.
    """
    origin = row_max * rate
    return score * _LOG2_E + origin - _BOUND_OFFSET - _ROUNDING * (tl.abs(origin) + _LARGEST_TERM)


@triton.jit
def _scores(logits, token_ids, upper, lower, row_max, temperature):
    """The exact scores, float32 like the reference's, with correctly rounded logarithms."""
    hashes = _mix(_token_part(token_ids), upper, lower)
    uniform = ((hashes.to(tl.float32) + 0.5) * _HASH_SCALE).to(tl.float64)
    # 1 − v would lose the last digits of a small v, for which two terms of the series are exact enough.
    variate = tl.where(uniform < 2.0**-20, uniform + 0.5 * uniform * uniform, -tl.log(1.0 - uniform))
    noise = tl.log(variate.to(tl.float32).to(tl.float64)).to(tl.float32)
    return tl.div_rn(logits - row_max, temperature) - noise


@triton.jit(do_not_specialize=["num_rows", "rows_each"], do_not_specialize_on_alignment=["rows", "positions"])
def _scan(
    logits,
    logits_stride,
    vocab_size,
    settings,
    rows,
    positions,
    num_rows,
    rows_each,
    num_blocks,
    maxima,
    bounds,
    EARLY: tl.constexpr,
):
    """Program (span, group of rows): the maxima and bounds of `_SCAN_BLOCKS` blocks of `rows_each` rows.

    A maximum is +inf if there is NaN in the block. The bounds of a greedy row are its maxima.
    """
    let_next_start(EARLY)
    blocks = tl.program_id(0) * _SCAN_BLOCKS + tl.arange(0, _SCAN_BLOCKS)
    first = blocks[:, None] * _BLOCK + tl.arange(0, _SCAN_WIDTH)[None, :]
    token_ids = (first, first + _SCAN_WIDTH, first + 2 * _SCAN_WIDTH, first + 3 * _SCAN_WIDTH)
    # The same for all rows, so it is computed once.
    parts = (_token_part(token_ids[0]), _token_part(token_ids[1]), _token_part(token_ids[2]), _token_part(token_ids[3]))
    wait_for_inputs(EARLY)
    for member in range(rows_each):
        index = tl.program_id(1) * rows_each + member
        row = tl.load(rows + index, mask=index < num_rows, other=-1)
        # Loads start before the row's settings are read.
        own = logits + index.to(tl.int64) * logits_stride
        end = tl.where(index < num_rows, vocab_size, 0)
        values = (
            tl.load(own + token_ids[0], mask=token_ids[0] < end, other=float("-inf")).to(tl.float32),
            tl.load(own + token_ids[1], mask=token_ids[1] < end, other=float("-inf")).to(tl.float32),
            tl.load(own + token_ids[2], mask=token_ids[2] < end, other=float("-inf")).to(tl.float32),
            tl.load(own + token_ids[3], mask=token_ids[3] < end, other=float("-inf")).to(tl.float32),
        )
        if row >= 0:
            maximum = values[0]
            for step in tl.static_range(1, 4):
                maximum = tl.maximum(maximum, values[step], propagate_nan=tl.PropagateNan.ALL)
            bound = maximum
            temperature = _number(settings, row, 1).to(tl.float32)
            if temperature > 0:
                upper, lower = _draw_key(settings, row, tl.load(positions + index))
                rate = _LOG2_E / temperature
                bound = _bound(values[0], parts[0], upper, lower, rate)
                for step in tl.static_range(1, 4):
                    bound = tl.maximum(bound, _bound(values[step], parts[step], upper, lower, rate))
            maximum = tl.where(maximum >= float("-inf"), maximum, _INF)  # all but NaN
            places = index * num_blocks + blocks
            tl.store(maxima + places, tl.max(maximum, 1))
            tl.store(bounds + places, tl.max(bound, 1))


@triton.jit
def _load_blocks(own, vocab_size, order, start, count):
    """The logits and ids, both `[_GROUP, _BLOCK]`, of the blocks from place `start` to before `count` of `order`."""
    places = start + tl.arange(0, _GROUP)
    blocks = tl.load(order + places, mask=places < count, other=0)
    ids = blocks[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    mask = (places < count)[:, None] & (ids < vocab_size)
    return tl.load(own + ids, mask=mask, other=float("-inf")).to(tl.float32), ids


@triton.jit
def _measure(own, vocab_size, order, count, pivot, row_max, temperature, BY_WEIGHT: tl.constexpr):
    """The number or weight of the logits from `pivot` on, the least of them, and the greatest of the others."""
    amount = tl.zeros([_GROUP, _BLOCK], tl.int64)
    least = tl.full([_GROUP, _BLOCK], float("inf"), tl.float32)
    greatest = tl.full([_GROUP, _BLOCK], float("-inf"), tl.float32)
    for start in range(0, count, _GROUP):
        values, _ = _load_blocks(own, vocab_size, order, start, count)
        is_above = values >= pivot
        least = tl.where(is_above, tl.minimum(least, values), least)
        greatest = tl.where(is_above, greatest, tl.maximum(greatest, values))
        if BY_WEIGHT:
            weights = (tl.exp((values - row_max) / temperature) * _WEIGHT_UNITS).to(tl.int64)
            amount += tl.where(is_above, weights, 0)
        else:
            amount += is_above.to(tl.int64)
    return tl.sum(amount), tl.min(least), tl.max(greatest)


@triton.jit
def _search(own, vocab_size, order, block_maxima, low, row_max, temperature, top_k, top_p, BY_WEIGHT: tl.constexpr):
    """The greatest logit such that there are `top_k` logits of at least its value.

    With `BY_WEIGHT`: such that these weigh `top_p` of all logits of at least `low`. If all logits of at least `low` are
    not enough, the least of them.
    """
    count = tl.sum((block_maxima >= low).to(tl.int32))
    total, low, _ = _measure(own, vocab_size, order, count, low, row_max, temperature, BY_WEIGHT)
    goal = top_k
    if BY_WEIGHT:
        goal = tl.ceil(total.to(tl.float64) * top_p).to(tl.int64)
    high = tl.where(total > goal, row_max, low)
    while low < high:
        middle = low + (high - low) * 0.5
        pivot = tl.where(middle > low, middle, high)
        count = tl.sum((block_maxima >= low).to(tl.int32))
        reached, least, greatest = _measure(own, vocab_size, order, count, pivot, row_max, temperature, BY_WEIGHT)
        # Both ends are logits, and meet at the result.
        low = tl.where(reached >= goal, least, low)
        high = tl.where(reached > goal, high, tl.where(reached == goal, least, greatest))
    return low


@triton.jit
def _sort_blocks(block_maxima, maxima, num_blocks, order):
    """Write the blocks' numbers to `order`, the one with the greatest logit first."""
    blocks = tl.arange(0, block_maxima.shape[0])
    rank = tl.zeros([block_maxima.shape[0]], tl.int32)
    for start in range(0, num_blocks, 32):
        others = start + tl.arange(0, 32)
        values = tl.load(maxima + others, mask=others < num_blocks, other=float("-inf"))[None, :]
        is_tied = (values == block_maxima[:, None]) & (others[None, :] < blocks[:, None])
        rank += tl.sum(((values > block_maxima[:, None]) | is_tied).to(tl.int32), 1)
    tl.store(order + rank, blocks, mask=blocks < num_blocks)
    tl.debug_barrier()


@triton.jit
def _find_cutoff(
    own, vocab_size, block_maxima, maxima, num_blocks, order, row_max, temperature, top_k, top_p, log_min_p
):
    """The cut-off of a row with limits. Writes the sorted blocks to `order`."""
    _sort_blocks(block_maxima, maxima, num_blocks, order)
    cutoff = row_max - _REACH * temperature
    if top_k < vocab_size:
        if top_k <= num_blocks:  # the blocks' greatest logits are logits, too
            cutoff = tl.maximum(cutoff, tl.load(maxima + tl.load(order + top_k - 1)))
        cutoff = _search(own, vocab_size, order, block_maxima, cutoff, row_max, temperature, top_k, top_p, False)
    if top_p < 1:
        cutoff = _search(own, vocab_size, order, block_maxima, cutoff, row_max, temperature, top_k, top_p, True)
    return tl.maximum(cutoff, row_max + temperature * log_min_p)


@triton.jit
def _bound_again(own, vocab_size, block_maxima, order, bounds, upper, lower, rate, cutoff):
    """Recompute the bounds of the blocks with remaining tokens, from these tokens only."""
    count = tl.sum((block_maxima >= cutoff).to(tl.int32))
    for start in range(0, count, _GROUP):
        values, ids = _load_blocks(own, vocab_size, order, start, count)
        found = tl.where(values < cutoff, float("-inf"), _bound(values, _token_part(ids), upper, lower, rate))
        places = start + tl.arange(0, _GROUP)
        mask = places < count
        tl.store(bounds + tl.load(order + places, mask=mask, other=0), tl.max(found, 1), mask=mask)
    tl.debug_barrier()


@triton.jit(do_not_specialize_on_alignment=["rows", "positions"])
def _settle(
    logits,
    logits_stride,
    vocab_size,
    settings,
    rows,
    positions,
    num_blocks,
    maxima,
    bounds,
    orders,
    token_ids,
    are_finite,
    cutoffs,
    PADDED_BLOCKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (row): the row's token, from the maxima and bounds of its blocks."""
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    index = tl.program_id(0)
    row = tl.load(rows + index)
    maxima += index * num_blocks
    bounds += index * num_blocks
    blocks = tl.arange(0, PADDED_BLOCKS)
    block_maxima = tl.load(maxima + blocks, mask=blocks < num_blocks, other=float("-inf"))
    row_max = tl.where(row < 0, float("-inf"), tl.max(block_maxima))
    is_finite = (row_max > float("-inf")) & (row_max < float("inf"))
    tl.store(are_finite + index, is_finite)
    tl.store(token_ids + index, 0)
    tl.store(cutoffs + index, float("-inf"))
    if not is_finite:  # or padding
        return

    own = logits + index.to(tl.int64) * logits_stride
    temperature = _number(settings, row, 1).to(tl.float32)
    is_greedy = temperature == 0
    rate = _LOG2_E / tl.where(is_greedy, 1.0, temperature)
    upper, lower = _draw_key(settings, row, tl.load(positions + index))
    top_k = tl.load(settings + row * _COLUMNS + 2)
    top_p = _number(settings, row, 3)
    log_min_p = _number(settings, row, 4).to(tl.float32)
    cutoff = float("-inf")
    if ((top_k < vocab_size) | (top_p < 1) | (log_min_p > float("-inf"))) & (not is_greedy):
        order = orders + index * num_blocks
        cutoff = _find_cutoff(
            own, vocab_size, block_maxima, maxima, num_blocks, order, row_max, temperature, top_k, top_p, log_min_p
        )
        _bound_again(own, vocab_size, block_maxima, order, bounds, upper, lower, rate, cutoff)
        tl.store(cutoffs + index, cutoff)

    # Bounds are finite for all blocks with a token that can be drawn, and -inf for the others.
    bound = tl.load(bounds + blocks, mask=blocks < num_blocks, other=float("-inf"))
    has_tokens = (block_maxima >= cutoff) & (block_maxima > float("-inf"))
    bound = tl.where(has_tokens, tl.maximum(bound, _LOWEST), float("-inf"))
    best = float("-inf")
    winner = vocab_size
    threshold = float("-inf")
    greatest = tl.max(bound)
    while (greatest > float("-inf")) & (not greatest < threshold):
        block = tl.min(tl.where(bound == greatest, blocks, PADDED_BLOCKS))
        ids = block * _BLOCK + tl.arange(0, _BLOCK)
        values = tl.load(own + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        scores = values
        if not is_greedy:
            scores = _scores(values, ids, upper, lower, row_max, temperature)
            scores = tl.where(values < cutoff, float("-inf"), scores)
        score = tl.max(scores)
        first = tl.min(tl.where(scores == score, ids, vocab_size))
        winner = tl.where(score > best, first, tl.where(score == best, tl.minimum(first, winner), winner))
        best = tl.maximum(best, score)
        # The first block with the greatest logit has a greedy row's token.
        threshold = tl.where(is_greedy, _INF, _threshold(best, row_max, rate))
        bound = tl.where(blocks == block, float("-inf"), bound)
        greatest = tl.max(bound)
    tl.store(token_ids + index, winner.to(tl.int64))


def draw(
    logits: Tensor, settings: Tensor, rows: Tensor, positions: Tensor, cutoffs: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw one token per row of `logits` `[n, vocab]`. Returns the token ids `[n]` int64, and whether each row's
    greatest logit is finite, `[n]` bool. If it is not, the token is 0.

    `settings` `[max_rows, NUM_SETTINGS]` int64 has for each row: the scrambled seed; the temperature, 0 for greedy;
    `top_k`, the vocabulary size or more for no limit; `top_p`, 1 for none; the logarithm of `min_p`, -inf for none. All
    but the first and the third are the bits of float64 numbers. `rows` `[n]` has the rows of the settings; -1 is
    padding, whose result is meaningless. `positions` `[n]` is the number of tokens before each drawn token; both are of
    any integer type. The rows' cut-offs are written to `cutoffs` `[n]` float32, if given: -inf if there is no limit.

    The call does not wait for the device, and the launches depend only on the shapes.
    """
    num_rows, vocab_size = logits.shape
    if logits.stride(1) != 1 or settings.shape[1:] != (NUM_SETTINGS,) or not settings.is_contiguous():
        raise InvalidValueError(
            f"logits have strides {logits.stride()}, settings the shape {list(settings.shape)}; "
            f"a row's logits must be contiguous, settings contiguous [max_rows, {NUM_SETTINGS}]"
        )
    device = logits.device
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    are_finite = torch.empty(num_rows, dtype=torch.bool, device=device)
    if num_rows == 0:
        return token_ids, are_finite
    spans = triton.cdiv(vocab_size, _SCAN_BLOCKS.value * _BLOCK.value)
    num_blocks = spans * _SCAN_BLOCKS.value
    maxima, bounds = torch.empty(2, num_rows, num_blocks, dtype=torch.float32, device=device)
    orders = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=device)
    if cutoffs is None:
        cutoffs = torch.empty(num_rows, dtype=torch.float32, device=device)
    # Few rows need many programs; with many, a program reuses token hashes for several rows.
    rows_each = min(4, max(1, num_rows // 32))
    inputs = (logits, logits.stride(0), vocab_size, settings, rows, positions)
    early = launches_early(device)
    _scan[spans, triton.cdiv(num_rows, rows_each)](
        *inputs,
        num_rows,
        rows_each,
        num_blocks,
        maxima,
        bounds,
        EARLY=early,
        num_warps=_SCAN_BLOCKS.value,
        launch_pdl=early,
    )
    _settle[(num_rows,)](
        *inputs,
        num_blocks,
        maxima,
        bounds,
        orders,
        token_ids,
        are_finite,
        cutoffs,
        PADDED_BLOCKS=triton.next_power_of_2(num_blocks),
        EARLY=early,
        launch_pdl=early,
        **_SETTLE_LAUNCH,
        enable_fp_fusion=False,  # `row_max + temperature · log min_p` is rounded twice, as in the reference
    )
    return token_ids, are_finite
