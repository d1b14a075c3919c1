"""Linear layers, whole and shared out over ranks.

A rank of a column-parallel layer has some of the matrix's rows (a checkpoint stores `[out, in]`) and computes some
of the outputs. A rank of a row-parallel one has the columns for just those inputs, and the ranks' results are summed.
So a column-parallel layer followed by a row-parallel one takes one exchange between the ranks.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinilm.distributed.group import SINGLE, CommunicationGroup
from infinilm.distributed.shard import PackedShard, Piece, Shard, WeightShard
from infinilm.errors import InvalidValueError
from infinilm.kernels.support import has_kernels
from infinilm.layers.norm import RMSNorm
from infinilm.layers.packed import DENSE, PackedWeight, WeightFormats

MAX_KERNEL_ROWS = 8
"""Up to so many rows our own products with a small matrix are faster than the libraries' …"""
SMALL_MATRIX_BYTES = 16 << 20
"""… and with a larger one for a single row only."""


def max_kernel_rows(weight: Tensor) -> int:
    """Up to how many rows are multiplied with this matrix by our own kernels, where they can run."""
    if not has_kernels(weight.device):
        return 0
    return MAX_KERNEL_ROWS if weight.nbytes <= SMALL_MATRIX_BYTES else 1


class Linear(nn.Module):
    """`x Wᵀ + b` for one or more matrices with the same input, kept and multiplied as one.

    `outputs` maps each matrix's name in the checkpoint to its rows, in the order of the result:
    `{"gate_proj": 1536, "up_proj": 1536}` gives `[T, 3072]`, first the gate's values, then the up's. Where a rank
    holds only a piece of the rows or of the columns, it says which.

    This is where a weight's format is known and nowhere else. If all matrices have one in `formats`, and their blocks
    can be shared out, they stay quantised (`packed`); otherwise they become one plain matrix (`weight`).
    """

    packed: PackedWeight | None
    """None: there is a `weight`."""

    def __init__(
        self,
        in_features: int | Piece,
        outputs: Mapping[str, int | Piece],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        formats: WeightFormats = DENSE,
    ) -> None:
        super().__init__()
        self.columns = _as_piece(in_features)
        self.outputs = {name: _as_piece(rows) for name, rows in outputs.items()}
        rows = [piece.length for piece in self.outputs.values()]
        num_rows = sum(rows)
        self._has_kernels = has_kernels(device)
        self._max_kernel_rows = 0
        self.packed = None
        if found := formats.find([f"{name}.weight" for name in self.outputs], self.columns):
            self.packed = PackedWeight(found, rows, self.columns.length, device)
        else:
            # A CPU multiplies few rows faster with the input first, the other way round than checkpoints have it.
            is_input_first = torch.device(device).type == "cpu"
            shape = (self.columns.length, num_rows) if is_input_first else (num_rows, self.columns.length)
            self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
            self._matrix = self.weight if is_input_first else self.weight.t()  # [in, out]
            self._max_kernel_rows = max_kernel_rows(self.weight)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(num_rows, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: Tensor, residual: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
        """`x` `[T, in]`, after the `norm` if there is one, to `[T, out]`.

        A `residual` `[T, out]` is added; its memory may become the result's.
        """
        if len(x) <= self._max_kernel_rows:
            return self._few_rows(x, residual, norm)
        if norm is not None:
            x = norm(x)
        if self.packed is not None:
            return self.packed.multiply(x, self.bias, residual)
        if residual is None:
            return torch.mm(x, self._matrix) if self.bias is None else torch.addmm(self.bias, x, self._matrix)
        if self.bias is not None:
            residual = residual + self.bias
        return residual.addmm_(x, self._matrix)

    def _without_bias(self, x: Tensor) -> Tensor:
        return torch.mm(x, self._matrix) if self.packed is None else self.packed.multiply(x)

    def _few_rows(self, x: Tensor, residual: Tensor | None, norm: RMSNorm | None) -> Tensor:
        from infinilm.kernels.gemv import gemv, norm_gemv

        if norm is None:
            return gemv(x, self.weight, bias=self.bias, residual=residual)
        return norm_gemv(x, norm.weight, norm.eps, self.weight, bias=self.bias, residual=residual)

    def weight_targets(self, prefix: str = "") -> dict[str, Shard]:
        """Where to load to, shaped as in a checkpoint: `{prefix}{output}.weight` and, if there is one, `.bias`."""
        targets: dict[str, Shard] = {}
        first = 0
        for index, (name, rows) in enumerate(self.outputs.items()):
            own = slice(first, first + rows.length)
            first += rows.length
            targets[f"{prefix}{name}.weight"] = (
                WeightShard.of(self._matrix.t()[own], rows, self.columns)
                if self.packed is None
                else PackedShard.of(self.packed.matrices[index], rows, self.columns)
            )
            if self.bias is not None:
                targets[f"{prefix}{name}.bias"] = WeightShard.of(self.bias[own], rows)
        return targets


class ColumnParallelLinear(Linear):
    """Each rank computes its share of every output."""

    def __init__(
        self,
        in_features: int,
        outputs: Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        group: CommunicationGroup = SINGLE,
        formats: WeightFormats = DENSE,
    ) -> None:
        shares = {name: Piece.share(name, rows, group.rank, group.size) for name, rows in outputs.items()}
        super().__init__(in_features, shares, bias=bias, dtype=dtype, device=device, formats=formats)


class GateUpParallelLinear(Linear):
    """The two matrices that an MLP begins with: `[T, hidden]` to this rank's `[T, gate and up]`."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        group: CommunicationGroup = SINGLE,
        formats: WeightFormats = DENSE,
    ) -> None:
        share = Piece.share("intermediate_size", intermediate_size, group.rank, group.size)
        outputs = {"gate_proj": share, "up_proj": share}
        super().__init__(hidden_size, outputs, bias=bias, dtype=dtype, device=device, formats=formats)

    def activated(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """`silu(gate) * up` of the normed `x`: this rank's `[T, intermediate]`."""
        if not self._has_kernels:
            gate, up = self(x, norm=norm).chunk(2, dim=-1)
            return F.silu(gate).mul_(up)
        from infinilm.kernels.activation import silu_mul
        from infinilm.kernels.gemv import norm_gemv_silu

        if len(x) <= self._max_kernel_rows and self.bias is None:
            return norm_gemv_silu(x, norm.weight, norm.eps, self.weight)
        return silu_mul(self(x, norm=norm))


class QKVParallelLinear(Linear):
    """The projections to queries, keys and values, shared out by heads.

    With more ranks than key-value heads, `num_copies` ranks next to each other hold the same one.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        group: CommunicationGroup = SINGLE,
        formats: WeightFormats = DENSE,
    ) -> None:
        check_heads(num_heads, num_kv_heads, group.size)
        self.num_copies = max(1, group.size // num_kv_heads)
        heads = Piece.share("num_attention_heads", num_heads, group.rank, group.size)
        kv_heads = Piece.share(
            "num_key_value_heads", num_kv_heads, group.rank // self.num_copies, group.size // self.num_copies
        )
        self.num_heads, self.num_kv_heads = heads.length, kv_heads.length
        q, kv = (Piece(p.start * head_dim, p.length * head_dim, p.full * head_dim) for p in (heads, kv_heads))
        outputs = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        super().__init__(hidden_size, outputs, bias=bias, dtype=dtype, device=device, formats=formats)


class RowParallelLinear(Linear):
    """Each rank multiplies its share of the inputs; every rank gets the sum."""

    def __init__(
        self,
        in_features: int,
        outputs: Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        group: CommunicationGroup = SINGLE,
        formats: WeightFormats = DENSE,
    ) -> None:
        columns = Piece.share("in_features", in_features, group.rank, group.size)
        super().__init__(columns, outputs, bias=bias, dtype=dtype, device=device, formats=formats)
        self.group = group

    def forward(self, x: Tensor, residual: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
        """This rank's `x` `[T, share of in]` to the whole `[T, out]`, added to the `residual` if there is one."""
        if self.group.rank > 0:  # the sum holds bias and residual once
            return self.group.all_reduce(self._without_bias(x))
        return self.group.all_reduce(super().forward(x, residual, norm))


def kv_heads_per_rank(num_kv_heads: int, num_ranks: int) -> int:
    """How many key-value heads each rank has, and its cache keeps."""
    return max(1, num_kv_heads // num_ranks)


def check_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> None:
    """Refuse a number of ranks over which heads can't be shared out."""
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


def _as_piece(size: int | Piece) -> Piece:
    return size if isinstance(size, Piece) else Piece.whole(size)
