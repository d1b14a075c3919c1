"""The table of token embeddings and the output head, shared out over ranks by tokens of the vocabulary."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinilm.distributed.group import SINGLE, CommunicationGroup
from infinilm.distributed.shard import PackedShard, Piece, Shard, WeightShard
from infinilm.layers.linear import Linear, max_kernel_rows
from infinilm.layers.packed import DENSE, PackedWeight, WeightFormats

# For these numbers of rows a CPU's float32 product with a table of this layout first copies the whole table, which
# takes longer than multiplying by it. A batch of products with narrow strips of the table does without.
COPIED_ROWS = range(4, 16)
STRIP = 64


class VocabParallelEmbedding(nn.Module):
    """One row of `hidden` numbers per token of the vocabulary.

    Every rank has as many rows, so that results can be gathered; the last ranks may have rows to spare. With a format
    of its own the table stays quantised (`packed`); otherwise it is a plain matrix (`weight`).
    """

    packed: PackedWeight | None
    """None: there is a `weight`."""

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
        self.rows, num_rows = share_vocabulary(vocab_size, group)
        self.columns = Piece.whole(hidden_size)
        self.packed = None
        if found := formats.find(["weight"], self.columns):
            self.packed = PackedWeight(found, [num_rows], hidden_size, device)
        else:
            empty = torch.empty(num_rows, hidden_size, dtype=dtype, device=device)
            self.weight = nn.Parameter(empty, requires_grad=False)
        self.group = group

    def forward(self, ids: Tensor) -> Tensor:
        """Look up `ids` `[T]`: `[T, hidden]`."""
        if self.group.size == 1:
            return self._look_up(ids)
        own = ids - self.rows.start
        is_elsewhere = (own < 0) | (own >= self.rows.length)
        found = self._look_up(own.masked_fill_(is_elsewhere, 0))
        return self.group.all_reduce(found.masked_fill_(is_elsewhere.unsqueeze(1), 0))

    def _look_up(self, rows: Tensor) -> Tensor:
        return F.embedding(rows, self.weight) if self.packed is None else self.packed.look_up(rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """Use the table as the output head, for models that tie the two; see `ParallelLMHead`."""
        return gather_logits(self._product(hidden), self.rows.full, self.group)

    def _product(self, hidden: Tensor) -> Tensor:
        if self.packed is not None:
            return self.packed.multiply(hidden)
        num_rows, hidden_size = self.weight.shape
        if len(hidden) <= max_kernel_rows(self.weight):
            from infinilm.kernels.gemv import gemv

            return gemv(hidden, self.weight)
        if self.weight.device.type != "cpu" or len(hidden) not in COPIED_ROWS or num_rows % STRIP:
            return F.linear(hidden, self.weight)
        strips = self.weight.view(-1, STRIP, hidden_size).transpose(1, 2)
        product = torch.bmm(hidden.expand(len(strips), -1, -1), strips)  # [strips, n, STRIP]
        return product.transpose(0, 1).reshape(len(hidden), num_rows)

    def weight_targets(self, prefix: str) -> dict[str, Shard]:
        """The table's own part, `{prefix}weight`."""
        if self.packed is not None:
            return {f"{prefix}weight": PackedShard.of(self.packed.matrices[0], self.rows, self.columns)}
        return {f"{prefix}weight": WeightShard.of(self.weight[: self.rows.length], self.rows, self.columns)}


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
        formats: WeightFormats = DENSE,
    ) -> None:
        super().__init__()
        self.rows, num_rows = share_vocabulary(vocab_size, group)
        # The layer's only matrix has no name, after which a dot would come.
        formats = WeightFormats(formats.by_name, formats.prefix.removesuffix("."))
        self.product = Linear(hidden_size, {"": num_rows}, bias=False, dtype=dtype, device=device, formats=formats)
        self.group = group

    def forward(self, hidden: Tensor) -> Tensor:
        """`[n, hidden]` to `[n, vocab]` on rank 0."""
        return gather_logits(self.product(hidden), self.rows.full, self.group)

    def weight_targets(self, prefix: str) -> dict[str, Shard]:
        """The head's own part, `{prefix}weight`."""
        (whole,), columns = self.product.weight_targets().values(), self.product.columns
        if isinstance(whole, PackedShard):
            return {f"{prefix}weight": PackedShard.of(whole.matrix, self.rows, columns)}
        return {f"{prefix}weight": WeightShard.of(whole.tensor[: self.rows.length], self.rows, columns)}


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
