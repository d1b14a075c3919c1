"""Log-probabilities under the model's own distribution, of sampled tokens and of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infinilm.kernels.copies import to_pinned
from infinilm.kernels.support import has_kernels
from infinilm.outputs import TokenLogprobs
from infinilm.sampling.truncation import block_topk


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities at n positions, on the device."""

    token_ids: torch.Tensor  # [n] int64
    logprobs: torch.Tensor  # [n] float32
    ranks: torch.Tensor  # [n] int64, 1 for the most likely token
    top_ids: torch.Tensor  # [n, k] int64, best first
    top_logprobs: torch.Tensor  # [n, k] float32

    def to_pinned(self) -> "Logprobs":
        columns = (self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs)
        return Logprobs(*map(to_pinned, columns))

    def to_host(self, num_top: Sequence[int] | None = None) -> list[TokenLogprobs]:
        """One entry per position, with its `num_top` most likely tokens (None: all k). Waits for the device."""
        columns = (self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs)
        entries = zip(*(column.tolist() for column in columns), strict=True)
        limits = [self.top_ids.shape[1]] * len(self.token_ids) if num_top is None else num_top
        return [
            TokenLogprobs(token_id, logprob, rank, dict(zip(ids[:limit], values[:limit], strict=True)))
            for (token_id, logprob, rank, ids, values), limit in zip(entries, limits, strict=True)
        ]


def logprobs_of(logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> Logprobs:
    """Log-probabilities of `targets` [n] and of the `num_top` likeliest tokens, from raw `logits` [n, vocab].

    Ranks are counted in the logits, which distinguish values that round to equal log-probabilities.
    """
    num_top = min(num_top, logits.shape[1])
    if has_kernels(logits.device):
        return _logprobs_by_kernel(logits, targets, num_top)
    logits = logits.float()
    logprobs = torch.log_softmax(logits, dim=-1)
    columns = targets.unsqueeze(1)
    _, top_ids = block_topk(logits, num_top)
    return Logprobs(
        token_ids=targets,
        logprobs=logprobs.gather(1, columns).squeeze(1),
        ranks=(logits > logits.gather(1, columns)).sum(dim=-1) + 1,
        top_ids=top_ids,
        top_logprobs=logprobs.gather(1, top_ids),
    )


def _logprobs_by_kernel(logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> Logprobs:
    """The same in one pass over the logits."""
    from infinilm.kernels.row_summary import summarize  # which needs Triton

    summary = summarize(logits, targets)
    top_logits, top_ids = block_topk(logits, num_top, summary.maxima)
    return Logprobs(
        token_ids=targets,
        logprobs=(summary.targets - summary.log_totals).squeeze(1),
        ranks=summary.num_above + 1,
        top_ids=top_ids,
        top_logprobs=top_logits.float() - summary.log_totals,
    )
