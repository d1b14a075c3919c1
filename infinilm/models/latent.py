"""DeepSeek V2 and V3: latent attention, and experts, some of them shared by all tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from infinilm.cache.specs import CacheSpec, LatentSpec
from infinilm.checks import check_choice, check_integer
from infinilm.kernels.routing import Routing
from infinilm.layers.rotary_tables import yarn_scale
from infinilm.models.sparse import Glm4MoeConfig, SparseConfig


@dataclass(init=False, frozen=True)
class DeepseekV3Config(Glm4MoeConfig):
    """GLM-4-MoE's experts with latent attention. `head_dim` is the size of the rotated part of a head."""

    model_type: str = "deepseek_v3"
    vocab_size: int = 129_280
    hidden_size: int = 7168
    intermediate_size: int = 18432
    num_hidden_layers: int = 61
    num_attention_heads: int = 128
    num_key_value_heads: int = 128
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    bos_token_id: int | list[int] | None = 0
    eos_token_id: int | list[int] | None = 1
    num_experts: int = 256
    moe_intermediate_size: int = 2048
    n_group: int = 8
    topk_group: int = 4
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int = 3
    kv_lora_rank: int = 512
    q_lora_rank: int | None = 1536
    """None: queries are made directly from the hidden state."""
    qk_rope_head_dim: int = 64
    qk_nope_head_dim: int = 128
    v_head_dim: int = 128
    rope_interleave: bool = True

    latent_eps: ClassVar[float] = 1e-6
    """The epsilon of the norms of latent vectors."""

    rotates_partially = False
    aliases = {**SparseConfig.aliases, "n_routed_experts": "num_experts"}  # noqa: RUF012
    ignored_settings = frozenset({"mlp_bias", "qk_norm", "qkv_bias"})

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "head_dim": settings.get("qk_rope_head_dim", type(self).qk_rope_head_dim)})

    @classmethod
    def read_rope(cls, settings: Mapping[str, Any], max_position_embeddings: int) -> dict[str, Any]:
        rope = super(Glm4MoeConfig, cls).read_rope(settings, max_position_embeddings)
        return rope | {"interleaved": settings.get("rope_interleave", True)}

    def validate(self) -> None:
        for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"):
            check_integer(name, getattr(self, name), low=1)
        if self.q_lora_rank is not None:
            check_integer("q_lora_rank", self.q_lora_rank, low=1)
        super().validate()

    @property
    def attention_scale(self) -> float | None:
        scale: float = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        weight = self.rope_parameters.get("mscale_all_dim")
        if self.rope_parameters["rope_type"] == "default" or not weight:
            return scale
        sharpness: float = yarn_scale(self.rope_parameters["factor"], weight) ** 2
        return scale * sharpness

    @property
    def max_head_dim(self) -> int:
        """The size of queries when they attend to latent vectors."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        return (LatentSpec(self.kv_lora_rank, self.qk_rope_head_dim),) * self.num_hidden_layers


@dataclass(init=False, frozen=True)
class DeepseekV2Config(DeepseekV3Config):
    """DeepSeek V3 with a softmax router, which may choose experts from only some groups."""

    model_type: str = "deepseek_v2"
    vocab_size: int = 102_400
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    max_position_embeddings: int = 2048
    bos_token_id: int | list[int] | None = 1
    eos_token_id: int | list[int] | None = 2
    num_experts: int = 64
    moe_intermediate_size: int = 1407
    n_shared_experts: int = 2
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 0
    norm_topk_prob: bool = False
    topk_method: str = "greedy"

    has_router_bias = False

    @property
    def routing(self) -> Routing:
        is_limited = self.topk_method == "group_limited_greedy"
        return Routing(
            self.num_experts,
            self.num_experts_per_tok,
            renormalizes=False,
            num_groups=self.n_group if is_limited else 1,
            top_groups=self.topk_group if is_limited else 1,
            group_best=1,
            scale=self.routed_scaling_factor,
        )

    def validate(self) -> None:
        check_choice("topk_method", self.topk_method, ("greedy", "group_limited_greedy"))
        super().validate()
