"""Self-attention over the paged KV cache, full or within a sliding window."""

from collections.abc import Sequence
from types import NoneType
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from infinilm.debug.taps import Taps
from infinilm.distributed.group import SINGLE
from infinilm.distributed.shard import Shard, ShardRange, WeightShard
from infinilm.kernels.invariant import sigmoid
from infinilm.kernels.support import has_kernels
from infinilm.layers.formats import LayerOptions, below
from infinilm.layers.linear import QKV, QKVParallelLinear, RowParallelLinear
from infinilm.layers.mixer import ForwardContext, Mixer
from infinilm.layers.norm import ParallelRMSNorm, RMSNorm
from infinilm.layers.rotary_embedding import RotaryEmbedding, apply_rotary


class Attention(Mixer):
    """A token mixer in which groups of query heads share a key and a value head (grouped-query attention).

    A token sees the last `window` tokens, including itself; None: all. Scores are multiplied by `scale`; None:
    `head_dim**-0.5`. With a `cap` they then become `cap * tanh(score / cap)`. With `has_sinks` each head has a sink, a
    learned score of a key without a value. With `qk_norm_eps` queries and keys are normalised before they are
    rotated: each head by a `norm_class`, or all heads as one vector with `norms_all_heads`. With `has_gate` the query
    projection also computes a gate for each query, and the attention result is multiplied by the gate's sigmoid.
    """

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary: RotaryEmbedding,
        window: int | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        scale: float | None = None,
        cap: float | None = None,
        has_sinks: bool = False,
        qk_norm_eps: float | None = None,
        norm_class: type[RMSNorm] = RMSNorm,
        norms_all_heads: bool = False,
        projections: Sequence[str] = QKV,
        has_gate: bool = False,
        prefix: str = "self_attn.",
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(layer, prefix)
        options = below(options, prefix)
        self.head_dim, self.window, self.rotary = head_dim, window, rotary
        self.scale = head_dim**-0.5 if scale is None else scale
        heads = (head_dim, num_heads, num_kv_heads)
        self.has_gate = has_gate
        self.qkv = QKVParallelLinear(
            hidden_size, *heads, bias=qkv_bias, projections=projections, has_gate=has_gate, **options
        )
        self.out = RowParallelLinear(num_heads * head_dim, {"o_proj": hidden_size}, bias=out_bias, **options)
        self.num_heads, self.num_kv_heads = self.qkv.num_heads, self.qkv.num_kv_heads  # of this rank
        self.cap, self.sinks = cap, None
        if has_sinks:
            sinks = torch.empty(self.num_heads, dtype=torch.float32, device=options["device"])
            self.sinks = nn.Parameter(sinks, requires_grad=False)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if qk_norm_eps is not None:
            kind: dict[str, Any] = {"dtype": options["dtype"], "device": options["device"]}
            if norms_all_heads:
                q, k, _ = self.qkv.outputs.values()
                kind["group"] = options.get("group", SINGLE)
                self.q_norm = ParallelRMSNorm(q, qk_norm_eps, num_copies=1, **kind)
                self.k_norm = ParallelRMSNorm(k, qk_norm_eps, num_copies=self.qkv.num_copies, **kind)
            else:
                self.q_norm, self.k_norm = (norm_class(head_dim, qk_norm_eps, **kind) for _ in range(2))
        # The kernels only support norms of single heads.
        has_plain_norms = type(self.q_norm) in (NoneType, RMSNorm)
        self._has_kernels = has_kernels(options["device"]) and has_plain_norms

    def forward(
        self, x: Tensor, step: ForwardContext, residual: Tensor | None = None, norm: RMSNorm | None = None
    ) -> Tensor:
        taps, cache = step.taps, step.cache.layers[self.layer]
        if taps is None:
            qkv = self.qkv(x, norm=norm)
        else:
            if norm is not None:
                x = norm(x)
                taps.see("input_layernorm", x, self.layer)
            qkv = self.qkv(x)
        heads = qkv.view(len(x), -1, self.head_dim)  # [T, heads of q, k and v, head_dim]
        gate: Tensor | None = None
        if self.has_gate:  # each query is followed by its gate
            both, kv = heads.split((2 * self.num_heads, 2 * self.num_kv_heads), dim=1)
            query, gate = both.unflatten(1, (-1, 2)).unbind(2)
            heads = torch.cat((query, kv), dim=1)
        if taps is not None:
            self._show(taps, heads, "after_proj")
        q, cache = self._rope_and_store_kv(heads, cache, step)
        if self.rotary.query_scale is not None:
            q = q * self.rotary.query_scale.index_select(0, step.batch.positions)
        scoring: dict[str, Any] = {"scale": self.scale, "window": self.window, **step.scales_of(self.layer)}
        if self.cap is not None or self.sinks is not None:
            scoring |= {"cap": self.cap, "sinks": self.sinks}
        attended = step.backend.attend(q, cache, step.plan, **scoring)
        if gate is not None:
            attended = attended * sigmoid(gate)
        attended = attended.flatten(1)
        if taps is None:
            mixed: Tensor = self.out(attended, residual)
            return mixed
        output: Tensor = self.out(attended)
        taps.see("attention_output", output, self.layer)
        return output if residual is None else output.add_(residual)

    def _rope_and_store_kv(self, heads: Tensor, cache: Tensor, step: ForwardContext) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys by their positions, and store keys and values.

        Returns the queries `[T, heads, head_dim]` and the tensor that they attend to: the layer's `cache`, or the
        result of the cache's own `update`.
        """
        if self._has_kernels and step.taps is None and step.cache.only_stores:
            from infinilm.kernels.rope_store import rope_store

            queries = rope_store(
                heads,
                step.batch.positions,
                self.rotary.table,
                step.batch.slot_mapping,
                cache,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                q_norm=None if self.q_norm is None else self.q_norm.weight,
                k_norm=None if self.k_norm is None else self.k_norm.weight,
                eps=0.0 if self.q_norm is None else self.q_norm.eps,
                is_interleaved=self.rotary.is_interleaved,
                marks_nonfinite=getattr(step.plan, "has_prompts", True) or self.window is not None,
                **step.scales_of(self.layer),
            )
            return queries, cache
        qk = heads[:, : -self.num_kv_heads]
        normed = qk
        if self.q_norm is not None and self.k_norm is not None:
            q, k = torch.split(qk, [self.num_heads, self.num_kv_heads], dim=1)
            if isinstance(self.q_norm, ParallelRMSNorm):  # it normalises all heads as one vector
                q, k = q.flatten(1), k.flatten(1)
            normed = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1).view(qk.shape)
        apply_rotary(normed, *step.angles(self.rotary), out=qk, is_interleaved=self.rotary.is_interleaved)
        if step.taps is not None:
            self._show(step.taps, heads, "after_rope")
        kv = heads[:, self.num_heads :].view(len(heads), 2, self.num_kv_heads, self.head_dim)
        if step.cache.only_stores:
            step.backend.store(kv, cache, step.plan, **step.scales_of(self.layer))
        else:
            cache = step.update_cache(self.layer, kv)
        return heads[:, : self.num_heads], cache

    def _show(self, taps: Taps, heads: Tensor, stage: str) -> None:
        """Show queries and keys to hooks; before rotation also the values."""
        q, k, v = torch.split(heads, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        shown = {"q": (q, 1), "k": (k, self.qkv.num_copies)}
        if stage == "after_proj":
            shown["v"] = (v, self.qkv.num_copies)
        for name, (tensor, num_copies) in shown.items():
            # Hooks see projections as the matrix's outputs, and rotated tensors as heads; both are views of `heads`.
            view = tensor.view(len(tensor), -1) if stage == "after_proj" else tensor
            point = f"attention_{name}_{stage}"
            taps.see(point, view, self.layer, is_shared_out=True, num_copies=num_copies)

    def weight_targets(self, prefix: str) -> dict[str, Shard]:
        own = prefix + self.prefix
        targets = self.qkv.weight_targets(own) | self.out.weight_targets(own)
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                share = norm.share if isinstance(norm, ParallelRMSNorm) else ShardRange.whole(self.head_dim)
                targets[f"{own}{name}.weight"] = WeightShard.of(norm.weight, share)
        if self.sinks is not None:
            targets[f"{own}sinks"] = WeightShard.of(self.sinks, self.qkv.heads)
        return targets
