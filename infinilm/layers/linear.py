"""Linear layers, whole and sharded over ranks.

In a column-parallel layer each rank holds some of the matrix's rows (a checkpoint stores `[out, in]`) and computes
some of the outputs. In a row-parallel layer each rank holds the columns for those inputs, and the ranks' results are
summed. A column-parallel layer followed by a row-parallel one needs one all-reduce.
"""

from collections.abc import Mapping, Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from infinilm.distributed.group import SINGLE, CommunicationGroup
from infinilm.distributed.shard import Shard, ShardRange, WeightShard
from infinilm.errors import InvalidValueError
from infinilm.layers.formats import DENSE, Weight, WeightFormats, WeightOptions
from infinilm.layers.norm import RMSNorm


class Linear(nn.Module):
    """`x Wᵀ + b` for one or more matrices with the same input, stored and multiplied as one.

    `outputs` maps each matrix's name in the checkpoint to its number of rows, in the order of the result:
    `{"gate_proj": 1536, "up_proj": 1536}` gives `[T, 3072]`, the gate's values first. A `ShardRange` says which of the
    rows or columns a rank holds, if it holds only a part. The weight format (`matrix`) stores and multiplies the
    matrices.
    """

    def __init__(
        self,
        in_features: int | ShardRange,
        outputs: Mapping[str, int | ShardRange],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        formats: WeightFormats = DENSE,
    ) -> None:
        super().__init__()
        self.columns = _as_range(in_features)
        self.outputs = {name: _as_range(rows) for name, rows in outputs.items()}
        rows = [piece.length for piece in self.outputs.values()]
        names = [f"{name}.weight" for name in self.outputs]
        self.matrix: Weight = formats.create(names, rows, self.columns, dtype=dtype, device=device)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(sum(rows), dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: Tensor, residual: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
        """`x` `[T, in]`, after the `norm` if given, to `[T, out]`.

        A `residual` `[T, out]` is added; the result may reuse its memory.
        """
        return self.matrix.multiply(x, self.bias, residual, norm)

    def weight_targets(self, prefix: str = "") -> dict[str, Shard]:
        """The weights to load: `{prefix}{output}.weight`, and `.bias` if there is one, shaped as in a checkpoint."""
        targets: dict[str, Shard] = {}
        shards = self.matrix.shards(list(self.outputs.values()), self.columns)
        first = 0
        for (name, rows), shard in zip(self.outputs.items(), shards, strict=True):
            targets[f"{prefix}{name}.weight"] = shard
            if self.bias is not None:
                targets[f"{prefix}{name}.bias"] = WeightShard.of(self.bias[first : first + rows.length], rows)
            first += rows.length
        return targets


class ColumnParallelLinear(Linear):
    """Each rank computes its share of every output."""

    def __init__(
        self,
        in_features: int,
        outputs: Mapping[str, int],
        *,
        bias: bool,
        group: CommunicationGroup = SINGLE,
        **options: Unpack[WeightOptions],
    ) -> None:
        shares = {name: ShardRange.share(name, rows, group.rank, group.size) for name, rows in outputs.items()}
        super().__init__(in_features, shares, bias=bias, **options)


class GateUpParallelLinear(Linear):
    """The first two matrices of an MLP: `[T, hidden]` to this rank's `[T, gate and up]`."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        group: CommunicationGroup = SINGLE,
        **options: Unpack[WeightOptions],
    ) -> None:
        share = ShardRange.share("intermediate_size", intermediate_size, group.rank, group.size)
        super().__init__(hidden_size, {"gate_proj": share, "up_proj": share}, bias=bias, **options)

    def activated(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """`silu(gate) * up` of the normed `x`: this rank's `[T, intermediate]`."""
        return self.matrix.multiply_gated(x, norm, self.bias)


QKV = ("q_proj", "k_proj", "v_proj")


class QKVParallelLinear(Linear):
    """The projections to queries, keys and values, or some of them, sharded by heads.

    With more ranks than key-value heads, each key-value head is held by `num_copies` adjacent ranks.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        bias: bool,
        projections: Sequence[str] = QKV,
        has_gate: bool = False,
        group: CommunicationGroup = SINGLE,
        **options: Unpack[WeightOptions],
    ) -> None:
        check_heads(num_heads, num_kv_heads, group.size)
        self.num_copies = max(1, group.size // num_kv_heads)
        self.heads = ShardRange.share("num_attention_heads", num_heads, group.rank, group.size)
        self.kv_heads = ShardRange.share(
            "num_key_value_heads", num_kv_heads, group.rank // self.num_copies, group.size // self.num_copies
        )
        self.num_heads, self.num_kv_heads = self.heads.length, self.kv_heads.length  # of this rank
        q, kv = (
            ShardRange(p.start * head_dim, p.length * head_dim, p.full * head_dim) for p in (self.heads, self.kv_heads)
        )
        if has_gate:  # twice as many rows: each query head's rows are followed by its gate's
            q = ShardRange(2 * q.start, 2 * q.length, 2 * q.full)
        outputs = dict(zip(QKV, (q, kv, kv), strict=True))
        super().__init__(hidden_size, {name: outputs[name] for name in projections}, bias=bias, **options)


class RowParallelLinear(Linear):
    """Each rank multiplies its share of the inputs; every rank gets the sum."""

    def __init__(
        self,
        in_features: int,
        outputs: Mapping[str, int],
        *,
        bias: bool,
        group: CommunicationGroup = SINGLE,
        **options: Unpack[WeightOptions],
    ) -> None:
        columns = ShardRange.share("in_features", in_features, group.rank, group.size)
        super().__init__(columns, outputs, bias=bias, **options)
        self.group = group

    def forward(self, x: Tensor, residual: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
        """This rank's `x` `[T, share of in]` to the whole `[T, out]`, plus the `residual` if given."""
        if self.group.rank > 0:  # only rank 0 adds bias and residual
            return self.group.all_reduce(self.matrix.multiply(x))
        whole = super().forward(x, residual, norm)
        return self.group.all_reduce(whole) if self.group.communicates else whole


def check_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> None:
    """Refuse a number of ranks that the heads can't be sharded over."""
    divides = num_kv_heads % num_ranks == 0 or num_ranks % num_kv_heads == 0
    if num_heads % num_ranks or not divides:
        fitting = [
            size
            for size in range(1, num_heads + 1)
            if num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0)
        ]
        raise InvalidValueError(
            f"num_attention_heads={num_heads} and num_key_value_heads={num_kv_heads} can't be shared out over "
            f"{num_ranks} ranks; use a tensor parallel size of {', '.join(map(str, fitting))}"
        )


def _as_range(size: int | ShardRange) -> ShardRange:
    return size if isinstance(size, ShardRange) else ShardRange.whole(size)
