"""The sparse channel mixer: a router chooses some experts for every token. Each expert is a small gated MLP."""

from typing import Any, Unpack

import torch
from torch import Tensor, nn

from infinilm.distributed.group import SINGLE
from infinilm.distributed.shard import Shard, ShardRange, WeightShard
from infinilm.errors import InvalidValueError
from infinilm.kernels.experts_torch import choose_experts_torch
from infinilm.kernels.invariant import sigmoid
from infinilm.kernels.routing import Gate, Routing
from infinilm.kernels.support import has_kernels
from infinilm.layers.formats import DENSE, DenseWeight, LayerOptions, WeightFormats, WeightOptions, below
from infinilm.layers.formats.experts import DenseExperts, ExpertWeights, Float8Experts, PackedExperts, UnpackedExperts
from infinilm.layers.linear import Linear
from infinilm.layers.mixer import ForwardContext, Mixer
from infinilm.layers.mlp import MLP
from infinilm.layers.names import ExpertNames
from infinilm.layers.norm import RMSNorm


class Experts(nn.Module):
    """The experts of a layer. Each rank holds a share of every expert's intermediate size."""

    def __init__(
        self,
        hidden_size: int,
        expert_size: int,
        num_experts: int,
        names: ExpertNames,
        *,
        gate: Gate = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        self._names, self._num_experts = names, num_experts
        self._group = group = options.get("group", SINGLE)
        self._inner = ShardRange.share("moe_intermediate_size", expert_size, group.rank, group.size)
        self._hidden = ShardRange.whole(hidden_size)
        formats = options.get("formats", DENSE)
        found = [
            [formats.find(names[:2], self._hidden), formats.find(names[2:], self._inner)]
            for names in self._tensor_names()
        ]
        self.matrix: ExpertWeights
        is_native = formats.is_native and all(None not in own for own in found)
        sizes = (num_experts, hidden_size, self._inner.length)
        how: dict[str, Any] = {"has_biases": names.has_biases, "adds_last_bias": group.rank == 0, "gate": gate}
        how |= {"dtype": options["dtype"], "device": options["device"]}
        if is_native:
            packed = [[each for part in own for each in part or ()] for own in found]
            matrices = [formats.find_matrices(names) for names in self._tensor_names()]
            self.matrix = PackedExperts(packed, matrices, *sizes, **how, activation_bits=formats.activation_bits)
        elif (kinds := self._common_formats(formats)) and not formats.is_native:
            self.matrix = UnpackedExperts(kinds, *sizes, **how)
        elif kinds and not names.has_biases:
            self.matrix = Float8Experts(kinds, *sizes, gate=gate, device=options["device"])
        else:
            half = formats.find_half([name for names in self._tensor_names() for name in names])
            self.matrix = DenseExperts(*sizes, **how, is_ordered=formats.is_ordered, half=half)

    def _common_formats(self, formats: WeightFormats) -> tuple[str, str] | None:
        """The common format of all experts' gates and ups, and that of all downs; None unless both exist."""
        gate_ups = [name for names in self._tensor_names() for name in names[:2]]
        downs = [names[2] for names in self._tensor_names()]
        kinds = formats.find_of_experts(gate_ups, self._hidden), formats.find_of_experts(downs, self._inner)
        return None if kinds[0] is None or kinds[1] is None else (kinds[0], kinds[1])

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
        """The weighted sum of each row's experts, plus the residual if given.

        `x` is `[T, hidden]`; the experts' `ids` and their `weights` are `[T, k]`.
        """
        mixed = self.matrix.mix(x, ids, weights, residual if self._group.rank == 0 else None)
        return self._group.all_reduce(mixed) if self._group.communicates else mixed

    def weight_targets(self, prefix: str) -> dict[str, Shard]:
        """The weights to load, by their names in a checkpoint."""
        names = [
            f"{prefix}{name}"
            for own in self._tensor_names()
            for name in (*own, *(each.replace(".weight", ".bias") for each in own if self._names.has_biases))
        ]
        shards = [shard for expert in self.matrix.shards(self._inner, self._hidden) for shard in expert]
        return dict(zip(names, shards, strict=True))

    def _tensor_names(self) -> list[list[str]]:
        """For each expert the names of gate, up and down, without the layer's prefix."""
        parts = self._names.gate, self._names.up, self._names.down
        return [[f"experts.{expert}.{part}.weight" for part in parts] for expert in range(self._num_experts)]


class SparseMLP(Mixer):
    """`Σ weight · expert(x)` over the experts that the router chooses for a token."""

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        expert_size: int,
        routing: Routing,
        names: ExpertNames,
        *,
        router_dtype: torch.dtype | None = None,
        has_router_bias: bool = False,
        shared_size: int = 0,
        gates_shared: bool = False,
        adds_router_bias: bool = False,
        gate: Gate = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        """The router computes in `router_dtype` (default: the type of the other weights).

        With `adds_router_bias` a bias is a part of the router's logits. With `has_router_bias` another bias is added
        to the scores that choose the experts, but not to the experts' weights. Shared experts compute every token in
        addition to the chosen ones; `shared_size` is their total intermediate size. With `gates_shared` their result
        is multiplied by the sigmoid of one more projection.
        """
        super().__init__(layer, names.prefix)
        if shared_size:
            shared = f"{names.prefix}{names.shared}."
            self.shared: MLP | None = MLP(layer, hidden_size, shared_size, prefix=shared, **options)
        else:
            self.shared = None
        options = below(options, names.prefix)
        self.routing, self._names = routing, names
        self.hidden_size, self.dtype = hidden_size, options["dtype"]
        # Every rank holds the whole router: it is small, and all ranks must choose the same experts.
        dense = WeightFormats(is_ordered=options["formats"].is_ordered)
        kind: WeightOptions = {"dtype": router_dtype or options["dtype"], "device": options["device"], "formats": dense}
        self._router_dtype = kind["dtype"]
        self.router = Linear(hidden_size, {names.router: routing.num_experts}, bias=adds_router_bias, **kind)
        self.shared_gate: Linear | None = None
        if gates_shared:
            outputs = {f"{names.shared}_gate": 1}
            own: WeightOptions = {"dtype": options["dtype"], "device": options["device"], "formats": dense}
            self.shared_gate = Linear(hidden_size, outputs, bias=False, **own)
        self.router_bias: nn.Parameter | None = None
        if has_router_bias:
            bias = torch.empty(routing.num_experts, dtype=torch.float32, device=options["device"])
            self.router_bias = nn.Parameter(bias, requires_grad=False)
        self.experts = Experts(hidden_size, expert_size, routing.num_experts, names, gate=gate, **options)
        self._has_kernels = has_kernels(options["device"])

    def forward(
        self, x: Tensor, step: ForwardContext | None = None, residual: Tensor | None = None, norm: RMSNorm | None = None
    ) -> Tensor:
        taps = None if step is None else step.taps
        if norm is not None:
            x = norm(x)
            if taps is not None:
                taps.see("post_attention_layernorm", x, self.layer)
        logits = self._score(x)
        if taps is not None:
            taps.see("router_logits", logits, self.layer)
        ids, weights = self._choose(logits)
        if taps is None:
            mixed: Tensor = self.experts(x, ids, weights, self._share(x, residual))
            return mixed
        taps.see("expert_ids", ids, self.layer)
        self._check_ids(ids)
        output: Tensor = self.experts(x, ids, weights, self._share(x, None))
        taps.see("mlp_output", output, self.layer)
        return output if residual is None else output.add_(residual)

    def _share(self, x: Tensor, residual: Tensor | None) -> Tensor | None:
        """The sum of the shared experts' result and the residual, as far as they exist."""
        if self.shared is None:
            return residual
        if self.shared_gate is None:
            shared: Tensor = self.shared(x, None, residual)
            return shared
        shared = self.shared(x).mul_(sigmoid(self.shared_gate(x)))
        return shared if residual is None else shared.add_(residual)

    def _score(self, x: Tensor) -> Tensor:
        """The router's logits `[T, experts]`."""
        if isinstance(self.experts.matrix, PackedExperts) and isinstance(self.router.matrix, DenseWeight):
            scores = self.experts.matrix.score(x, self.router.matrix.weight)
            return scores if self.router.bias is None else scores + self.router.bias
        logits: Tensor = self.router(x.to(self._router_dtype))
        return logits

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's experts, int32 `[T, k]`, best first, and their weights, float32 `[T, k]`."""
        if self._has_kernels:
            from infinilm.kernels.experts import choose_experts  # needs Triton

            return choose_experts(logits, self.routing, self.router_bias)
        return choose_experts_torch(logits, self.routing, self.router_bias)

    def _check_ids(self, ids: Tensor) -> None:
        """Refuse expert ids from a hook that are out of range or repeated within a row."""
        ordered = ids.sort(dim=1).values
        is_known = ((ordered >= 0) & (ordered < self.routing.num_experts)).all()
        if not (is_known and (ordered[:, 1:] > ordered[:, :-1]).all()):
            raise InvalidValueError(
                f"a hook of layer{self.layer}_expert_ids returned {ids.tolist()}; a row must be {ids.shape[1]} "
                f"different experts from 0 to {self.routing.num_experts - 1}"
            )

    def weight_targets(self, prefix: str) -> dict[str, Shard]:
        own = prefix + self.prefix
        targets = self.router.weight_targets(own) | self.experts.weight_targets(own)
        if self.router_bias is not None:
            targets[f"{own}{self._names.router}.{self._names.router_bias}"] = WeightShard.whole(self.router_bias)
        if self.shared_gate is not None:
            targets |= self.shared_gate.weight_targets(own)
        return targets if self.shared is None else targets | self.shared.weight_targets(prefix)
