"""Gemma 4's text model: heads of two sizes, keys and values that layers share, embeddings for each layer, experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from infinilm.cache.specs import AttentionSpec, CacheSpec, SharedKV
from infinilm.checks import check_choice, check_flag, check_integer
from infinilm.errors import InvalidValueError
from infinilm.kernels.routing import GELU, Routing
from infinilm.loading.parts import MAX_EXPERTS
from infinilm.models.config import FULL_ATTENTION
from infinilm.models.gemma import Gemma3Config


@dataclass(init=False, frozen=True)
class Gemma4Config(Gemma3Config):
    """Gemma 4's text model: two sizes of heads, shared keys and values, embeddings for each layer, maybe experts."""

    model_type: str = "gemma4_text"
    vocab_size: int = 262_144
    num_hidden_layers: int = 30
    sliding_window: int | None = 512
    global_head_dim: int = 512
    """The head size in full layers; sliding layers use `head_dim`."""
    num_global_key_value_heads: int | None = None
    """The number of kv heads in full layers, with `attention_k_eq_v`."""
    attention_k_eq_v: bool = False
    """Whether in full layers the keys, before normalisation, are also the values."""
    num_kv_shared_layers: int = 0
    """The number of last layers that share keys and values: each reads those of the last earlier layer of its type that
    has its own."""
    hidden_size_per_layer_input: int = 256
    """The width of each layer's own embeddings; 0: there are none."""
    vocab_size_per_layer_input: int = 262_144
    use_double_wide_mlp: bool = False
    """Whether layers without their own keys and values have an MLP of twice the width."""
    enable_moe_block: bool = False
    """Whether each layer has experts in addition to its MLP."""
    num_experts: int | None = None
    top_k_experts: int | None = None
    moe_intermediate_size: int | None = None

    rotates_partially = True
    has_zero_centred_norms = False
    norms_values = True
    window_settings = {"sliding_window": 512, "sliding_window_pattern": 6}  # noqa: RUF012

    @classmethod
    def _read(cls, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> Self:
        """Newer files repeat the settings of full layers for each layer."""
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
        if self.hidden_size_per_layer_input:
            check_integer("vocab_size_per_layer_input", self.vocab_size_per_layer_input, low=self.vocab_size)
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
        """The layer whose keys and values this layer reads."""
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

    def projections(self, layer: int) -> tuple[str, ...]:
        if self.kv_owner(layer) != layer:
            return ("q_proj",)
        return super().projections(layer)[: 2 if self.attention_k_eq_v and self.window(layer) is None else 3]

    def mlp_size(self, layer: int) -> int:
        return self.intermediate_size * (1 + (self.use_double_wide_mlp and self.kv_owner(layer) != layer))

    @property
    def routing(self) -> Routing:
        """How experts are chosen, if there are any."""
        assert self.num_experts is not None
        assert self.top_k_experts is not None
        return Routing(self.num_experts, self.top_k_experts, renormalizes=True)

    def is_ignorable(self, name: str) -> bool:
        """See `ModelConfig`. Files may hold unused key and value weights of layers that share another layer's."""
        if super().is_ignorable(name):
            return True
        layer, _, part = name.removeprefix("model.layers.").partition(".self_attn.")
        is_shared = layer.isdecimal() and self.kv_owner(int(layer)) != int(layer)
        return is_shared and part.split(".")[0] in ("k_proj", "v_proj", "k_norm", "v_norm")

    def count_experts(self) -> dict[str, int] | None:
        if not self.enable_moe_block:
            return None
        numbers = (self.num_experts or 0, self.top_k_experts or 0, self.moe_intermediate_size or 0)
        return dict(zip(("count", "per_token", "size"), numbers, strict=True), layers=self.num_hidden_layers)

    def channel_width(self, num_ranks: int) -> int:
        width = super().channel_width(num_ranks) * (1 + self.use_double_wide_mlp)
        if not self.enable_moe_block:
            return width
        # For each expert: input, intermediate tensors and output. The MLP's output is kept at the same time.
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
