"""The token embeddings and the output head, sharded over the vocabulary."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from infinilm.distributed.group import SINGLE, CommunicationGroup
from infinilm.distributed.shard import Shard, ShardRange
from infinilm.layers.formats import DENSE, Weight, WeightFormats


class _VocabParallel(nn.Module):
    """One row of `hidden` numbers per token of the vocabulary.

    Every rank has the same number of rows, so that results can be gathered; the last ranks may have unused rows.
    """

    is_table: ClassVar[bool]
    """Whether the matrix is used for look-ups as well as for products."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        group: CommunicationGroup = SINGLE,
        formats: WeightFormats = DENSE,
    ) -> None:
        super().__init__()
        num_rows = -(-vocab_size // group.size)
        start = min(group.rank * num_rows, vocab_size)
        self.rows = ShardRange(start, min(num_rows, vocab_size - start), vocab_size)  # this rank's tokens
        self.columns = ShardRange.whole(hidden_size)
        self.matrix: Weight = formats.create(
            ["weight"], [num_rows], self.columns, dtype=dtype, device=device, is_table=self.is_table
        )
        self.group = group

    def logits(self, hidden: Tensor) -> Tensor:
        """`[n, hidden]` to `[n, vocab]` on rank 0, and to an empty tensor on the others."""
        own = self.matrix.multiply(hidden)
        return own if self.group.size == 1 else self.group.gather(own)[..., : self.rows.full]

    def weight_targets(self, prefix: str) -> dict[str, Shard]:
        """This rank's rows, `{prefix}weight`."""
        (shard,) = self.matrix.shards([self.rows], self.columns)
        return {f"{prefix}weight": shard}


class VocabParallelEmbedding(_VocabParallel):
    """The token embeddings. `logits` uses them as the output head, for models with tied embeddings."""

    is_table = True

    def forward(self, ids: Tensor) -> Tensor:
        """Look up `ids` `[T]`: `[T, hidden]`."""
        if self.group.size == 1:
            return self.matrix.look_up(ids)
        own = ids - self.rows.start
        is_elsewhere = (own < 0) | (own >= self.rows.length)
        found = self.matrix.look_up(own.masked_fill_(is_elsewhere, 0))
        return self.group.all_reduce(found.masked_fill_(is_elsewhere.unsqueeze(1), 0))


class ParallelLMHead(_VocabParallel):
    """The output head. Only rank 0 gets logits; see `logits`."""

    is_table = False

    def forward(self, hidden: Tensor) -> Tensor:
        """`[n, hidden]` to `[n, vocab]` on rank 0."""
        return self.logits(hidden)
