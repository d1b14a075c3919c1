"""Forms of a linear layer's weight that are faster than the plain matrix, each with the kernel that reads it.

Weights are loaded as plain matrices. When loading is done, `pack_weight` turns each into the best form for the
place it lies in. A further form (quantised, say) is a further class with `linear`, chosen there.
"""

from typing import Protocol

import torch
from torch import Tensor

# The rows per call that oneDNN lays the weight out for: a few streams decoding. Any number works.
_ONEDNN_ROWS = 8


class PackedWeight(Protocol):
    """A weight matrix `[out, in]` in a form of its own."""

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply `x` `[T, in]` to `[T, out]`."""
        ...


class OneDNNWeight:
    """A half-precision matrix in the blocked layout of oneDNN's CPU kernels, which saves reordering it in every call.

    In float32 this gains nothing over `dense_linear`, and loses where each call's overhead counts: one row at a time.
    """

    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ONEDNN_ROWS)
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    @staticmethod
    def can_pack(weight: Tensor) -> bool:
        """Whether this torch and this processor have kernels for such a weight."""
        if weight.device.type != "cpu" or not torch._C._has_mkldnn:
            return False
        ops = torch.ops.mkldnn
        if not (hasattr(ops, "_reorder_linear_weight") and hasattr(ops, "_linear_pointwise")):
            return False
        if weight.dtype == torch.bfloat16:
            return bool(ops._is_mkldnn_bf16_supported())
        return weight.dtype == torch.float16 and bool(ops._is_mkldnn_fp16_supported())

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply `x` `[T, in]` to `[T, out]`."""
        y: Tensor = self._linear(x, self._packed, bias, "none", [], "")
        return y


def pack_weight(weight: Tensor) -> PackedWeight | None:
    """Pack a loaded matrix `[out, in]` into the fastest form there is; None if that is the matrix itself."""
    return OneDNNWeight(weight) if OneDNNWeight.can_pack(weight) else None
