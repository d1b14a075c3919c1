"""The table of token embeddings and the output head, shared out over ranks by tokens of the vocabulary."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinilm.distributed.group import SINGLE, CommunicationGroup
from infinilm.distributed.shard import Piece, WeightShard
from infinilm.layers.linear import Linear, max_kernel_rows

# For these numbers of rows a CPU's float32 product with a table of this layout first copies the whole table, which
# takes longer than multiplying by it. A batch of products with narrow strips of the table does without.
COPIED_ROWS = range(4, 16)
STRIP = 64


class VocabParallelEmbedding(nn.Module):
    """One row of `hidden` numbers per token of the vocabulary.

    Every rank has as many rows, so that results can be gathered; the last ranks may have rows to spare.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        group: CommunicationGroup = SINGLE,
    ) -> None:
        super().__init__()
        self.rows, num_rows = share_vocabulary(vocab_size, group)
        self.weight = nn.Parameter(torch.empty(num_rows, hidden_size, dtype=dtype, device=device), requires_grad=False)
        self.group = group

    def forward(self, ids: Tensor) -> Tensor:
        """Look up `ids` `[T]`: `[T, hidden]`."""
        if self.group.size == 1:
            return F.embedding(ids, self.weight)
        own = ids - self.rows.start
        is_elsewhere = (own < 0) | (own >= self.rows.length)
        found = F.embedding(own.masked_fill_(is_elsewhere, 0), self.weight)
        return self.group.all_reduce(found.masked_fill_(is_elsewhere.unsqueeze(1), 0))

    def logits(self, hidden: Tensor) -> Tensor:
        """Use the table as the output head, for models that tie the two; see `ParallelLMHead`."""
        return gather_logits(self._product(hidden), self.rows.full, self.group)

    def _product(self, hidden: Tensor) -> Tensor:
        num_rows, hidden_size = self.weight.shape
        if len(hidden) <= max_kernel_rows(self.weight):
            from infinilm.kernels.gemv import gemv

            return gemv(hidden, self.weight)
        if self.weight.device.type != "cpu" or len(hidden) not in COPIED_ROWS or num_rows % STRIP:
            return F.linear(hidden, self.weight)
        strips = self.weight.view(-1, STRIP, hidden_size).transpose(1, 2)
        product = torch.bmm(hidden.expand(len(strips), -1, -1), strips)  # [strips, n, STRIP]
        return product.transpose(0, 1).reshape(len(hidden), num_rows)

    def weight_targets(self, prefix: str) -> dict[str, WeightShard]:
        """The table's own part, `{prefix}weight`."""
        own = self.weight[: self.rows.length]
        return {f"{prefix}weight": WeightShard.of(own, self.rows, Piece.whole(own.shape[1]))}


class ParallelLMHead(nn.Module):
    """The output head: `[n, hidden]` to `[n, vocab]` on rank 0, and to nothing on the others."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        group: CommunicationGroup = SINGLE,
    ) -> None:
        super().__init__()
        self.rows, num_rows = share_vocabulary(vocab_size, group)
        self.product = Linear(hidden_size, {"": num_rows}, bias=False, dtype=dtype, device=device)
        self.group = group

    def forward(self, hidden: Tensor) -> Tensor:
        """`[n, hidden]` to `[n, vocab]` on rank 0."""
        return gather_logits(self.product(hidden), self.rows.full, self.group)

    def weight_targets(self, prefix: str) -> dict[str, WeightShard]:
        """The head's own part, `{prefix}weight`."""
        own = self.product.weight_targets()[".weight"].tensor[: self.rows.length]
        return {f"{prefix}weight": WeightShard.of(own, self.rows, Piece.whole(own.shape[1]))}


def share_vocabulary(vocab_size: int, group: CommunicationGroup) -> tuple[Piece, int]:
    """The tokens that a rank has, and the number of rows that every rank keeps for them."""
    num_rows = -(-vocab_size // group.size)
    start = min(group.rank * num_rows, vocab_size)
    return Piece(start, min(num_rows, vocab_size - start), vocab_size), num_rows


def gather_logits(own: Tensor, vocab_size: int, group: CommunicationGroup) -> Tensor:
    """Every rank's `[n, rows]` side by side, without the rows to spare: `[n, vocab]` on rank 0."""
    if group.size == 1:
        return own
    return group.gather(own)[..., :vocab_size]
