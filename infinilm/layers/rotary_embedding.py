"""Rotary position embedding: the angles of every position, and turning queries and keys by them.

`rope` is Hugging Face's `rope_parameters`, checked and with its defaults filled in: `rope_type`, `rope_theta`
and what the type needs besides. The angles of a position depend on nothing but the position, so a text may be
computed in any chunks.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """The cosines and sines of positions 0 to `max_len` - 1, computed once.

    With a `partial_rotary_factor` only the first `dim` of a head's numbers are rotated. The rope type `none` rotates by
    no angle. `interleaved` pairs are neighbours: numbers 2i and 2i + 1 instead of i and i + dim / 2. With a
    `llama_4_scaling_beta` queries are to be multiplied by `query_scale` of their position.
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
        # Computed on the host, so that every device turns by the same angles.
        frequencies = inverse_frequencies(self.dim, rope, max_len, max_position_embeddings)
        angles = torch.arange(max_len, dtype=torch.float32).unsqueeze(-1) * frequencies
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor(rope)
        self.register_buffer("table", table.to(device), persistent=False)
        query_scale = None
        if (beta := rope.get("llama_4_scaling_beta")) is not None:
            periods = torch.arange(max_len) // rope["original_max_position_embeddings"]
            query_scale = (1 + beta * torch.log(1 + periods)).to(device, dtype).view(-1, 1, 1)
        self.register_buffer("query_scale", query_scale, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of `positions` `[T]` for `apply_rotary`, each `[T, 1, dim]`."""
        cos, sin = self.table.index_select(0, positions).to(self.dtype).unsqueeze(1).chunk(2, dim=-1)
        if self.is_interleaved:
            return cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotary_dim(head_dim: int, rope: Mapping[str, Any]) -> int:
    """How many of a head's numbers are rotated. The rope type `proportional` turns the others by no angle."""
    if rope["rope_type"] == "proportional":
        return head_dim
    return int(head_dim * (rope.get("partial_rotary_factor") or 1.0))


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor, is_interleaved: bool = False) -> None:
    """Turn the heads of `x` `[T, heads, head_dim]` into `out`, which may be `x`.

    Number i of a head is paired with number i + dim / 2, where the angles have `dim` numbers, or neighbours with each
    other; the rest is copied.
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


def inverse_frequencies(head_dim: int, rope: Mapping[str, Any], max_len: int, max_position_embeddings: int) -> Tensor:
    """Angle per position for each pair of a head: `[head_dim / 2]`, or `[max_len, head_dim / 2]` if it varies."""
    theta: float = rope["rope_theta"]
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / torch.pow(theta, exponents)
    divisors: Tensor | float = 1.0
    match rope["rope_type"]:
        case "none":
            return torch.zeros_like(plain)
        case "proportional":
            is_turned = torch.arange(len(plain)) < int((rope.get("partial_rotary_factor") or 1.0) * head_dim // 2)
            return plain.where(is_turned, 0.0) / (rope.get("factor") or 1.0)
        case "linear":
            divisors = rope["factor"]
        case "dynamic":
            # A token is turned as if its text ended with it, and keys are cached as they were turned.
            lengths = torch.arange(1, max_len + 1, dtype=torch.float32).clamp(min=max_position_embeddings)
            stretch = rope["factor"] * lengths / max_position_embeddings - (rope["factor"] - 1)
            bases = theta * torch.pow(stretch, head_dim / (head_dim - 2))
            return 1.0 / torch.pow(bases.unsqueeze(-1), exponents)
        case "yarn":
            return _yarn(plain, head_dim, rope)
        case "llama3":
            return _llama3(plain, rope)
        case "longrope":
            is_long = max_len > rope["original_max_position_embeddings"]
            divisors = torch.tensor(rope["long_factor" if is_long else "short_factor"], dtype=torch.float32)
    return plain / divisors


def _yarn(plain: Tensor, head_dim: int, rope: Mapping[str, Any]) -> Tensor:
    """Stretch slow pairs by `factor`, leave fast ones alone, and go linearly from one to the other between."""

    def pair_turning(times: float) -> float:
        """Which pair (a fractional index) turns this many times over the original length."""
        wavelength = rope["original_max_position_embeddings"] / (times * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope["rope_theta"]))

    low, high = pair_turning(rope.get("beta_fast") or 32), pair_turning(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    slowness = ((pairs - low) / (high - low or 0.001)).clamp(0, 1)
    return torch.lerp(plain, plain / rope["factor"], slowness)


def _llama3(plain: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Stretch pairs slower than `low_freq_factor` turns per original length, keep those faster than `high_…`."""
    turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    fastness = ((turns - low) / (high - low)).clamp(0, 1)
    return torch.lerp(plain / rope["factor"], plain, fastness)


def attention_factor(rope: Mapping[str, Any]) -> float:
    """What cosines and sines are multiplied by, so that attention stays as sharp on a longer text."""
    if rope["rope_type"] not in ("yarn", "longrope"):
        return 1.0
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    factor = rope["factor"]
    if factor <= 1:
        return 1.0
    if rope["rope_type"] == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(rope["original_max_position_embeddings"]))
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return yarn_scale(factor, mscale) / yarn_scale(factor, mscale_all_dim)
    return yarn_scale(factor, 1.0)


def yarn_scale(factor: float, weight: float) -> float:
    """What YaRN sharpens attention by, for positions stretched by `factor`."""
    return 0.1 * weight * math.log(factor) + 1.0
