"""The product of a few or many rows with a plain weight matrix."""

import torch
import torch.nn.functional as F
from torch import Tensor

# For this many rows a CPU's float32 matrix product first copies the whole weight into a layout of its own, which
# takes longer than multiplying by it. As a batch of products with narrow strips of the weight it does not.
_FEW_ROWS = range(4, 16)
_STRIP = 32


def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply `x` `[T, in]` by `weight` `[out, in]` and add `bias` `[out]`: `[T, out]`."""
    num_rows, in_features = x.shape
    if num_rows not in _FEW_ROWS or weight.dtype != torch.float32 or weight.device.type != "cpu":
        return F.linear(x, weight, bias)
    if len(weight) % _STRIP:
        return F.linear(x, weight, bias)
    strips = weight.view(-1, _STRIP, in_features).transpose(1, 2)
    product = torch.bmm(x.expand(len(strips), -1, -1), strips)  # [strips, T, _STRIP]
    y = product.transpose(0, 1).reshape(num_rows, -1)
    return y if bias is None else y.add_(bias)
