"""Linear layers, several in one where they read the same input."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinilm.errors import EngineError
from infinilm.layers.packed_weight import PackedWeight, pack_weight


class Linear(nn.Module):
    """`x Wᵀ + b` for one or more matrices with the same input, kept and multiplied as one.

    `outputs` maps each matrix's name in the checkpoint to its number of rows, in the order of the result:
    `{"gate_proj": 1536, "up_proj": 1536}` gives `[T, 3072]`, first the gate's values, then the up's.
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
        weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.weight: nn.Parameter | None = nn.Parameter(weight, requires_grad=False)
        self.bias: nn.Parameter | None = None
        if bias:
            empty = torch.empty(out_features, dtype=dtype, device=device)
            self.bias = nn.Parameter(empty, requires_grad=False)
        self._packed: PackedWeight | None = None

    def forward(self, x: Tensor) -> Tensor:
        """`x` `[T, in]` to `[T, out]`."""
        if self._packed is not None:
            return self._packed.linear(x, self.bias)
        return F.linear(x, self.weight, self.bias)  # type: ignore[arg-type]

    def weight_targets(self, prefix: str = "") -> dict[str, Tensor]:
        """Views to load into, by name: `{prefix}{output}.weight` and, if there is one, `.bias`."""
        if self.weight is None:
            raise EngineError(f"the weights of {prefix}{next(iter(self.outputs))} are packed and can't be loaded again")
        sizes = list(self.outputs.values())
        targets: dict[str, Tensor] = {}
        for kind, fused in (("weight", self.weight), ("bias", self.bias)):
            if fused is not None:
                names = [f"{prefix}{output}.{kind}" for output in self.outputs]
                targets |= dict(zip(names, torch.split(fused, sizes), strict=True))
        return targets

    def finalize(self) -> None:
        """Call once the weight is loaded: brings it into its fastest form, which replaces the matrix."""
        if self.weight is not None:
            self._packed = pack_weight(self.weight)
            if self._packed is not None:
                self.weight = None
