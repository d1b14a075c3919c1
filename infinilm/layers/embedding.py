"""The table of token embeddings."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# For these numbers of rows a CPU's float32 product with a table of this layout first copies the whole table, which
# takes longer than multiplying by it. A batch of products with narrow strips of the table does without.
COPIED_ROWS = range(4, 16)
STRIP = 64


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
        vocab_size, hidden_size = self.weight.shape
        if self.weight.device.type != "cpu" or len(hidden) not in COPIED_ROWS or vocab_size % STRIP:
            return F.linear(hidden, self.weight)
        strips = self.weight.view(-1, STRIP, hidden_size).transpose(1, 2)
        product = torch.bmm(hidden.expand(len(strips), -1, -1), strips)  # [strips, n, STRIP]
        return product.transpose(0, 1).reshape(len(hidden), vocab_size)
