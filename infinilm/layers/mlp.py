"""The dense channel mixer."""

from collections.abc import Callable
from typing import Unpack

import torch.nn.functional as F
from torch import Tensor

from infinilm.distributed.shard import Shard
from infinilm.kernels.invariant import gelu_tanh, silu
from infinilm.layers.formats import LayerOptions, below
from infinilm.layers.linear import GateUpParallelLinear, RowParallelLinear
from infinilm.layers.mixer import ForwardContext, Mixer
from infinilm.layers.norm import RMSNorm

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": gelu_tanh,
}
"""The activation functions by Hugging Face's names."""


class MLP(Mixer):
    """`down(activation(gate(x)) * up(x))`."""

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        activation: str = "silu",
        prefix: str = "mlp.",
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(layer, prefix)
        options = below(options, prefix)
        self.activation = activation
        self.gate_up = GateUpParallelLinear(hidden_size, intermediate_size, bias=bias, **options)
        self.down = RowParallelLinear(intermediate_size, {"down_proj": hidden_size}, bias=bias, **options)

    def forward(
        self, x: Tensor, step: ForwardContext | None = None, residual: Tensor | None = None, norm: RMSNorm | None = None
    ) -> Tensor:
        taps = None if step is None else step.taps
        if taps is None and self.activation == "silu":
            mixed: Tensor = self.down(self.gate_up.activated(x, norm), residual)
            return mixed
        if norm is not None:
            x = norm(x)
            if taps is not None:
                taps.see("post_attention_layernorm", x, self.layer)
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        if taps is not None:
            taps.see("mlp_gate_proj", gate, self.layer, is_shared_out=True)
            taps.see("mlp_up_proj", up, self.layer, is_shared_out=True)
        inner = ACTIVATIONS[self.activation](gate).mul_(up)
        if taps is not None:
            taps.see("mlp_intermediate", inner, self.layer, is_shared_out=True)
        output: Tensor = self.down(inner)
        if taps is not None:
            taps.see("mlp_output", output, self.layer)
        return output if residual is None else output.add_(residual)

    def weight_targets(self, prefix: str) -> dict[str, Shard]:
        own = prefix + self.prefix
        return self.gate_up.weight_targets(own) | self.down.weight_targets(own)
