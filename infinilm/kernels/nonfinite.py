"""How the KV cache stores tokens whose keys or values hold NaN or infinity.

Attention multiplies the values of masked tokens by a weight of 0, and 0 * NaN is NaN: a bad value would reach other
tokens. So the value of a prompt's token is never stored as NaN or infinity. Instead the token's key is stored as NaN,
so every query that sees the token becomes NaN. Masked scores are replaced, so other queries are not affected.

Decode steps on a GPU store values unchanged: each row has one new token, and the kernels that read it later load only
values that all queries of a product see.
"""

import torch
from torch import Tensor


def mark_nonfinite(new: Tensor) -> Tensor:
    """Keys and values `[T, 2, kv_heads, head_dim]`, in the cache's type, as the cache stores them.

    A head's key becomes NaN if its key or its value has a number that is not finite. A value with such a number becomes
    0. Latent vectors `[T, 1, 1, dim]`, which are key and value, become NaN.
    """
    is_nonfinite = ~(new.abs().amax(-1) < torch.inf)  # [T, 2, kv_heads]
    if new.device.type == "cpu" and not bool(is_nonfinite.any()):
        return new
    if new.shape[1] == 1:
        return new.masked_fill(is_nonfinite.unsqueeze(-1), torch.nan)
    key, value = new.unbind(1)
    key = key.masked_fill(is_nonfinite.any(1).unsqueeze(-1), torch.nan)
    value = value.masked_fill(is_nonfinite[:, 1].unsqueeze(-1), 0.0)
    return torch.stack((key, value), dim=1)
