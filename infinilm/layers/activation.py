"""The activation of an MLP."""

import torch
from torch import Tensor, nn

from infinilm.kernels.invariant import silu
from infinilm.kernels.support import has_kernels


class SiluAndMul(nn.Module):
    """`silu(gate) * up` for `[T, 2n]` with gates first. Returns `[T, n]`."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self._has_kernels = has_kernels(device)

    def forward(self, gate_up: Tensor) -> Tensor:
        if self._has_kernels:
            from infinilm.kernels.activation import silu_mul  # needs Triton

            return silu_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate).mul_(up)
