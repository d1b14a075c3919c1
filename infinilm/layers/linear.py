"""Linear layers, several in one where they read the same input."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Linear(nn.Module):
    """`x Wᵀ + b` for one or more matrices with the same input, kept and multiplied as one.

    `outputs` maps each matrix's name in the checkpoint to its number of rows, in the order of the result:
    `{"gate_proj": 1536, "up_proj": 1536}` gives `[T, 3072]`, first the gate's values, then the up's.

    This is where a weight's format is known and nowhere else: one that is faster or smaller than the plain
    matrix brings its own `forward` and `weight_targets`.
    """

    def __init__(
        self,
        in_features: int,
        outputs: Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.outputs = dict(outputs)
        out_features = sum(outputs.values())
        # Input first, the other way round than checkpoints have it: a CPU multiplies few rows faster this way.
        self.weight = nn.Parameter(
            torch.empty(in_features, out_features, dtype=dtype, device=device), requires_grad=False
        )
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`x` `[T, in]` to `[T, out]`, added to the `residual` `[T, out]` if there is one."""
        if residual is None:
            return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)
        if self.bias is not None:
            residual = residual + self.bias
        return torch.addmm(residual, x, self.weight)

    def weight_targets(self, prefix: str = "") -> dict[str, Tensor]:
        """Views to load into, shaped as in a checkpoint: `{prefix}{output}.weight` and, if there is one, `.bias`."""
        sizes = list(self.outputs.values())
        targets: dict[str, Tensor] = {}
        for kind, fused in (("weight", self.weight.t()), ("bias", self.bias)):
            if fused is not None:
                names = [f"{prefix}{output}.{kind}" for output in self.outputs]
                targets |= dict(zip(names, torch.split(fused, sizes), strict=True))
        return targets
