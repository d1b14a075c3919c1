"""Log-probabilities under the model's own distribution, of sampled tokens and of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infinilm.kernels import native
from infinilm.kernels.support import has_kernels
from infinilm.outputs import TokenLogprobs

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities at n positions, of a token and of the k likeliest ones: tensors or arrays."""

    ids: Any  # [n, 2 + k] int64: the token, its rank (1 for the likeliest), the likeliest tokens, best first
    values: Any  # [n, 1 + k] float32: the token's, those of the likeliest

    def to_pinned(self) -> "Logprobs":
        from infinilm.kernels.copies import to_pinned

        return Logprobs(to_pinned(self.ids), to_pinned(self.values))

    def to_host(self, num_top: Sequence[int] | None = None) -> list[TokenLogprobs]:
        """One entry per position, with its `num_top` most likely tokens (None: all k). Waits for the device."""
        limits = [self.ids.shape[1] - 2] * len(self.ids) if num_top is None else num_top
        return [
            TokenLogprobs(ids[0], values[0], ids[1], dict(zip(ids[2 : 2 + limit], values[1 : 1 + limit], strict=True)))
            for ids, values, limit in zip(self.ids.tolist(), self.values.tolist(), limits, strict=True)
        ]


def logprobs_of(logits: "torch.Tensor", targets: "torch.Tensor", num_top: int) -> Logprobs:
    """Log-probabilities of `targets` [n] and of the `num_top` likeliest tokens, from raw `logits` [n, vocab].

    Ranks are counted in the logits, which distinguish values that round to equal log-probabilities.
    """
    num_top = min(num_top, logits.shape[1])
    if has_kernels(logits.device):
        return _by_kernels(logits, targets, num_top)
    import torch

    from infinilm.sampling.truncation import block_topk

    logits = logits.float()
    library: Any = native.load()
    if logits.device.type == "cpu" and library is not None:
        found, values = (torch.empty(len(logits), 1 + num_top, dtype=kind) for kind in (torch.int64, torch.float32))
        library.logprobs(*native.arrays_of(logits.contiguous(), targets.contiguous(), found, values))
        return Logprobs(torch.cat((targets.unsqueeze(1), found), dim=1), values)
    logprobs = torch.log_softmax(logits, dim=-1)
    columns = targets.unsqueeze(1)
    ranks = (logits > logits.gather(1, columns)).sum(dim=-1, keepdim=True) + 1
    _, top_ids = block_topk(logits, num_top)
    return Logprobs(
        torch.cat((columns, ranks, top_ids), dim=1),
        logprobs.gather(1, torch.cat((columns, top_ids), dim=1)),
    )


def _by_kernels(logits: "torch.Tensor", targets: "torch.Tensor", num_top: int) -> Logprobs:
    import torch

    from infinilm.kernels.row_summary import MAX_TOP, top_logprobs  # which needs Triton

    if num_top <= MAX_TOP:
        return Logprobs(*top_logprobs(logits, targets, num_top)[:2])
    ids, values, log_totals = top_logprobs(logits, targets, 0)
    top_ids = torch.cat([_topk_of_row(row, num_top) for row in logits])
    top_values = logits.gather(1, top_ids).float() - log_totals.unsqueeze(1)
    return Logprobs(torch.cat((ids, top_ids), dim=1), torch.cat((values, top_values), dim=1))


def _topk_of_row(logits: "torch.Tensor", count: int) -> "torch.Tensor":
    """The ids `[1, count]` of the greatest `logits` `[vocab]`, best first. Equal ones are in order of their ids, which
    libraries don't ensure."""
    import torch

    bits = logits.float().view(torch.int32)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    return (keys - torch.arange(len(keys), device=keys.device)).topk(count).indices.unsqueeze(0)
