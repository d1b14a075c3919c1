"""Gemma 4's text model: heads of two sizes, keys and values that layers share, embeddings for each layer, experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from infinilm.attention import ForwardBatch
from infinilm.cache.specs import AttentionSpec, CacheSpec, SharedKV
from infinilm.checks import check_choice, check_flag, check_integer
from infinilm.debug.taps import Taps
from infinilm.distributed.shard import Shard, WeightShard
from infinilm.errors import InvalidValueError
from infinilm.kernels.routing import GELU, Routing
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
from infinilm.loading.parts import MAX_EXPERTS
from infinilm.models.causal_lm import GemmaForCausalLM
from infinilm.models.config import FULL_ATTENTION
from infinilm.models.decoder import DecoderLayer
from infinilm.models.gemma import Gemma3Config


@dataclass(init=False, frozen=True)
class Gemma4Config(Gemma3Config):
    """Gemma 4's text model: two sizes of heads, shared keys and values, embeddings for each layer, maybe experts."""

    model_type: str = "gemma4_text"
    vocab_size: int = 262_144
    num_hidden_layers: int = 30
    sliding_window: int | None = 512
    global_head_dim: int = 512
    """The size of heads in full layers; in sliding ones it is `head_dim`."""
    num_global_key_value_heads: int | None = None
    """The key and value heads of full layers, with `attention_k_eq_v`."""
    attention_k_eq_v: bool = False
    """Whether keys, before they are normalised, are also the values in full layers."""
    num_kv_shared_layers: int = 0
    """The last layers, which read the keys and values of the last layer of their type before them."""
    hidden_size_per_layer_input: int = 256
    """The width of the embeddings that each layer has for itself; 0: there are none."""
    vocab_size_per_layer_input: int = 262_144
    use_double_wide_mlp: bool = False
    """Whether the MLP of layers without keys and values of their own is twice as wide."""
    enable_moe_block: bool = False
    """Whether each layer has experts beside its MLP."""
    num_experts: int | None = None
    top_k_experts: int | None = None
    moe_intermediate_size: int | None = None

    rotates_partially = True
    window_settings = {"sliding_window": 512, "sliding_window_pattern": 6}  # noqa: RUF012

    @classmethod
    def _read(cls, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> Self:
        """Newer files give the settings of full layers layer by layer, all the same."""
        layers = config.get("per_layer_config")
        if layers is not None:
            own = {str(settings): settings for settings in layers.values()} if isinstance(layers, Mapping) else {"": 0}
            full: Any = next(iter(own.values()), {})
            if len(own) > 1 or not isinstance(full, Mapping) or set(full) - {"head_dim", "num_key_value_heads"}:
                raise InvalidValueError(f"per_layer_config={layers!r:.200} must be the same head sizes for full layers")
            config = {"global_head_dim": config.get("head_dim", cls.head_dim), **config}
            names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
            config |= {names[name]: value for name, value in full.items()}
        return super()._read({name: value for name, value in config.items() if name != "per_layer_config"}, defaults)

    @classmethod
    def read_rope(cls, settings: Mapping[str, Any], max_position_embeddings: int) -> dict[str, Any]:
        if not settings.get("rope_parameters"):
            full = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
            settings = {**settings, "rope_parameters": {FULL_ATTENTION: full}}
        return super().read_rope(settings, max_position_embeddings)

    def validate(self) -> None:
        for name in ("attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp"):
            check_flag(name, getattr(self, name))
        check_integer("global_head_dim", self.global_head_dim, low=2)
        if self.global_head_dim % 2:
            raise InvalidValueError(f"global_head_dim={self.global_head_dim} must be even: pairs are rotated")
        check_integer("num_kv_shared_layers", self.num_kv_shared_layers, low=0, high=self.num_hidden_layers - 1)
        check_integer("hidden_size_per_layer_input", self.hidden_size_per_layer_input, low=0)
        check_integer("vocab_size_per_layer_input", self.vocab_size_per_layer_input, low=1)
        if self.num_global_key_value_heads is not None:
            check_integer("num_global_key_value_heads", self.num_global_key_value_heads, low=1)
        if self.enable_moe_block:
            check_integer("num_experts", self.num_experts, low=1, high=MAX_EXPERTS)
            check_integer("top_k_experts", self.top_k_experts, low=1, high=self.num_experts)
            check_integer("moe_intermediate_size", self.moe_intermediate_size, low=1)
            check_choice("hidden_activation", self.hidden_activation, (GELU,))
        super().validate()
        for layer in range(self.num_hidden_layers - self.num_kv_shared_layers, self.num_hidden_layers):
            self.kv_owner(layer)

    def kv_owner(self, layer: int) -> int:
        """The layer whose keys and values a layer reads."""
        first_shared = self.num_hidden_layers - self.num_kv_shared_layers
        if layer < first_shared:
            return layer
        for owner in reversed(range(first_shared)):
            if self.window(owner) == self.window(layer):
                return owner
        raise InvalidValueError(
            f"num_kv_shared_layers={self.num_kv_shared_layers}: no layer before the shared ones is of the type of "
            f"layer {layer}"
        )

    def layer_head_dim(self, layer: int) -> int:
        return self.global_head_dim if self.window(layer) is None else self.head_dim

    def layer_kv_heads(self, layer: int) -> int:
        is_other = self.attention_k_eq_v and self.window(layer) is None
        return (self.num_global_key_value_heads if is_other else None) or self.num_key_value_heads

    def count_experts(self) -> dict[str, int] | None:
        if not self.enable_moe_block:
            return None
        numbers = (self.num_experts or 0, self.top_k_experts or 0, self.moe_intermediate_size or 0)
        return dict(zip(("count", "per_token", "size"), numbers, strict=True), layers=self.num_hidden_layers)

    def channel_width(self, num_ranks: int) -> int:
        width = super().channel_width(num_ranks) * (1 + self.use_double_wide_mlp)
        if not self.enable_moe_block:
            return width
        # Of each expert: its input, what its matrices make of it, and its output; the MLP's output is kept meanwhile.
        of_one = 2 * self.hidden_size + 3 * (self.moe_intermediate_size or 0) // num_ranks
        return max(width, self.hidden_size + (self.top_k_experts or 0) * of_one)

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        owners = [self.kv_owner(layer) for layer in range(self.num_hidden_layers)]
        return tuple(
            AttentionSpec(self.layer_kv_heads(layer), self.layer_head_dim(layer), self.window(layer))
            if owner == layer
            else SharedKV(owner)
            for layer, owner in enumerate(owners)
        )

    @property
    def attention_scale(self) -> float | None:
        return 1.0


class Gemma4Attention(Attention):
    """Attention with normalised values, which may be the keys, or an earlier layer's keys and values."""

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
    """Experts beside an MLP, with norms of their own. The router has one, too, and a factor for each expert."""

    def __init__(self, config: Gemma4Config, layer: int, options: LayerOptions) -> None:
        assert config.num_experts is not None
        assert config.top_k_experts is not None
        assert config.moe_intermediate_size is not None
        routing = Routing(config.num_experts, config.top_k_experts, renormalizes=True)
        sizes, names = (config.hidden_size, config.moe_intermediate_size), ExpertNames("", "router.proj")
        super().__init__(layer, *sizes, routing, names, gate=GELU, **options)
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
        # While kernels are compiled, ids may be memory that no kernel has written yet.
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
    """A decoder layer that may have experts, and ends with the layer's own input, where there is one, and a factor."""

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
        has_keys = config.kv_owner(layer) == layer
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
            has_keys=has_keys,
            has_values=has_keys and not (config.attention_k_eq_v and config.window(layer) is None),
            **options,
        )

    def channel_mixer(self, layer: int, options: LayerOptions) -> Mixer:
        config = self.config
        is_wide = config.use_double_wide_mlp and config.kv_owner(layer) != layer
        size = config.intermediate_size * (1 + is_wide)
        return MLP(layer, config.hidden_size, size, activation=config.activation, **options)

    def layer_inputs(self, batch: ForwardBatch, hidden: Tensor) -> Tensor | None:
        if self.own_embedding is None or self.own_projection is None:
            return None
        config = self.config
        width = config.hidden_size_per_layer_input
        scale = torch.tensor(width**0.5, dtype=hidden.dtype)  # rounded, as the embeddings' own is
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

    def is_ignorable(self, name: str) -> bool:
        """Files may hold keys and values of layers that share those of another."""
        if super().is_ignorable(name):
            return True
        layer, _, part = name.removeprefix(f"{self.body_prefix}layers.").partition(".self_attn.")
        is_shared = layer.isdecimal() and self.config.kv_owner(int(layer)) != int(layer)
        return is_shared and part.split(".")[0] in ("k_proj", "v_proj", "k_norm", "v_norm")
