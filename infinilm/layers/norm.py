"""Root-mean-square normalisation."""

import torch
from torch import Tensor, nn

from infinilm.distributed.group import SINGLE, CommunicationGroup
from infinilm.distributed.shard import ShardRange
from infinilm.kernels import invariant
from infinilm.kernels.support import has_kernels


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension.

    Half-precision input is normalised in float32 and rounded before the multiplication by the weight, because models
    were trained that way.
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
        if invariant.is_native(x.device, x.dtype):
            return invariant.rms_norm(x, self.weight, self.eps)
        wide = x.float()
        # F.rms_norm is not used: on a CPU its mean takes ten times as long for a few hundred rows.
        norm: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return (wide * scale).to(x.dtype).mul_(self.weight)


def normalized(x: Tensor, eps: float | Tensor) -> Tensor:
    """`x / rms(x)` over the last dimension, in float32."""
    wide = x.float()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt_()


def _weighted(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight`, computed in float32 and rounded at the end."""
    if invariant.is_native(x.device, x.dtype):
        return invariant.rms_norm(x, weight, eps)
    return (normalized(x, eps) * weight).to(x.dtype)


class WideRMSNorm(RMSNorm):
    """`x / rms(x) * weight`, computed in float32 and rounded at the end, as Gemma 4 was trained."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` `[…, size]`."""
        return _weighted(x, self.weight.float(), self.eps)


class ZeroCentredRMSNorm(RMSNorm):
    """`x / rms(x) * (1 + weight)`, computed in float32 and rounded at the end, as Gemma was trained."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` `[…, size]`."""
        if self._has_kernels:
            from infinilm.kernels.norm import rms_norm

            return rms_norm(x.flatten(0, -2), self.weight, self.eps, is_zero_centred=True).view(x.shape)
        return _weighted(x, 1 + self.weight.float(), self.eps)


class ParallelRMSNorm(RMSNorm):
    """A norm over a width that is sharded over ranks. The mean square is computed over all ranks.

    `num_copies` adjacent ranks hold the same share.
    """

    def __init__(
        self,
        share: ShardRange,
        eps: float,
        *,
        num_copies: int,
        dtype: torch.dtype,
        device: torch.device | str,
        group: CommunicationGroup = SINGLE,
    ) -> None:
        super().__init__(share.length, eps, dtype=dtype, device=device)
        self.share, self.group, self._num_copies = share, group, num_copies

    def forward(self, x: Tensor) -> Tensor:
        """Normalise this rank's `x` `[T, share]`."""
        if self.group.size == 1:
            return super().forward(x)
        wide = x.float()
        squares = self.group.all_reduce(wide.square().sum(-1, keepdim=True))
        scale = (squares / (self._num_copies * self.share.full) + self._eps).rsqrt_()
        return (wide * scale).to(x.dtype).mul_(self.weight)
