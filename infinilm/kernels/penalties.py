"""Repetition, frequency and presence penalties, for all rows that have any."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infinilm.kernels.support import has_kernels

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    Penalize = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]

IN_PROMPT = 1 << 30  # added to the count of a token that is in the prompt


def penalize_torch(logits: Tensor, places: Tensor, slots: Tensor, counts: Tensor, penalties: Tensor) -> None:
    """Penalise rows `places` [k] of `logits` [n, vocab] float32 in place. They have the penalties and counts of `slots`
    [k].

    `counts` [slots, vocab] int32 is how often each token is in the answer, plus `IN_PROMPT` if it is in the prompt;
    `penalties` [slots, 3] float32 are repetition (divides positive logits of tokens in prompt or answer, multiplies
    negative ones), frequency (subtracted per occurrence in the answer) and presence (subtracted once).
    """
    import torch

    values, count = logits[places], counts[slots]
    repetition, frequency, presence = penalties[slots].unsqueeze(-1).unbind(1)  # each [k, 1]
    factors = torch.where(count != 0, repetition, 1.0)
    values = torch.where(values > 0, values / factors, values * factors)
    num_drawn = (count & (IN_PROMPT - 1)).to(torch.float32)
    values -= frequency * num_drawn
    values -= presence * num_drawn.clamp(max=1)
    logits[places] = values


def find_penalize(device: torch.device) -> Penalize:
    if not has_kernels(device):
        return penalize_torch
    from infinilm.kernels.penalties_kernel import penalize  # needs Triton

    return penalize
