"""The matrices of a layer's experts: stacked if they are dense, or quantised on a GPU; otherwise separate."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from infinilm.distributed.shard import Shard, ShardRange, WeightShard
from infinilm.kernels.experts_torch import gate_torch, mix_each, mix_experts_torch
from infinilm.kernels.invariant import is_native
from infinilm.kernels.native import arrays_of, load_library
from infinilm.kernels.routing import ClampedGate, Gate, native_gate
from infinilm.kernels.support import has_kernels
from infinilm.layers.formats.float8 import Float8Weight
from infinilm.layers.formats.gguf import GGUFWeight
from infinilm.layers.formats.lines import Lines

LEAST_FP8_CAPABILITY = (8, 9)
"""The lowest compute capability with instructions that convert 8-bit floats."""


class ExpertWeights(Protocol):
    """Gate and up, `[expert_size, hidden]`, and down, `[hidden, expert_size]`, of each expert."""

    @property
    def num_bytes(self) -> int:
        """Their bytes in memory."""

    def shards(self, inner: ShardRange, hidden: ShardRange) -> list[list[Shard]]:
        """For each expert the shards of gate, up and down, then of their biases. The ranges are this rank's."""

    def mix(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
        """The weighted sum of each row's experts, plus the residual if given, whose memory the result may reuse.

        `x` is `[T, hidden]`; the experts' `ids` and their `weights` are `[T, k]`.
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
        is_ordered: bool = False,
        half: str | None = None,
    ) -> None:
        """Of the ranks that share experts, only one has `adds_last_bias`: it adds the bias of down.

        `is_ordered` and `half` are as for `DenseWeight`.
        """
        super().__init__()
        self._gate = gate
        self.is_native = (is_ordered or half is not None) and is_native(device, dtype)
        """Whether the native library multiplies."""
        # A CPU multiplies few rows faster with the input dimension first, unlike in checkpoints.
        is_input_first = torch.device(device).type == "cpu"
        self._has_kernels = has_kernels(device)

        def stacked(rows: int, columns: int) -> nn.Parameter:
            shape = (num_experts, columns, rows) if is_input_first else (num_experts, rows, columns)
            kept = dtype if half is None else getattr(torch, half)
            return nn.Parameter(torch.empty(shape, dtype=kept, device=device), requires_grad=False)

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
        found: list[list[Shard]] = [
            [
                *(WeightShard.of(part, inner, hidden) for part in _halves(both, self._gate)),
                WeightShard.of(last, hidden, inner),
            ]
            for both, last in zip(gate_up, down, strict=True)
        ]
        return found if self.biases is None else _add_biases(found, list(self.biases), inner, hidden, self._gate)

    def mix(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
        """See `ExpertWeights`."""
        if self._has_kernels:
            from infinilm.kernels.experts import mix_experts  # needs Triton

            return mix_experts(
                x, ids, weights, self.gate_up, self.down, residual, biases=self._used_biases(), gate=self._gate
            )
        how: Any = {"biases": self._used_biases(), "gate": self._gate, "is_native": self.is_native}
        return mix_experts_torch(x, ids, weights, *self._lines, residual, **how)

    def _used_biases(self) -> tuple[Tensor | None, Tensor | None]:
        if self.biases is None:
            return None, None
        return self.biases[0], self.biases[1] if self._adds_last_bias else None


class UnpackedExperts(nn.Module):
    """See `ExpertWeights`: packed matrices on a GPU. Every product unpacks them."""

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
        """`formats`: the format of all gates and ups, and that of all downs. For the rest see `DenseExperts`."""
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
        num_alternating = 2 if isinstance(self._gate, ClampedGate) else 1
        gate_ups, downs = self.gate_up.shards(inner, hidden, num_alternating), self.down.shards(hidden, inner)
        found: list[list[Shard]] = [[*gate_ups[2 * expert : 2 * expert + 2], down] for expert, down in enumerate(downs)]
        return found if self.biases is None else _add_biases(found, list(self.biases), inner, hidden, self._gate)

    def mix(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
        """See `ExpertWeights`."""
        biases = (None, None) if self.biases is None else (self.biases[0], self.biases[1])
        options: Any = {"biases": biases if self._adds_last_bias else (biases[0], None), "gate": self._gate}
        mix: Any = mix_experts_torch
        if self._has_kernels:
            from infinilm.kernels.experts import mix_experts as mix  # needs Triton
        matrices: list[Any] = [self.gate_up.packed, self.down.packed]
        if not self._mixes_packed:
            down = self.down.dequantized()
            matrices = [self.gate_up.dequantized().view(len(down), -1, down.shape[1]), down]
        mixed: Tensor = mix(x, ids, weights, *matrices, residual, **options)
        return mixed


class Float8Experts(nn.Module):
    """See `ExpertWeights`: 8-bit floats on a CPU. Experts that no row chose are not read."""

    def __init__(
        self,
        formats: tuple[str, str],
        num_experts: int,
        hidden_size: int,
        expert_size: int,
        *,
        gate: Gate,
        device: torch.device | str,
    ) -> None:
        """`formats`: the format of all gates and ups, and that of all downs. There are no biases."""
        super().__init__()
        self._gate = gate
        sizes = [expert_size, expert_size]
        self.gate_ups = nn.ModuleList(
            Float8Weight(formats[0], sizes, hidden_size, device=device) for _ in range(num_experts)
        )
        self.downs = nn.ModuleList(
            Float8Weight(formats[1], [hidden_size], expert_size, device=device) for _ in range(num_experts)
        )

    def _pairs(self) -> list[tuple[Float8Weight, Float8Weight]]:
        return cast(list[tuple[Float8Weight, Float8Weight]], list(zip(self.gate_ups, self.downs, strict=True)))

    @property
    def num_bytes(self) -> int:
        """See `ExpertWeights`."""
        return sum(weight.nbytes for weight in self.parameters())

    def shards(self, inner: ShardRange, hidden: ShardRange) -> list[list[Shard]]:
        """See `ExpertWeights`."""
        return [
            [*gate_up.shards([inner, inner], hidden), *down.shards([hidden], inner)] for gate_up, down in self._pairs()
        ]

    def mix(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
        """See `ExpertWeights`."""
        experts = self._pairs()

        def compute(expert: int, x: Tensor) -> Tensor:
            gate_up, down = experts[expert]
            return down.multiply(gate_torch(gate_up.multiply(x), self._gate))

        return mix_each(x, ids, weights, compute, residual)


def _halves(lines: Tensor, gate: Gate) -> tuple[Tensor, Tensor]:
    """The lines of gate and of up, as views. They alternate for a `ClampedGate`."""
    if isinstance(gate, ClampedGate):
        return lines[::2], lines[1::2]
    first, second = lines.chunk(2)
    return first, second


def _add_biases(
    shards: list[list[Shard]], biases: Sequence[Tensor], inner: ShardRange, hidden: ShardRange, gate: Gate
) -> list[list[Shard]]:
    return [
        [*own, *(WeightShard.of(half, inner) for half in _halves(both, gate)), WeightShard.of(last, hidden)]
        for own, both, last in zip(shards, *biases, strict=True)
    ]


def _biases(num_experts: int, expert_size: int, hidden_size: int, options: dict[str, Any]) -> nn.ParameterList:
    """Empty biases: those of gate and up, and those of down."""
    vectors = [torch.empty(num_experts, size, **options) for size in (2 * expert_size, hidden_size)]
    return nn.ParameterList(nn.Parameter(vector, requires_grad=False) for vector in vectors)


class PackedExperts:
    """See `ExpertWeights`: the native library's matrices. Experts that no row chose are not read."""

    def __init__(
        self,
        formats: Sequence[Sequence[str]],
        matrices: Sequence[list[Any] | None],
        num_experts: int,
        hidden_size: int,
        expert_size: int,
        *,
        has_biases: bool = False,
        adds_last_bias: bool = True,
        gate: Gate = None,
        activation_bits: int = 16,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """`formats` and `matrices` are for gate, up and down of each expert; `matrices` may exist already.

        For the rest see `DenseExperts`. Gates always come before ups.
        """
        self._gate, self._adds_last_bias, self.biases = gate, adds_last_bias, None
        if has_biases:
            self.biases = list(_biases(num_experts, expert_size, hidden_size, {"dtype": dtype, "device": device}))
        bits = {"activation_bits": activation_bits}
        self._experts = [
            (
                GGUFWeight(own[:2], [expert_size, expert_size], hidden_size, device, made and made[:2], **bits),
                GGUFWeight(own[2:], [hidden_size], expert_size, device, made and made[2:], **bits),
            )
            for own, made in zip(formats, matrices, strict=True)
        ]

    @property
    def num_bytes(self) -> int:
        """See `ExpertWeights`."""
        matrices = sum(matrix.num_bytes for expert in self._experts for matrix in expert)
        return matrices + sum(int(each.nbytes) for each in self.biases or ())

    def shards(self, inner: ShardRange, hidden: ShardRange) -> list[list[Shard]]:
        """See `ExpertWeights`."""
        found = [
            [*gate_up.shards([inner, inner], hidden), *down.shards([hidden], inner)] for gate_up, down in self._experts
        ]
        return found if self.biases is None else _add_biases(found, self.biases, inner, hidden, None)

    def mix(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
        """See `ExpertWeights`."""
        out = torch.empty_like(x) if residual is None else residual.contiguous()
        given = arrays_of(x.contiguous(), ids.contiguous(), weights.contiguous(), out)
        self.native.mix(*given, residual is not None)
        return out

    @staticmethod
    def score(x: Tensor, router: Tensor) -> Tensor:
        """`x` `[T, hidden]` times `router` `[hidden, experts]`. A row's bits depend on no other row, as in `mix`."""
        out = x.new_empty(len(x), router.shape[1])
        load_library().score(*arrays_of(x.contiguous(), router, out))
        return out

    @cached_property
    def native(self) -> Any:
        """The native library's experts."""
        gate_ups, downs = zip(*self._experts, strict=True)
        first, last = self.biases or [[None] * len(downs)] * 2
        if not self._adds_last_bias:
            last = [None] * len(downs)
        make = load_library().Linear
        linears = (
            [make(each.matrices, *arrays_of(bias)) for each, bias in zip(own, biases, strict=True)]
            for own, biases in ((gate_ups, first), (downs, last))
        )
        return load_library().Experts(*linears, **native_gate(self._gate))
