"""Rotary position embedding: rotating queries and keys by angles that depend on their positions."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from infinilm.layers.rotary_tables import query_scales, rotary_dim, rotary_table


class RotaryEmbedding(nn.Module):
    """The cosines and sines of positions 0 to `max_len` - 1, computed once.

    With a `partial_rotary_factor` only the first `dim` of a head's numbers are rotated. The rope type `none` does not
    rotate. `interleaved` pairs are neighbours: numbers 2i and 2i + 1 instead of i and i + dim / 2. With a
    `llama_4_scaling_beta` the caller multiplies queries by the `query_scale` of their position.
    """

    table: Tensor  # [max_len, dim] float32: cosines, then sines, half of them each
    query_scale: Tensor | None  # [max_len, 1, 1] of the model's type

    def __init__(
        self,
        head_dim: int,
        rope: Mapping[str, Any],
        *,
        max_len: int,
        max_position_embeddings: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.dtype, self.dim = dtype, rotary_dim(head_dim, rope)
        self.is_interleaved = bool(rope.get("interleaved"))
        # Computed on the host, so that every device uses the same angles.
        table = torch.from_numpy(rotary_table(head_dim, rope, max_len, max_position_embeddings))
        self.register_buffer("table", table.to(device), persistent=False)
        query_scale, scales = None, query_scales(rope, max_len)
        if scales is not None:
            query_scale = torch.from_numpy(scales).to(device, dtype).view(-1, 1, 1)
        self.register_buffer("query_scale", query_scale, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of `positions` `[T]` for `apply_rotary`, each `[T, 1, dim]`."""
        cos, sin = self.table.index_select(0, positions).to(self.dtype).unsqueeze(1).chunk(2, dim=-1)
        if self.is_interleaved:
            return cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor, is_interleaved: bool = False) -> None:
    """Rotate the heads of `x` `[T, heads, head_dim]` and write them to `out`, which may be `x`.

    `cos` and `sin` have `dim` numbers per position. Number i of a head is paired with number i + dim / 2, or, if
    `is_interleaved`, neighbours with each other. The numbers after `dim` are copied.
    """
    dim = cos.shape[-1]
    if dim < x.shape[-1]:
        if out.data_ptr() != x.data_ptr():
            out[..., dim:] = x[..., dim:]
        x, out = x[..., :dim], out[..., :dim]
    if is_interleaved:
        partners = x.view(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)
    else:
        partners = torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1)
    torch.addcmul(x * cos, partners, sin, out=out)
