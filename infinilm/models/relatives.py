"""Granite, SmolLM3, OLMo 2 and 3, Phi-3 and GLM-4: Llama with other scales, norms, rotations or files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from infinilm.checks import check_integer, check_real
from infinilm.errors import InvalidValueError
from infinilm.layers.names import LayerNorms
from infinilm.models.config import FULL_ATTENTION, SLIDING_ATTENTION
from infinilm.models.dense import LlamaConfig

_NO_ROPE = {"rope_type": "none", "rope_theta": 10000.0}


@dataclass(init=False, frozen=True)
class GraniteConfig(LlamaConfig):
    """Llama with four multipliers."""

    model_type: str = "granite"
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    """The factor of attention scores."""
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    """The divisor of logits."""

    def validate(self) -> None:
        super().validate()
        for name in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"):
            check_real(name, getattr(self, name), low=0.0, high=1e6, above_low=True)

    @property
    def embedding_scale(self) -> float:
        return self.embedding_multiplier

    @property
    def residual_scale(self) -> float:
        return self.residual_multiplier

    @property
    def attention_scale(self) -> float | None:
        return self.attention_multiplier

    @property
    def logit_scale(self) -> float:
        return 1 / self.logits_scaling


@dataclass(init=False, frozen=True)
class SmolLM3Config(LlamaConfig):
    """Llama without rotation in every fourth layer."""

    model_type: str = "smollm3"
    vocab_size: int = 128256
    hidden_size: int = 2048
    num_hidden_layers: int = 36
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    max_position_embeddings: int = 32768
    pad_token_id: int | None = 128004
    bos_token_id: int | list[int] | None = 128000
    eos_token_id: int | list[int] | None = 128001
    tie_word_embeddings: bool = True
    no_rope_layers: list[int] | None = None
    """For each layer 1 if it rotates, 0 if not. None: every `no_rope_layer_interval`-th layer does not rotate."""
    no_rope_layer_interval: int = 4

    default_theta = 2_000_000.0

    def rotates(self, layer: int) -> bool:
        """Whether a layer rotates queries and keys."""
        if self.no_rope_layers is None:
            return (layer + 1) % self.no_rope_layer_interval != 0
        return bool(self.no_rope_layers[layer])

    def rope(self, layer: int) -> Mapping[str, Any]:
        return self.rope_parameters if self.rotates(layer) else _NO_ROPE

    def validate(self) -> None:
        flags = self.no_rope_layers
        if flags is not None and (not isinstance(flags, list) or len(flags) < self.num_hidden_layers):
            raise InvalidValueError(
                f"no_rope_layers={flags!r} must be a list with 0 or 1 for each of the "
                f"num_hidden_layers={self.num_hidden_layers} layers"
            )
        check_integer("no_rope_layer_interval", self.no_rope_layer_interval, low=1)
        for flag in flags or ():
            check_integer("no_rope_layers", flag, low=0, high=1)
        super().validate()


@dataclass(init=False, frozen=True)
class Olmo2Config(LlamaConfig):
    """Llama with norms after the mixers instead of before, and query and key norms over all heads as one vector."""

    model_type: str = "olmo2"
    vocab_size: int = 50304
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 1
    bos_token_id: int | list[int] | None = None
    eos_token_id: int | list[int] | None = 50279
    qk_norm: bool = True

    ignored_settings = frozenset({"mlp_bias"})
    norms = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
    norms_all_heads = True


@dataclass(init=False, frozen=True)
class Olmo3Config(Olmo2Config):
    """OLMo 2 with a window in three of four layers, and a rotary embedding for each layer type."""

    model_type: str = "olmo3"
    sliding_window: int | None = 4096

    default_theta = 500_000.0
    sliding_theta = 500_000.0
    window_settings = {"sliding_window": 4096}  # noqa: RUF012

    @staticmethod
    def _read_windows(settings: Mapping[str, Any]) -> dict[str, Any]:
        count = settings["num_hidden_layers"]
        types = [FULL_ATTENTION if (layer + 1) % 4 == 0 else SLIDING_ATTENTION for layer in range(count)]
        return {"sliding_window": settings["sliding_window"], "layer_types": settings.get("layer_types") or types}


@dataclass(init=False, frozen=True)
class Phi3Config(LlamaConfig):
    """Llama with fused projections in its files. It may rotate only a part of each head."""

    model_type: str = "phi3"
    vocab_size: int = 32064
    hidden_size: int = 3072
    intermediate_size: int = 8192
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 32000
    eos_token_id: int | list[int] | None = 32000

    rotates_partially = True
    window_settings = {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None}  # noqa: RUF012
    ignored_settings = frozenset({"attention_bias", "mlp_bias"})


@dataclass(init=False, frozen=True)
class Glm4Config(LlamaConfig):
    """Llama with four norms per layer, biases in the q, k and v projections, and half of each head rotated, in pairs of
    neighbours."""

    model_type: str = "glm4"
    vocab_size: int = 151552
    intermediate_size: int = 13696
    num_hidden_layers: int = 40
    num_key_value_heads: int = 2
    head_dim: int = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 0.00000015625
    pad_token_id: int | None = 151329
    bos_token_id: int | list[int] | None = None
    eos_token_id: int | list[int] | None = field(default_factory=lambda: [151329, 151336, 151338])
    attention_bias: bool = True
    """Whether the q, k and v projections have biases."""

    rotates_partially = True
    ignored_settings = frozenset({"mlp_bias"})
    norms = LayerNorms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")

    @classmethod
    def read_rope(cls, settings: Mapping[str, Any], max_position_embeddings: int) -> dict[str, Any]:
        settings = {"partial_rotary_factor": 0.5, **settings}
        return super().read_rope(settings, max_position_embeddings) | {"interleaved": True}

    @property
    def out_bias(self) -> bool:
        return False
