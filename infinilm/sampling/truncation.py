"""Top-k, top-p and min-p as one cut-off value per row.

Probabilities are summed as integers, in units of 2⁻⁴⁰ of the greatest one, so a cut-off does not depend on the
order of the additions. The two ways of finding it, from the leading candidates and by bisection over the
whole row, therefore give the same value; the first is quick, the second always works.
"""

from dataclasses import dataclass

import torch

from infinilm.sampling.leading import leading

NUM_CANDIDATES = 256
WEIGHT_BITS = 40


@dataclass(frozen=True, slots=True)
class Limits:
    """What truncates each of n rows. A field is None if it limits none of them."""

    top_k: torch.Tensor | None  # [n, 1] int64, at least 1
    top_p: torch.Tensor | None  # [n, 1] float64, in (0, 1]; 1 keeps everything
    log_min_p: torch.Tensor | None  # [n, 1] float32, -inf keeps everything

    def select(self, rows: torch.Tensor) -> "Limits":
        """The limits of some rows."""
        fields = (self.top_k, self.top_p, self.log_min_p)
        return Limits(*(None if field is None else field[rows] for field in fields))


@dataclass(frozen=True, slots=True)
class Candidates:
    """The leading tokens of n rows, best first."""

    logits: torch.Tensor  # [n, c] float32
    token_ids: torch.Tensor  # [n, c] int64

    @classmethod
    def of(cls, logits: torch.Tensor) -> "Candidates":
        """The candidates of `logits` [n, vocab]."""
        return cls(*leading(logits, min(NUM_CANDIDATES, logits.shape[1])))


def min_p_cutoffs(row_max: torch.Tensor, temperature: torch.Tensor, limits: Limits) -> torch.Tensor:
    """The logits [n, 1] below which min-p drops tokens."""
    if limits.log_min_p is None:
        return torch.full_like(row_max, -torch.inf)
    return row_max + temperature * limits.log_min_p


def weights_of(scaled_logits: torch.Tensor) -> torch.Tensor:
    """Probabilities as int64 multiples of 2⁻⁴⁰ of the row's greatest, from logits whose maximum is 0."""
    return scaled_logits.exp().mul_(2.0**WEIGHT_BITS).to(torch.int64)


def candidate_cutoffs(
    logits: torch.Tensor, scaled_logits: torch.Tensor, limits: Limits, candidates: Candidates
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cut-offs [n, 1] of top-k and top-p, and which rows' candidates were enough to tell them, [n] bool.

    `logits` are [n, vocab]; `scaled_logits` are the same less their maximum, over the temperature.
    """
    num_rows, vocab_size = logits.shape
    num_candidates = candidates.logits.shape[1]
    cutoffs = logits.new_full((num_rows, 1), -torch.inf)
    is_enough = torch.ones(num_rows, 1, dtype=torch.bool, device=logits.device)
    if limits.top_k is not None:
        last = candidates.logits.gather(1, limits.top_k.clamp(max=num_candidates) - 1)
        cutoffs = torch.where(limits.top_k < vocab_size, last, cutoffs)
        is_enough = (limits.top_k <= num_candidates) | (limits.top_k >= vocab_size)
    if limits.top_p is not None:
        weights = weights_of(scaled_logits)
        if limits.top_k is not None:
            weights.masked_fill_(logits < cutoffs, 0)
        reached = weights.gather(1, candidates.token_ids).cumsum(dim=-1)
        num_before = (reached < _goals(weights, limits.top_p)).sum(dim=-1, keepdim=True)
        crossing = candidates.logits.gather(1, num_before.clamp(max=num_candidates - 1))
        is_full = limits.top_p >= 1
        cutoffs = torch.where(is_full, cutoffs, torch.maximum(cutoffs, crossing))
        is_enough &= is_full | (num_before < num_candidates)
    return cutoffs, is_enough.squeeze(1)


def searched_cutoffs(logits: torch.Tensor, scaled_logits: torch.Tensor, limits: Limits) -> torch.Tensor:
    """The same cut-offs [n, 1], with no limit on how many tokens they keep."""
    cutoffs = logits.new_full((logits.shape[0], 1), -torch.inf)
    if limits.top_k is not None:
        cutoffs = _bisect(logits, None, limits.top_k.clamp(max=logits.shape[1]))
    if limits.top_p is not None:
        weights = weights_of(scaled_logits)
        if limits.top_k is not None:
            weights.masked_fill_(logits < cutoffs, 0)
        crossing = _bisect(logits, weights, _goals(weights, limits.top_p))
        cutoffs = torch.where(limits.top_p >= 1, cutoffs, torch.maximum(cutoffs, crossing))
    return cutoffs


def _goals(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The weight [n, 1] that the kept tokens must reach."""
    total = weights.sum(dim=-1, keepdim=True)
    return (total.to(torch.float64) * top_p).ceil_().to(torch.int64)


def _bisect(logits: torch.Tensor, weights: torch.Tensor | None, goals: torch.Tensor) -> torch.Tensor:
    """The greatest value v of each row such that its tokens with logit ≥ v weigh at least `goals` [n, 1].

    Without `weights` each token weighs 1. The search halves the range of float32 bit patterns, taken in the
    order of the numbers they stand for, so 32 steps always end at one of the row's own logits.
    """
    low = torch.full_like(goals, _order_of(-torch.inf))  # all tokens: enough
    high = torch.full_like(goals, _order_of(torch.inf))  # no token: not enough
    for _ in range(32):
        middle = (low + high) >> 1
        is_kept = logits >= _number_at(middle)
        kept = is_kept if weights is None else torch.where(is_kept, weights, 0)
        is_enough = kept.sum(dim=-1, keepdim=True) >= goals
        low = torch.where(is_enough, middle, low)
        high = torch.where(is_enough, high, middle)
    return _number_at(low)


def _number_at(order: torch.Tensor) -> torch.Tensor:
    """The float32 at a place in the order of all of them; negative places hold negative numbers."""
    bits = torch.where(order < 0, order ^ 0x7FFFFFFF, order)
    return bits.to(torch.int32).view(torch.float32)


def _order_of(number: float) -> int:
    bits = int(torch.tensor(number, dtype=torch.float32).view(torch.int32))
    return bits ^ 0x7FFFFFFF if bits < 0 else bits
