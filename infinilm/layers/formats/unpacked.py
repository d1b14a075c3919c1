"""What quantised matrices on a GPU have in common: they are unpacked for every product, or in it."""

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinilm.layers.activation import SiluAndMul
from infinilm.layers.norm import RMSNorm


class UnpackedWeight(nn.Module, ABC):
    """See `Weight`. Activations are in the type that is computed in.

    For few rows a kernel unpacks the matrix while it multiplies. For more it is unpacked before each product. The bits
    are those of a product with the dense matrix of the same values either way, if it `is_ordered`: see `WeightFormats`.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self._dtype = dtype
        self._activation = SiluAndMul(device)
        self._max_kernel_rows = 0

    @abstractmethod
    def dequantized(self) -> Tensor:
        """All matrices in the type that is computed in, `[rows, columns]`: each value is rounded once."""

    @abstractmethod
    def few_rows(
        self,
        x: Tensor,
        norm: RMSNorm | None,
        *,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        is_gated: bool = False,
    ) -> Tensor:
        """The product of up to `_max_kernel_rows` rows."""

    @property
    def num_bytes(self) -> int:
        """See `Weight`."""
        return sum(part.nbytes for part in self.parameters())

    def multiply(
        self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, norm: RMSNorm | None = None
    ) -> Tensor:
        """See `Weight`."""
        if len(x) <= self._max_kernel_rows:
            return self.few_rows(x, norm, bias=bias, residual=residual)
        if norm is not None:
            x = norm(x)
        product = F.linear(x, self.dequantized(), bias)
        return product if residual is None else residual.add_(product)

    def multiply_gated(self, x: Tensor, norm: RMSNorm | None, bias: Tensor | None = None) -> Tensor:
        """See `Weight`."""
        if len(x) <= self._max_kernel_rows and bias is None:
            return self.few_rows(x, norm, is_gated=True)
        activated: Tensor = self._activation(self.multiply(x, bias, norm=norm))
        return activated

    def look_up(self, rows: Tensor) -> Tensor:
        """See `Weight`."""
        return F.embedding(rows, self.dequantized())

    def to_native(self, bias: Tensor | None) -> Any | None:  # noqa: ARG002
        """See `Weight`: the native library has formats of its own."""
        return None
