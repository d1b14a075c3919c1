"""Top-k, top-p and min-p as one cut-off value per row, read off the row's sorted logits.

The greatest `NUM_LEADERS` logits are mostly enough; otherwise the whole row is sorted. They are found through the
maxima of small blocks: a row's k greatest values lie in the k blocks with the greatest maxima. Maxima are fast to
compute, so nearly all of the vocabulary is read only once.

Probabilities are summed as integers, in units of 2⁻⁴⁰ of the row's greatest, so neither the order of the additions nor
the number of logits changes the result.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

BLOCK = 32
WEIGHT_UNITS = 2.0**40
ELEMENTS_PER_PASS = 2**18  # on a CPU, larger operands leave the cache between one operation and the next


def first_max(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The greatest value and its first index, both [n], of each row of `values` [n, vocab]; NaN for a row with NaN."""
    num_rows, vocab_size = values.shape
    if vocab_size % BLOCK:
        best = values.max(dim=-1)
        return best.values, best.indices
    blocks = values.view(num_rows, -1, BLOCK)
    best_block = blocks.amax(dim=-1).max(dim=-1).indices  # [n]
    best = blocks.gather(1, best_block.view(-1, 1, 1).expand(-1, 1, BLOCK)).squeeze(1).max(dim=-1)
    return best.values, best_block * BLOCK + best.indices


def block_topk(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` greatest values, best first, and their indices, both [n, count], of `values` [n, vocab]."""
    num_rows, vocab_size = values.shape
    if vocab_size % BLOCK or vocab_size <= 2 * count * BLOCK:
        best = values.topk(count)
        return best.values, best.indices
    maxima = values.view(num_rows, -1, BLOCK).amax(dim=-1)
    blocks = maxima.topk(count, sorted=False).indices  # [n, count]
    within = torch.arange(BLOCK, device=values.device)
    indices = (blocks.unsqueeze(-1) * BLOCK + within).flatten(1)  # [n, count * BLOCK]
    best = values.gather(1, indices).topk(count)
    return best.values, indices.gather(1, best.indices)


@dataclass(frozen=True, slots=True)
class Scale:
    """How n rows' logits are scaled: minus the row's greatest, over its temperature.

    The greatest scaled logit is 0, so no temperature, however low, makes one overflow.
    """

    row_max: torch.Tensor  # [n, 1] float32
    temperature: torch.Tensor  # [n, 1] float32

    @classmethod
    def of(cls, logits: torch.Tensor, temperature: torch.Tensor) -> "Scale":
        return cls(logits.amax(dim=-1, keepdim=True), temperature)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The scaled logits, new, of any of the rows' `logits` [n, m]."""
        return (logits - self.row_max).div_(self.temperature)

    def select(self, rows: torch.Tensor | slice) -> "Scale":
        return Scale(self.row_max[rows], self.temperature[rows])


def row_passes(logits: torch.Tensor) -> Iterator[slice]:
    """The rows of `logits` [n, m], in slices that fit into the cache."""
    num_rows, width = logits.shape
    rows_at_once = max(1, ELEMENTS_PER_PASS // width) if logits.device.type == "cpu" else num_rows
    for start in range(0, num_rows, rows_at_once):
        yield slice(start, start + rows_at_once)


@dataclass(frozen=True, slots=True)
class Limits:
    """Truncation of n rows. A field is None if it limits none of them."""

    top_k: torch.Tensor | None  # [n, 1] int64, from 1; vocab_size keeps everything
    top_p: torch.Tensor | None  # [n, 1] float64, in (0, 1]; 1 keeps everything
    log_min_p: torch.Tensor | None  # [n, 1] float32; -inf keeps everything

    def select(self, rows: torch.Tensor) -> "Limits":
        fields = (self.top_k, self.top_p, self.log_min_p)
        return Limits(*(None if field is None else field[rows] for field in fields))


def sorted_descending(logits: torch.Tensor) -> torch.Tensor:
    """`logits` [n, vocab], each row sorted. On a CPU NumPy sorts, thirty times as fast as PyTorch."""
    if logits.device.type == "cpu":
        return torch.from_numpy(np.sort(logits.numpy(), axis=-1)).flip(-1)
    return logits.sort(dim=-1, descending=True).values


def weights_of(logits: torch.Tensor, scale: Scale) -> torch.Tensor:
    """The probabilities, [n, m] int64 in `WEIGHT_UNITS`, of any of the rows' `logits` [n, m]."""
    return scale.apply(logits).exp_().mul_(WEIGHT_UNITS).to(torch.int64)


def total_weights(logits: torch.Tensor, scale: Scale) -> torch.Tensor:
    passes = row_passes(logits)
    sums = [weights_of(logits[rows], scale.select(rows)).sum(dim=-1, keepdim=True) for rows in passes]
    return torch.cat(sums)


def find_cutoffs(
    leaders: torch.Tensor, vocab_size: int, scale: Scale, limits: Limits, totals: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cut-offs [n, 1], and for which rows they are certain and keep only `leaders`, [n] bool.

    `leaders` [n, c] are the rows' greatest logits, best first. Unless they are the whole vocabulary, `totals`
    [n, 1] holds the weight of it all in rows with top-p and no top-k; elsewhere it can be anything.
    """
    last = leaders[:, -1:]
    cutoffs = torch.full_like(last, -torch.inf)
    is_sure = torch.ones_like(last, dtype=torch.bool)
    if limits.top_k is not None:
        is_limited = limits.top_k < vocab_size
        kth = leaders.gather(1, limits.top_k.clamp(max=leaders.shape[1]) - 1)
        cutoffs = torch.where(is_limited, kth, cutoffs)
        is_sure = ~is_limited | (last < cutoffs)
    if limits.top_p is not None:
        weights = weights_of(leaders, scale)
        if limits.top_k is not None:
            weights.masked_fill_(leaders < cutoffs, 0)
        reached = weights.cumsum(dim=-1)
        if totals is None:
            totals = reached[:, -1:]
        elif limits.top_k is not None:
            totals = torch.where(is_limited, reached[:, -1:], totals)
        goals = (totals.to(torch.float64) * limits.top_p).ceil_().to(torch.int64)
        crossing = torch.searchsorted(reached, goals).clamp_(max=leaders.shape[1] - 1)
        nucleus = torch.maximum(cutoffs, leaders.gather(1, crossing))
        cutoffs = torch.where(limits.top_p < 1, nucleus, cutoffs)
    if limits.log_min_p is not None:
        cutoffs = torch.maximum(cutoffs, scale.row_max + scale.temperature * limits.log_min_p)
    has_all = leaders.shape[1] == vocab_size
    return cutoffs, (is_sure & (last < cutoffs) | has_all).squeeze(1)
