"""Log-probabilities of one token and of the likeliest tokens of each row, in one pass over the logits.

The first kernel reads the logits once, in spans. It sums weights, counts the logits above that of the given token, and
keeps the greatest logit of each small block. The second kernel uses these maxima to find the likeliest tokens: a row's
k greatest logits are in the k blocks with the greatest maxima.

Weights are added as integers. The order of a float sum would depend on the kernel's layout, which differs between
bfloat16 and float32, and a row's logits are float32 only in some steps.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TOP = 32
"""The largest number of likeliest tokens that the kernel can find."""
_BLOCK = tl.constexpr(32)  # tokens in a block, whose greatest logit is kept
_NUM_BLOCKS = tl.constexpr(64)  # blocks per tile
_NUM_TILES = tl.constexpr(4)  # tiles per program
_SPAN = _BLOCK.value * _NUM_BLOCKS.value * _NUM_TILES.value
_INF = tl.constexpr(float("inf"))
_LOWEST = tl.constexpr(-(2**31))  # less than the key of any logit
_UNITS = tl.constexpr(2.0**40)  # the integer weight of a tile's greatest logit


@triton.jit
def _sum_weights(weights):
    """The sum of the weights. Its bits do not depend on the order. NaN if a weight is NaN."""
    is_nan = weights != weights  # noqa: PLR0124
    total = tl.sum(tl.where(is_nan, 0.0, weights * _UNITS).to(tl.int64)).to(tl.float32) / _UNITS
    return tl.where(tl.sum(is_nan.to(tl.int32)) > 0, float("nan"), total)


@triton.jit
def _summarize_kernel(
    logits, logits_stride, vocab_size, target_ids, num_blocks, num_spans, maxima, span_maxima, totals, num_above
):
    """Program (row, span of the vocabulary)."""
    row = tl.program_id(0)
    span = tl.program_id(1)
    own = logits + row.to(tl.int64) * logits_stride
    target = tl.load(own + tl.load(target_ids + row)).to(tl.float32)
    greatest = -_INF
    total = 0.0
    above = 0
    for tile in tl.static_range(_NUM_TILES):
        blocks = (span * _NUM_TILES + tile) * _NUM_BLOCKS + tl.arange(0, _NUM_BLOCKS)
        ids = blocks[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
        values = tl.load(own + ids, mask=ids < vocab_size, other=-_INF).to(tl.float32)
        block_maxima = tl.max(values, 1)
        tl.store(maxima + row * num_blocks + blocks, block_maxima, mask=blocks < num_blocks)
        above += tl.sum((values > target).to(tl.int32))
        new_greatest = tl.maximum(greatest, tl.max(block_maxima))
        # A span that has only -inf gets the total 0, not NaN.
        origin = tl.where(new_greatest == -_INF, 0.0, new_greatest)
        total = tl.fma(total, tl.exp(greatest - origin), _sum_weights(tl.exp(values - origin)))
        greatest = new_greatest
    tl.store(span_maxima + row * num_spans + span, greatest)
    tl.store(totals + row * num_spans + span, total)
    tl.store(num_above + row * num_spans + span, above)


@triton.jit
def _keys_of(values):
    """Integers in the order of float32 `values`. None of them is `_LOWEST`."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _finish_kernel(
    logits,
    logits_stride,
    vocab_size,
    target_ids,
    num_blocks,
    num_spans,
    maxima,
    span_maxima,
    totals,
    num_above,
    log_totals,
    ids_out,
    values_out,
    NUM_TOP: tl.constexpr,
    TOP_WIDTH: tl.constexpr,
    BLOCKS_WIDTH: tl.constexpr,
    SPANS_WIDTH: tl.constexpr,
):
    """Program (row). The widths are the counts, rounded up to powers of two."""
    row = tl.program_id(0)
    own = logits + row.to(tl.int64) * logits_stride
    ids_out += row * (2 + NUM_TOP)
    values_out += row * (1 + NUM_TOP)

    spans = row * num_spans + tl.arange(0, SPANS_WIDTH)
    is_span = tl.arange(0, SPANS_WIDTH) < num_spans
    greatest_of_spans = tl.load(span_maxima + spans, mask=is_span, other=-_INF)
    greatest = tl.max(greatest_of_spans)
    total = _sum_weights(tl.load(totals + spans, mask=is_span, other=0.0) * tl.exp(greatest_of_spans - greatest))
    log_total = greatest + tl.log(total)
    tl.store(log_totals + row, log_total)
    target = tl.load(target_ids + row)
    tl.store(ids_out, target)
    tl.store(ids_out + 1, tl.sum(tl.load(num_above + spans, mask=is_span, other=0)).to(tl.int64) + 1)
    tl.store(values_out, tl.load(own + target).to(tl.float32) - log_total)

    if NUM_TOP > 0:
        places = tl.arange(0, BLOCKS_WIDTH)
        block_values = tl.load(maxima + row * num_blocks + places, mask=places < num_blocks, other=-_INF)
        block_keys = tl.where(places < num_blocks, _keys_of(block_values), _LOWEST)
        tops = tl.arange(0, TOP_WIDTH)
        chosen = tl.zeros([TOP_WIDTH], tl.int32) + num_blocks
        for i in tl.static_range(NUM_TOP):
            key, place = tl.max(block_keys, 0, return_indices=True)
            chosen = tl.where((tops == i) & (key != _LOWEST), place, chosen)
            block_keys = tl.where(places == place, _LOWEST, block_keys)
        ids = chosen[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
        values = tl.load(own + ids, mask=ids < vocab_size, other=-_INF).to(tl.float32)
        keys = tl.where(ids < vocab_size, _keys_of(values), _LOWEST).to(tl.int64)
        # Among equal logits the first has the greatest key.
        keys = tl.reshape((keys << 32) + (0x7FFFFFFF - ids), [TOP_WIDTH * _BLOCK])
        for i in tl.static_range(NUM_TOP):
            best = tl.max(keys, 0)
            keys = tl.where(keys == best, -(2**63), keys)
            found = 0x7FFFFFFF - (best & 0xFFFFFFFF)
            tl.store(ids_out + 2 + i, found)
            tl.store(values_out + 1 + i, tl.load(own + found).to(tl.float32) - log_total)


def top_logprobs(logits: Tensor, target_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """The fields of `Logprobs` for the rows of `logits` [n, vocab], with one target token per row, `target_ids` [n]
    int64.

    Returns `ids` [n, 2 + num_top] int64, `values` [n, 1 + num_top] float32, and the log totals [n] float32 that were
    subtracted from the logits. `num_top` is at most `MAX_TOP` and the vocabulary's size.
    """
    num_rows, vocab_size = logits.shape
    num_blocks, num_spans = triton.cdiv(vocab_size, _BLOCK.value), triton.cdiv(vocab_size, _SPAN)
    maxima = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=logits.device)
    span_maxima, totals = torch.empty(2, num_rows, num_spans, dtype=torch.float32, device=logits.device)
    num_above = torch.empty(num_rows, num_spans, dtype=torch.int32, device=logits.device)
    log_totals = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, 2 + num_top, dtype=torch.int64, device=logits.device)
    values = torch.empty(num_rows, 1 + num_top, dtype=torch.float32, device=logits.device)
    rows = (logits, logits.stride(0), vocab_size, target_ids, num_blocks, num_spans)
    parts = (maxima, span_maxima, totals, num_above)
    _summarize_kernel[num_rows, num_spans](*rows, *parts)
    _finish_kernel[num_rows,](
        *rows,
        *parts,
        log_totals,
        ids,
        values,
        NUM_TOP=num_top,
        TOP_WIDTH=triton.next_power_of_2(max(num_top, 1)),
        BLOCKS_WIDTH=triton.next_power_of_2(num_blocks),
        SPANS_WIDTH=triton.next_power_of_2(num_spans),
        num_warps=8,
    )
    return ids, values, log_totals
