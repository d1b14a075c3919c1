"""The model of Gemma 4. Its configuration is in `gemma4.py`."""

from typing import Any

import torch
from torch import Tensor, nn

from infinilm.attention import ForwardBatch
from infinilm.debug.taps import Taps
from infinilm.distributed.shard import Shard, WeightShard
from infinilm.errors import InvalidValueError
from infinilm.kernels.routing import GELU
from infinilm.layers.attention import Attention
from infinilm.layers.embedding import VocabParallelEmbedding
from infinilm.layers.formats import DENSE, LayerOptions, below
from infinilm.layers.linear import Linear
from infinilm.layers.mixer import ForwardContext, Mixer
from infinilm.layers.mlp import ACTIVATIONS, MLP
from infinilm.layers.moe import SparseMLP
from infinilm.layers.names import ExpertNames
from infinilm.layers.norm import RMSNorm, WideRMSNorm, normalized
from infinilm.layers.rotary_embedding import apply_rotary
from infinilm.models.causal_lm import GemmaForCausalLM
from infinilm.models.decoder import DecoderLayer
from infinilm.models.gemma4 import Gemma4Config


class Gemma4Attention(Attention):
    """Attention with normalised values. The values may be the keys; both may be those of an earlier layer."""

    def __init__(self, *args: Any, eps: float, has_keys: bool, has_values: bool, **options: Any) -> None:
        projections = ("q_proj", *["k_proj"] * has_keys, *["v_proj"] * has_values)
        super().__init__(*args, qk_norm_eps=eps, norm_class=WideRMSNorm, projections=projections, **options)
        self._eps, self._has_keys, self._has_values = eps, has_keys, has_values
        if not has_keys:
            self.k_norm = None

    def _rope_and_store_kv(self, heads: Tensor, cache: Tensor, step: ForwardContext) -> tuple[Tensor, Tensor]:
        assert self.q_norm is not None
        angles = step.angles(self.rotary)
        q = self.q_norm(heads[:, : self.num_heads])
        apply_rotary(q, *angles, out=q)
        if self.k_norm is None:
            if step.taps is not None:
                self._show(step.taps, q, "after_rope")
            return q, cache
        k, v = heads[:, self.num_heads :][:, : self.num_kv_heads], heads[:, -self.num_kv_heads :]
        kv = torch.stack((self.k_norm(k), normalized(v, self._eps).to(v.dtype)), dim=1)
        apply_rotary(kv[:, 0], *angles, out=kv[:, 0])
        if step.taps is not None:
            turned = torch.cat((q, kv[:, 0]), dim=1)
            self._show(step.taps, turned, "after_rope")
            q, kv[:, 0] = turned[:, : self.num_heads], turned[:, self.num_heads :]
        if step.cache.only_stores:
            step.backend.store(kv, cache, step.plan, **step.scales_of(self.layer))
        else:
            cache = step.update_cache(self.layer, kv)
        return q, cache

    def _show(self, taps: Taps, heads: Tensor, stage: str) -> None:
        names = ["q", *["k"] * self._has_keys]
        if stage == "after_proj" and self._has_values:
            names.append("v")
        sizes = {"q": self.num_heads, "k": self.num_kv_heads, "v": self.num_kv_heads}
        for name, tensor in zip(names, torch.split(heads, [sizes[name] for name in names], dim=1), strict=True):
            view = tensor.view(len(tensor), -1) if stage == "after_proj" else tensor
            num_copies = 1 if name == "q" else self.qkv.num_copies
            taps.see(f"attention_{name}_{stage}", view, self.layer, is_shared_out=True, num_copies=num_copies)


class Gemma4Experts(SparseMLP):
    """Experts in addition to an MLP, with their own norms. The router also has a norm, and a factor for each expert."""

    def __init__(self, config: Gemma4Config, layer: int, options: LayerOptions) -> None:
        assert config.num_experts is not None
        assert config.moe_intermediate_size is not None
        sizes = (config.hidden_size, config.moe_intermediate_size)
        super().__init__(layer, *sizes, config.routing, ExpertNames("", "router.proj"), gate=GELU, **options)
        kind: dict[str, Any] = {"dtype": options["dtype"], "device": options["device"]}
        size = (config.hidden_size, config.rms_norm_eps)
        self.router_norm = RMSNorm(*size, **kind)
        self._router_scale = config.hidden_size**-0.5
        self.factors = nn.Parameter(torch.empty(config.num_experts, **kind), requires_grad=False)
        self.before_norm, self.after_norm = WideRMSNorm(*size, **kind), WideRMSNorm(*size, **kind)

    def forward(
        self, x: Tensor, step: ForwardContext | None = None, residual: Tensor | None = None, norm: RMSNorm | None = None
    ) -> Tensor:
        assert residual is None
        assert norm is None
        taps = None if step is None else step.taps
        logits = self._score(self.router_norm(x) * self._router_scale)
        if taps is not None:
            taps.see("router_logits", logits, self.layer)
        ids, weights = self._choose(logits)
        if taps is not None:
            taps.see("expert_ids", ids, self.layer)
            self._check_ids(ids)
        # While kernels are being compiled, `ids` may be uninitialised memory.
        factors = self.factors[ids.clamp(0, len(self.factors) - 1)].float()
        mixed: Tensor = self.after_norm(self.experts(self.before_norm(x), ids, weights * factors))
        return mixed

    def weight_targets(self, prefix: str) -> dict[str, Shard]:
        own = {
            "router.scale": self.router_norm.weight,
            "router.per_expert_scale": self.factors,
            "pre_feedforward_layernorm_2.weight": self.before_norm.weight,
            "post_feedforward_layernorm_2.weight": self.after_norm.weight,
        }
        return super().weight_targets(prefix) | {f"{prefix}{name}": WeightShard.whole(own[name]) for name in own}


class Gemma4Layer(DecoderLayer):
    """A decoder layer that may have experts. At its end it adds its own input, if there is one, and multiplies by a
    factor."""

    def __init__(self, config: Gemma4Config, *args: Any, **kind: Any) -> None:
        super().__init__(config, *args, **kind)
        options: LayerOptions = args[-1]
        own: dict[str, Any] = {"dtype": options["dtype"], "device": options["device"]}
        self.layer_scalar = nn.Parameter(torch.empty(1, **own), requires_grad=False)
        self.experts = Gemma4Experts(config, self.layer, options) if config.enable_moe_block else None
        if self.experts is not None:
            self.mlp_norm = WideRMSNorm(config.hidden_size, config.rms_norm_eps, **own)
        self._activation, self.gate, self.projection = ACTIVATIONS[config.activation], None, None
        if width := config.hidden_size_per_layer_input:
            own["formats"] = options.get("formats", DENSE)
            self.gate = Linear(config.hidden_size, {"per_layer_input_gate": width}, bias=False, **own)
            self.projection = Linear(width, {"per_layer_projection": config.hidden_size}, bias=False, **own)
            del own["formats"]
            self.own_norm = WideRMSNorm(config.hidden_size, config.rms_norm_eps, **own)

    def forward(self, hidden: Tensor, step: ForwardContext, own_input: Tensor | None = None) -> Tensor:
        """`own_input` is `[T, hidden_size_per_layer_input]`."""
        hidden = self._mix(self.token_mixer, hidden, step, *self._token_norms)
        if step.taps is not None:
            step.taps.see("after_attention_residual", hidden, self.layer)
        before, after = self._channel_norms
        if self.experts is None:
            hidden = self._mix(self.channel_mixer, hidden, step, before, after)
        else:
            assert after is not None
            beside = self.experts(hidden, step)
            mixed = self._mixed(self.channel_mixer, hidden, step, before, self.mlp_norm)
            hidden = hidden + after(mixed + beside)
        if own_input is not None:
            assert self.gate is not None
            assert self.projection is not None
            gated = self._activation(self.gate(hidden)) * own_input
            hidden = hidden + self.own_norm(self.projection(gated))
        hidden = hidden * self.layer_scalar
        if step.taps is not None:
            step.taps.see("output", hidden, self.layer)
        return hidden

    def weight_targets(self, prefix: str) -> dict[str, Shard]:
        targets = super().weight_targets(prefix)
        targets[f"{prefix}layer_scalar"] = WeightShard.whole(self.layer_scalar)
        if self.experts is not None:
            targets |= self.experts.weight_targets(prefix)
            targets[f"{prefix}post_feedforward_layernorm_1.weight"] = WeightShard.whole(self.mlp_norm.weight)
        if self.gate is not None and self.projection is not None:
            targets |= self.gate.weight_targets(prefix) | self.projection.weight_targets(prefix)
            targets[f"{prefix}post_per_layer_input_norm.weight"] = WeightShard.whole(self.own_norm.weight)
        return targets


class Gemma4ForCausalLM(GemmaForCausalLM):
    config: Gemma4Config
    norm_class = WideRMSNorm
    layer_class = Gemma4Layer

    def build_more(self, options: LayerOptions) -> None:
        config = self.config
        needs_others = config.hidden_size_per_layer_input > 0 or any(
            config.kv_owner(layer) not in self.stage.layers for layer in self.stage.layers
        )
        if self.stage.count > 1 and needs_others:
            raise InvalidValueError(
                f"pipeline_parallel_size={self.stage.count}: layers of this Gemma 4 read keys and values of a layer in "
                "another stage, or need the embeddings of the first stage; use pipeline_parallel_size=1"
            )
        self.own_embedding: VocabParallelEmbedding | None = None
        self.own_projection: Linear | None = None
        if width := config.num_hidden_layers * config.hidden_size_per_layer_input:
            kind: dict[str, Any] = {"dtype": options["dtype"], "device": options["device"]}
            self.own_norm = WideRMSNorm(config.hidden_size_per_layer_input, config.rms_norm_eps, **kind)
            outputs = {"per_layer_model_projection": width}
            self.own_projection = Linear(
                config.hidden_size, outputs, bias=False, formats=options.get("formats", DENSE), **kind
            )
            self.own_embedding = VocabParallelEmbedding(
                config.vocab_size_per_layer_input, width, **below(options, "embed_tokens_per_layer.")
            )

    def token_mixer(self, layer: int, options: LayerOptions) -> Mixer:
        config = self.config
        projections = config.projections(layer)
        return Gemma4Attention(
            layer,
            config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.layer_kv_heads(layer),
            head_dim=config.layer_head_dim(layer),
            rotary=self.rotaries[layer],
            window=config.window(layer),
            scale=config.attention_scale,
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
            eps=config.rms_norm_eps,
            has_keys="k_proj" in projections,
            has_values="v_proj" in projections,
            **options,
        )

    def channel_mixer(self, layer: int, options: LayerOptions) -> Mixer:
        sizes = (self.config.hidden_size, self.config.mlp_size(layer))
        return MLP(layer, *sizes, activation=self.config.activation, **options)

    def layer_inputs(self, batch: ForwardBatch, hidden: Tensor) -> Tensor | None:
        if self.own_embedding is None or self.own_projection is None:
            return None
        config = self.config
        width = config.hidden_size_per_layer_input
        scale = torch.tensor(width**0.5, dtype=hidden.dtype)  # rounded, as the embeddings' scale is
        known = self.own_embedding(batch.input_ids) * scale
        seen = self.own_projection(hidden) * config.hidden_size**-0.5
        projected: Tensor = self.own_norm(seen.view(len(hidden), -1, width))
        together: Tensor = (projected + known.view(projected.shape)) * 2**-0.5
        return together

    def weight_targets(self) -> dict[str, Shard]:
        targets = super().weight_targets()
        if self.own_embedding is not None and self.own_projection is not None:
            targets |= self.own_embedding.weight_targets(f"{self.body_prefix}embed_tokens_per_layer.")
            targets |= self.own_projection.weight_targets(self.body_prefix)
            targets[f"{self.body_prefix}per_layer_projection_norm.weight"] = WeightShard.whole(self.own_norm.weight)
        return targets
