"""The matrices of a layer's experts: stacked if they are dense, or quantised on a GPU, else one by one."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from infinilm.distributed.shard import PackedShard, Shard, ShardRange, WeightShard
from infinilm.kernels.experts_torch import mix_experts_torch
from infinilm.kernels.native import arrays_of, load_library
from infinilm.kernels.routing import Gate
from infinilm.kernels.support import has_kernels
from infinilm.layers.formats.gguf import GGUFWeight
from infinilm.layers.formats.lines import Lines

LEAST_FP8_CAPABILITY = (8, 9)
"""Where 8-bit floats are converted by instructions."""


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
        self,
        num_experts: int,
        hidden_size: int,
        expert_size: int,
        *,
        has_biases: bool = False,
        adds_last_bias: bool = True,
        gate: Gate = None,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Of the ranks that share experts only one `adds_last_bias`, that of down."""
        super().__init__()
        self._gate = gate
        # A CPU multiplies few rows faster with the input first, the other way round than checkpoints have it.
        is_input_first = torch.device(device).type == "cpu"
        self._has_kernels = has_kernels(device)

        def stacked(rows: int, columns: int) -> nn.Parameter:
            shape = (num_experts, columns, rows) if is_input_first else (num_experts, rows, columns)
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.gate_up, self.down = stacked(2 * expert_size, hidden_size), stacked(hidden_size, expert_size)
        gate_up, down = (weight.transpose(1, 2) if is_input_first else weight for weight in (self.gate_up, self.down))
        self._lines = gate_up, down  # as in checkpoints, outputs first
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        self.biases = _biases(num_experts, expert_size, hidden_size, options) if has_biases else None
        self._adds_last_bias = adds_last_bias

    @property
    def num_bytes(self) -> int:
        """See `ExpertWeights`."""
        return sum(weight.nbytes for weight in self.parameters())

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

            return mix_experts(
                x, ids, weights, self.gate_up, self.down, residual, biases=self._used_biases(), gate=self._gate
            )
        return mix_experts_torch(x, ids, weights, *self._lines, residual, biases=self._used_biases(), gate=self._gate)

    def _used_biases(self) -> tuple[Tensor | None, Tensor | None]:
        if self.biases is None:
            return None, None
        return self.biases[0], self.biases[1] if self._adds_last_bias else None

    def stacked_shards(self, inner: ShardRange, hidden: ShardRange) -> list[Shard]:
        """Where to load to from tensors of all experts, inputs first: gate and up, its bias, down, its bias."""
        gate_up, down = (lines.transpose(1, 2) for lines in self._lines)
        experts, both = ShardRange.whole(len(down)), _doubled(inner)
        shards: list[Shard] = [
            WeightShard.of(gate_up, experts, hidden, both),
            WeightShard.of(down, experts, inner, hidden),
        ]
        if self.biases is not None:
            shards.insert(1, WeightShard.of(self.biases[0], experts, both))
            shards.append(WeightShard.of(self.biases[1], experts, hidden))
        return shards


class UnpackedExperts(nn.Module):
    """See `ExpertWeights`: packed matrices on a GPU, which are unpacked in every product."""

    def __init__(
        self,
        formats: tuple[str, str],
        num_experts: int,
        hidden_size: int,
        expert_size: int,
        *,
        has_biases: bool = False,
        adds_last_bias: bool = True,
        gate: Gate = None,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """`formats` are those of all gates and ups, and of all downs. For the rest see `DenseExperts`."""
        super().__init__()
        self._gate, self._adds_last_bias = gate, adds_last_bias
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        self.gate_up = Lines(formats[0], 2 * num_experts, expert_size, hidden_size, **options)
        self.down = Lines(formats[1], num_experts, hidden_size, expert_size, **options)
        self.biases = _biases(num_experts, expert_size, hidden_size, options) if has_biases else None
        self._has_kernels = has_kernels(device)
        self._mixes_packed = self._has_kernels
        if self._has_kernels and any(each.startswith("FP8") for each in formats):
            self._mixes_packed = torch.cuda.get_device_capability(device) >= LEAST_FP8_CAPABILITY

    @property
    def num_bytes(self) -> int:
        """See `ExpertWeights`."""
        return sum(weight.nbytes for weight in self.parameters())

    def shards(self, inner: ShardRange, hidden: ShardRange) -> list[list[Shard]]:
        """See `ExpertWeights`."""
        gate_ups, downs = self.gate_up.shards(inner, hidden), self.down.shards(hidden, inner)
        return [[*gate_ups[2 * expert : 2 * expert + 2], down] for expert, down in enumerate(downs)]

    def stacked_shards(self, inner: ShardRange, hidden: ShardRange) -> list[Shard]:
        """See `DenseExperts`."""
        experts, both = ShardRange.whole(len(self.down.shards(hidden, inner))), _doubled(inner)
        gate_up = PackedShard.of(self.gate_up.whole(), experts, hidden, both)
        down = PackedShard.of(self.down.whole(), experts, inner, hidden)
        if self.biases is None:
            return [gate_up, down]
        biases = WeightShard.of(self.biases[0], experts, both), WeightShard.of(self.biases[1], experts, hidden)
        return [gate_up, biases[0], down, biases[1]]

    def mix(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
        """See `ExpertWeights`."""
        biases = (None, None) if self.biases is None else (self.biases[0], self.biases[1])
        options: Any = {"biases": biases if self._adds_last_bias else (biases[0], None), "gate": self._gate}
        mix: Any = mix_experts_torch
        if self._has_kernels:
            from infinilm.kernels.experts import mix_experts as mix  # which needs Triton
        matrices: list[Any] = [self.gate_up.packed, self.down.packed]
        if not self._mixes_packed:
            down = self.down.dequantized()
            matrices = [self.gate_up.dequantized().view(len(down), -1, down.shape[1]), down]
        mixed: Tensor = mix(x, ids, weights, *matrices, residual, **options)
        return mixed


def _doubled(inner: ShardRange) -> ShardRange:
    """The range of gates and ups, whose lines alternate."""
    return ShardRange(2 * inner.start, 2 * inner.length, 2 * inner.full)


def _biases(num_experts: int, expert_size: int, hidden_size: int, options: dict[str, Any]) -> nn.ParameterList:
    """Those of gate and up, and of down."""
    vectors = [torch.empty(num_experts, size, **options) for size in (2 * expert_size, hidden_size)]
    return nn.ParameterList(nn.Parameter(vector, requires_grad=False) for vector in vectors)


class PackedExperts:
    """See `ExpertWeights`: the native library's matrices. Those of an expert that no row chose are not read."""

    def __init__(
        self,
        formats: Sequence[Sequence[str]],
        hidden_size: int,
        expert_size: int,
        device: torch.device | str,
        matrices: Sequence[list[Any] | None],
    ) -> None:
        """`formats` and `matrices`, if they are there already, are those of gate, up and down, by expert."""
        self._experts = [
            (
                GGUFWeight(own[:2], [expert_size, expert_size], hidden_size, device, made and made[:2]),
                GGUFWeight(own[2:], [hidden_size], expert_size, device, made and made[2:]),
            )
            for own, made in zip(formats, matrices, strict=True)
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
        given = arrays_of(x.contiguous(), ids.contiguous(), weights.contiguous(), out)
        self.native.mix(*given, residual is not None)
        return out

    @staticmethod
    def score(x: Tensor, router: Tensor) -> Tensor:
        """`x` `[T, hidden]` times `router` `[hidden, experts]`. Other rows do not change a row's bits, as in `mix`."""
        out = x.new_empty(len(x), router.shape[1])
        load_library().score(*arrays_of(x.contiguous(), router, out))
        return out

    @cached_property
    def native(self) -> Any:
        """The native library's experts."""
        gate_ups, downs = zip(*self._experts, strict=True)
        return load_library().Experts(*([each.native for each in linears] for linears in (gate_ups, downs)))
