"""The sums, ranks and maxima that log-probabilities need, in one pass over the logits."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 32  # tokens whose greatest logit is kept; see `sampling.truncation`
_BLOCK = tl.constexpr(BLOCK)
_NUM_BLOCKS = tl.constexpr(64)  # of a tile
_NUM_TILES = tl.constexpr(4)  # of a program
_SPAN = BLOCK * _NUM_BLOCKS.value * _NUM_TILES.value
_INF = tl.constexpr(float("inf"))


@dataclass(frozen=True, slots=True)
class RowSummary:
    log_totals: Tensor  # [n, 1] float32: logarithms of the sums of exp(logit)
    targets: Tensor  # [n, 1] float32: the logits of the tokens asked for
    num_above: Tensor  # [n] int64: logits greater than those
    maxima: Tensor  # [n, ceil(vocab / BLOCK)] float32: the greatest logits of blocks


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
        # A span of -inf alone has the total 0, not NaN.
        origin = tl.where(new_greatest == -_INF, 0.0, new_greatest)
        total = total * tl.exp(greatest - origin) + tl.sum(tl.exp(values - origin))
        greatest = new_greatest
    tl.store(span_maxima + row * num_spans + span, greatest)
    tl.store(totals + row * num_spans + span, total)
    tl.store(num_above + row * num_spans + span, above)


def summarize(logits: Tensor, target_ids: Tensor) -> RowSummary:
    """Summarise rows of `logits` [n, vocab], each with one token of `target_ids` [n] int64."""
    num_rows, vocab_size = logits.shape
    num_blocks, num_spans = triton.cdiv(vocab_size, BLOCK), triton.cdiv(vocab_size, _SPAN)
    maxima = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=logits.device)
    span_maxima, totals = torch.empty(2, num_rows, num_spans, dtype=torch.float32, device=logits.device)
    num_above = torch.empty(num_rows, num_spans, dtype=torch.int32, device=logits.device)
    _summarize_kernel[num_rows, num_spans](
        logits, logits.stride(0), vocab_size, target_ids, num_blocks, num_spans, maxima, span_maxima, totals, num_above
    )
    greatest = span_maxima.amax(dim=1, keepdim=True)
    total = (totals * (span_maxima - greatest).exp()).sum(dim=1, keepdim=True)
    targets = logits.gather(1, target_ids.unsqueeze(1)).float()
    return RowSummary(greatest + total.log(), targets, num_above.sum(dim=1), maxima)
