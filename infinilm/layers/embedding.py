"""The table of token embeddings."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedding(nn.Module):
    """One row of `hidden` numbers per token of the vocabulary."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        weight = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up `ids` `[T]`: `[T, hidden]`."""
        return F.embedding(ids, self.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """Use the table as the output head, for models that tie the two: `[n, hidden]` to `[n, vocab]`."""
        return F.linear(hidden, self.weight)
