"""Qwen3.5, dense or with experts, and Qwen3-Next: most layers are gated delta nets, the others gated attention."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infinilm.cache.specs import AttentionSpec, CacheSpec, StateSpec
from infinilm.checks import check_integer
from infinilm.errors import InvalidValueError
from infinilm.kernels.routing import Routing
from infinilm.layers.names import ExpertNames
from infinilm.models.config import FULL_ATTENTION
from infinilm.models.dense import LlamaConfig
from infinilm.models.sparse import Qwen3MoeConfig, SparseConfig

LINEAR_ATTENTION = "linear_attention"


@dataclass(init=False, frozen=True)
class Qwen35Config(LlamaConfig):
    """Qwen3 with gated delta nets in the layers whose type is `linear_attention`, and gates in the others."""

    model_type: str = "qwen3_5_text"
    vocab_size: int = 248_320
    intermediate_size: int = 12288
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    head_dim: int = 256
    max_position_embeddings: int = 32768
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    qk_norm: bool = True

    has_zero_centred_norms = True
    has_gates = True
    rotates_partially = True
    known_layer_types = (FULL_ATTENTION, LINEAR_ATTENTION)
    window_settings = {"full_attention_interval": 4}  # noqa: RUF012
    ignored_settings = frozenset({"mlp_bias"})

    @staticmethod
    def _read_windows(settings: Mapping[str, Any]) -> dict[str, Any]:
        every, count = settings["full_attention_interval"], settings["num_hidden_layers"]
        check_integer("full_attention_interval", every, low=1)
        types = [FULL_ATTENTION if (layer + 1) % every == 0 else LINEAR_ATTENTION for layer in range(count)]
        return {"sliding_window": None, "layer_types": settings.get("layer_types") or types}

    @classmethod
    def read_rope(cls, settings: Mapping[str, Any], max_position_embeddings: int) -> dict[str, Any]:
        rope = super().read_rope(settings, max_position_embeddings)
        rope.setdefault("partial_rotary_factor", 0.25)
        # The mrope_ settings mix the positions within a picture; for text all these positions are equal.
        return {name: value for name, value in rope.items() if not name.startswith("mrope_")}

    def validate(self) -> None:
        super().validate()
        for name in ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads"):
            check_integer(f"linear_{name}", getattr(self, f"linear_{name}"), low=2 if name == "conv_kernel_dim" else 1)
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise InvalidValueError(
                f"linear_num_value_heads={self.linear_num_value_heads} must be a multiple of "
                f"linear_num_key_heads={self.linear_num_key_heads}"
            )

    def is_ignorable(self, name: str) -> bool:
        """See `ModelConfig`. The ignored layers predict tokens after the next one."""
        return super().is_ignorable(name) or name.startswith("mtp.")

    def is_recurrent(self, layer: int) -> bool:
        return self.layer_types is not None and self.layer_types[layer] == LINEAR_ATTENTION

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        heads, key_dim, value_dim = (
            self.linear_num_value_heads,
            self.linear_key_head_dim,
            self.linear_value_head_dim,
        )
        num_channels = 2 * self.linear_num_key_heads * key_dim + heads * value_dim
        state = StateSpec(((heads, key_dim, value_dim), (num_channels, self.linear_conv_kernel_dim - 1)))
        attention = AttentionSpec(self.num_key_value_heads, self.head_dim)
        return tuple(state if self.is_recurrent(layer) else attention for layer in range(self.num_hidden_layers))


@dataclass(init=False, frozen=True)
class Qwen35MoeConfig(Qwen35Config, SparseConfig):
    """Qwen3.5 with experts in all layers, and one shared expert with a gate."""

    model_type: str = "qwen3_5_moe_text"
    hidden_size: int = 2048
    intermediate_size: int = 512
    """Not used: no layer has a dense MLP."""
    num_hidden_layers: int = 40
    num_key_value_heads: int = 2
    bos_token_id: int | list[int] | None = None
    eos_token_id: int | list[int] | None = None
    num_experts: int = 256
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512

    expert_names = ExpertNames(shared="shared_expert")
    gates_shared = True

    @property
    def expert_size(self) -> int:
        return self.moe_intermediate_size

    @property
    def shared_size(self) -> int:
        return self.shared_expert_intermediate_size

    @property
    def routing(self) -> Routing:
        return Routing(self.num_experts, self.num_experts_per_tok, renormalizes=True)

    def validate(self) -> None:
        super().validate()
        check_integer("shared_expert_intermediate_size", self.shared_expert_intermediate_size, low=1)


@dataclass(init=False, frozen=True)
class Qwen3NextConfig(Qwen35Config, Qwen3MoeConfig):
    """Qwen3-MoE with the token mixers of Qwen3.5, and one shared expert with a gate."""

    model_type: str = "qwen3_next"
    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 48
    num_key_value_heads: int = 2
    bos_token_id: int | list[int] | None = None
    eos_token_id: int | list[int] | None = None
    num_experts: int = 512
    num_experts_per_tok: int = 10
    moe_intermediate_size: int = 512
    norm_topk_prob: bool = True
    shared_expert_intermediate_size: int = 512

    expert_names = Qwen35MoeConfig.expert_names
    gates_shared = True

    @property
    def shared_size(self) -> int:
        return self.shared_expert_intermediate_size

    def validate(self) -> None:
        super().validate()
        check_integer("shared_expert_intermediate_size", self.shared_expert_intermediate_size, low=1)
