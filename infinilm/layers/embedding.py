"""The table of token embeddings."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinilm.layers.dense import dense_linear

# Rows for which MKL takes longer to multiply by a table of this layout than for one row more than the last:
# 8 rows take 15 ms and 16 rows 9 ms for a vocabulary of 49,152 and a hidden size of 576.
SLOW_ROWS = (5, 15)


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
        num_rows = len(hidden)
        if hidden.device.type == "cpu" and SLOW_ROWS[0] <= num_rows <= SLOW_ROWS[1]:
            hidden = F.pad(hidden, (0, 0, 0, SLOW_ROWS[1] + 1 - num_rows))
        return dense_linear(hidden, self.weight)[:num_rows]
