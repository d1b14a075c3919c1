"""Root-mean-square normalisation."""

import torch
from torch import Tensor, nn

from infinilm.kernels.support import has_kernels


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension.

    Half-precision input is normalised in float32 and rounded before it is multiplied by the weight, as the
    models were trained.
    """

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.eps = eps
        self._eps = torch.full((1,), eps, dtype=torch.float32, device=device)
        self._has_kernels = has_kernels(device)
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` `[…, size]`."""
        if self._has_kernels:
            from infinilm.kernels.norm import rms_norm

            return rms_norm(x.flatten(0, -2), self.weight, self.eps).view(x.shape)
        wide = x.float()
        # Not F.rms_norm: on a CPU its mean takes ten times as long for a few hundred rows.
        norm: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return (wide * scale).to(x.dtype).mul_(self.weight)
