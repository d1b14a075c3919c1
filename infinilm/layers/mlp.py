"""The dense channel mixer."""

from typing import Any, Unpack

import torch.nn.functional as F
from torch import Tensor

from infinilm.distributed.shard import Shard
from infinilm.layers.formats import LayerOptions, below
from infinilm.layers.linear import GateUpParallelLinear, RowParallelLinear, native_linears
from infinilm.layers.mixer import ForwardContext, Mixer
from infinilm.layers.norm import RMSNorm


class MLP(Mixer):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        prefix: str = "mlp.",
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(layer, prefix)
        options = below(options, prefix)
        self.gate_up = GateUpParallelLinear(hidden_size, intermediate_size, bias=bias, **options)
        self.down = RowParallelLinear(intermediate_size, {"down_proj": hidden_size}, bias=bias, **options)

    def forward(
        self, x: Tensor, step: ForwardContext | None = None, residual: Tensor | None = None, norm: RMSNorm | None = None
    ) -> Tensor:
        taps = None if step is None else step.taps
        if taps is None:
            mixed: Tensor = self.down(self.gate_up.activated(x, norm), residual)
            return mixed
        if norm is not None:
            x = norm(x)
            taps.see("post_attention_layernorm", x, self.layer)
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        taps.see("mlp_gate_proj", gate, self.layer, is_shared_out=True)
        taps.see("mlp_up_proj", up, self.layer, is_shared_out=True)
        inner = F.silu(gate).mul_(up)
        taps.see("mlp_intermediate", inner, self.layer, is_shared_out=True)
        output: Tensor = self.down(inner)
        taps.see("mlp_output", output, self.layer)
        return output if residual is None else output.add_(residual)

    def weight_targets(self, prefix: str) -> dict[str, Shard]:
        own = prefix + self.prefix
        return self.gate_up.weight_targets(own) | self.down.weight_targets(own)

    def to_native(self) -> dict[str, Any] | None:
        return native_linears(gate_up=self.gate_up, down=self.down) if type(self) is MLP else None
