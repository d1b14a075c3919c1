"""Multi-head latent attention: the cache holds one small vector per token, which stands for the keys and values of all
heads.

The matrices that expand the vector into a head's key and value are applied to the query and to the result instead.
Heads therefore attend to the vectors themselves: all query heads share one key, and its first part is also the value.
"""

from typing import Unpack

import torch
from torch import Tensor, nn

from infinilm.distributed.group import SINGLE
from infinilm.distributed.shard import Shard, ShardRange, WeightShard
from infinilm.kernels import native
from infinilm.kernels.invariant import pad_rows
from infinilm.layers.formats import LayerOptions, below
from infinilm.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear
from infinilm.layers.mixer import ForwardContext, Mixer
from infinilm.layers.norm import RMSNorm
from infinilm.layers.rotary_embedding import RotaryEmbedding, apply_rotary


class LatentAttention(Mixer):
    """A token mixer that caches a normalised vector of size `rank` and a rotated key of size `rope_dim` per token.

    A head's query has `plain_dim` numbers without rotation and `rope_dim` with rotation. With a `query_rank` queries
    are also made from a smaller vector.
    """

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        *,
        num_heads: int,
        rank: int,
        query_rank: int | None,
        plain_dim: int,
        value_dim: int,
        rotary: RotaryEmbedding,
        scale: float,
        bias: bool,
        norm_eps: float,
        prefix: str = "self_attn.",
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(layer, prefix)
        group = options.get("group", SINGLE)
        dtype, device = options["dtype"], options["device"]
        options = below(options, prefix)
        self.rank, self.rope_dim, self.plain_dim, self.value_dim = rank, rotary.dim, plain_dim, value_dim
        self.rotary, self.scale = rotary, scale
        self.heads = ShardRange.share("num_attention_heads", num_heads, group.rank, group.size)
        latents = {"kv_a_proj_with_mqa": rank + rotary.dim}
        query_size = num_heads * (plain_dim + rotary.dim)
        self.query: Linear
        self.query_norm: RMSNorm | None = None
        if query_rank is None:
            self.query = ColumnParallelLinear(hidden_size, {"q_proj": query_size}, bias=False, **options)
        else:
            latents = {"q_a_proj": query_rank} | latents
            self.query = ColumnParallelLinear(query_rank, {"q_b_proj": query_size}, bias=False, **options)
            self.query_norm = RMSNorm(query_rank, norm_eps, dtype=dtype, device=device)
        self.latents = Linear(hidden_size, latents, bias=bias, dtype=dtype, device=device, formats=options["formats"])
        self.latent_norm = RMSNorm(rank, norm_eps, dtype=dtype, device=device)
        # For each head the rows that make a key, then those that make a value.
        shape = (self.heads.length * (plain_dim + value_dim), rank)
        self.expansion = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
        self.out = RowParallelLinear(num_heads * value_dim, {"o_proj": hidden_size}, bias=bias, **options)

    def forward(
        self, x: Tensor, step: ForwardContext, residual: Tensor | None = None, norm: RMSNorm | None = None
    ) -> Tensor:
        taps = step.taps
        if norm is not None:
            x = norm(x)
            if taps is not None:
                taps.see("input_layernorm", x, self.layer)
        latents = self.latents(x)
        before = latents.shape[1] - self.rank - self.rope_dim
        query_input = x if self.query_norm is None else self.query_norm(latents[:, :before])
        query = self.query(query_input).view(len(x), self.heads.length, -1)
        by_name = {"triton": self._attend_by_kernels, "native": self._attend_by_library}
        attend = by_name.get(step.backend.name, self._attend)
        heads = attend(query, latents[:, before:], step).flatten(1)
        output: Tensor = self.out(heads, residual if taps is None else None)
        if taps is not None:
            taps.see("attention_output", output, self.layer)
            return output if residual is None else output.add_(residual)
        return output

    def _attend(self, query: Tensor, latents: Tensor, step: ForwardContext) -> Tensor:
        """Queries `[T, heads, plain + rope_dim]` and new tokens `[T, rank + rope_dim]` to `[T, heads, value_dim]`."""
        kept = torch.cat((self.latent_norm(latents[:, : self.rank]), latents[:, self.rank :]), 1)
        # The rotated parts of all heads and of the key, in one call.
        rotated = torch.cat((query[..., self.plain_dim :], kept[:, None, self.rank :]), dim=1)
        apply_rotary(rotated, *step.angles(self.rotary), out=rotated, is_interleaved=self.rotary.is_interleaved)
        kept[:, self.rank :] = rotated[:, -1]
        cache = step.cache.layers[self.layer]
        step.backend.store(kept[:, None, None, :], cache, step.plan)
        to_keys, to_values = self._by_head()
        plain = torch.einsum("thd,hdr->thr", pad_rows(query[..., : self.plain_dim]), to_keys)[: len(query)]
        query = torch.cat((plain, rotated[:, :-1]), dim=-1)
        attended = step.backend.attend(query, cache, step.plan, scale=self.scale, window=None)[..., : self.rank]
        return torch.einsum("thr,hdr->thd", pad_rows(attended), to_values)[: len(query)]

    def _attend_by_kernels(self, query: Tensor, latents: Tensor, step: ForwardContext) -> Tensor:
        """The same by Triton kernels."""
        from infinilm.attention.latent import attend_latents
        from infinilm.kernels.latent_attention import multiply_heads, store_latents

        cache = step.cache.layers[self.layer]
        turned = store_latents(
            latents,
            query[..., self.plain_dim :],
            step.batch.positions,
            self.rotary.table,
            step.plan.slots,
            cache,
            weight=self.latent_norm.weight,
            eps=self.latent_norm.eps,
            is_interleaved=self.rotary.is_interleaved,
        )
        to_keys, to_values = self._by_head()
        plain = multiply_heads(query[..., : self.plain_dim], to_keys)
        attended = attend_latents(plain, turned, cache, step.plan, scale=self.scale)
        return multiply_heads(attended, to_values.transpose(1, 2))

    def _attend_by_library(self, query: Tensor, latents: Tensor, step: ForwardContext) -> Tensor:
        """The same by the native library."""
        table, expansion, norm = native.arrays_of(
            self.rotary.table, self.expansion.float(), self.latent_norm.weight.float()
        )
        heads = native.load_library().LatentHeads(
            count=self.heads.length,
            rank=self.rank,
            plain_dim=self.plain_dim,
            value_dim=self.value_dim,
            rotary=table,
            is_interleaved=self.rotary.is_interleaved,
            expansion=expansion,
            norm=norm,
            eps=self.latent_norm.eps,
            scale=self.scale,
        )
        out = torch.empty(len(query), self.heads.length * self.value_dim)
        # Copies, because the library changes its arguments in place.
        kept, queries = (torch.empty(part.shape).copy_(part) for part in (latents, query.flatten(1)))
        arrays = native.arrays_of(kept, queries, out)
        heads.run(*arrays[:2], step.cache.native, step.cache.native_place(self.layer), step.plan, arrays[2])
        return out.view(*query.shape[:2], -1).to(query.dtype)

    def _by_head(self) -> tuple[Tensor, Tensor]:
        """The expansions to keys `[heads, plain_dim, rank]` and to values `[heads, value_dim, rank]`."""
        by_head = self.expansion.view(self.heads.length, -1, self.rank)
        return by_head[:, : self.plain_dim], by_head[:, self.plain_dim :]

    def weight_targets(self, prefix: str) -> dict[str, Shard]:
        own = prefix + self.prefix
        targets = self.latents.weight_targets(own) | self.query.weight_targets(own) | self.out.weight_targets(own)
        if self.query_norm is not None:
            targets[f"{own}q_a_layernorm.weight"] = WeightShard.whole(self.query_norm.weight)
        targets[f"{own}kv_a_layernorm.weight"] = WeightShard.whole(self.latent_norm.weight)
        width = self.plain_dim + self.value_dim
        rows = ShardRange(*(size * width for size in (self.heads.start, self.heads.length, self.heads.full)))
        targets[f"{own}kv_b_proj.weight"] = WeightShard.of(self.expansion, rows, ShardRange.whole(self.rank))
        return targets
