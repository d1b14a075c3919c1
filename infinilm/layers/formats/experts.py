"""The matrices of a layer's experts: stacked if they are dense, one by one if they stay quantised."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from infinilm.distributed.shard import Shard, ShardRange, WeightShard
from infinilm.kernels.experts_torch import mix_experts_torch
from infinilm.kernels.support import has_kernels
from infinilm.layers.formats.gguf import GGUFWeight, load_library


class ExpertWeights(Protocol):
    """Gate, up and down of each expert: `[expert_size, hidden]` twice and `[hidden, expert_size]`."""

    @property
    def num_bytes(self) -> int:
        """What they take in memory."""

    def shards(self, inner: ShardRange, hidden: ShardRange) -> list[list[Shard]]:
        """Where to load to, by expert: gate, up and down, of which this rank has these ranges."""

    def mix(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
        """The sum of the experts `ids` `[T, k]` of each row of `x` `[T, hidden]`, times their `weights` `[T, k]`.

        It is added to the residual, if there is one, whose memory may become the result's.
        """


class DenseExperts(nn.Module):
    """See `ExpertWeights`: two tensors, `[experts, 2 * expert_size, hidden]` and `[experts, hidden, expert_size]`."""

    def __init__(
        self, num_experts: int, hidden_size: int, expert_size: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        # A CPU multiplies few rows faster with the input first, the other way round than checkpoints have it.
        is_input_first = torch.device(device).type == "cpu"
        self._has_kernels = has_kernels(device)

        def stacked(rows: int, columns: int) -> nn.Parameter:
            shape = (num_experts, columns, rows) if is_input_first else (num_experts, rows, columns)
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.gate_up, self.down = stacked(2 * expert_size, hidden_size), stacked(hidden_size, expert_size)
        gate_up, down = (weight.transpose(1, 2) if is_input_first else weight for weight in (self.gate_up, self.down))
        self._lines = gate_up, down  # as in checkpoints, outputs first

    @property
    def num_bytes(self) -> int:
        """See `ExpertWeights`."""
        return self.gate_up.nbytes + self.down.nbytes

    def shards(self, inner: ShardRange, hidden: ShardRange) -> list[list[Shard]]:
        """See `ExpertWeights`."""
        gate_up, down = self._lines
        return [
            [
                *(WeightShard.of(part, inner, hidden) for part in both.split(inner.length)),
                WeightShard.of(last, hidden, inner),
            ]
            for both, last in zip(gate_up, down, strict=True)
        ]

    def mix(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
        """See `ExpertWeights`."""
        if self._has_kernels:
            from infinilm.kernels.experts import mix_experts  # which needs Triton

            return mix_experts(x, ids, weights, self.gate_up, self.down, residual)
        return mix_experts_torch(x, ids, weights, *self._lines, residual)


class PackedExperts:
    """See `ExpertWeights`: the native library's matrices. Those of an expert that no row chose are not read."""

    def __init__(
        self,
        formats: Sequence[Sequence[str]],
        hidden_size: int,
        expert_size: int,
        device: torch.device | str,
    ) -> None:
        """`formats` are those of gate, up and down, by expert."""
        self._experts = [
            (
                GGUFWeight(own[:2], [expert_size, expert_size], hidden_size, device),
                GGUFWeight(own[2:], [hidden_size], expert_size, device),
            )
            for own in formats
        ]

    @property
    def num_bytes(self) -> int:
        """See `ExpertWeights`."""
        return sum(matrix.num_bytes for expert in self._experts for matrix in expert)

    def shards(self, inner: ShardRange, hidden: ShardRange) -> list[list[Shard]]:
        """See `ExpertWeights`."""
        return [
            [*gate_up.shards([inner, inner], hidden), *down.shards([hidden], inner)] for gate_up, down in self._experts
        ]

    def mix(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
        """See `ExpertWeights`."""
        out = torch.empty_like(x) if residual is None else residual.contiguous()
        self._native.mix(x.contiguous(), ids.contiguous(), weights.contiguous(), out, residual is not None)
        return out

    @staticmethod
    def score(x: Tensor, router: Tensor) -> Tensor:
        """`x` `[T, hidden]` times `router` `[hidden, experts]`. Other rows do not change a row's bits, as in `mix`."""
        out = x.new_empty(len(x), router.shape[1])
        load_library().score(x.contiguous(), router, out)
        return out

    @cached_property
    def _native(self) -> Any:
        gate_ups, downs = zip(*self._experts, strict=True)
        return load_library().Experts(*([each.to_native(None) for each in linears] for linears in (gate_ups, downs)))
