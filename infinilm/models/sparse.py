"""Qwen3-MoE, Mixtral, GLM-4-MoE and GPT-OSS: experts replace the MLP in some or all layers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from infinilm.checks import check_choice, check_flag, check_integer, check_real
from infinilm.errors import InvalidValueError
from infinilm.kernels.routing import ClampedGate, Gate, Routing
from infinilm.layers.names import ExpertNames
from infinilm.loading.parts import MAX_EXPERTS
from infinilm.models.config import FULL_ATTENTION, MAX_LAYERS, SLIDING_ATTENTION, ModelConfig
from infinilm.models.dense import LlamaConfig


@dataclass(init=False, frozen=True)
class SparseConfig(LlamaConfig):
    """The base configuration of mixtures of experts. Families override its properties to interpret their settings."""

    num_experts: int = 8
    num_experts_per_tok: int = 2

    aliases = {**ModelConfig.aliases, "num_local_experts": "num_experts"}  # noqa: RUF012
    ignored_settings = frozenset({"mlp_bias"})
    expert_names: ClassVar[ExpertNames] = ExpertNames()
    has_router_bias: ClassVar[bool] = False
    """Whether a bias is added to the scores that choose experts."""
    adds_router_bias: ClassVar[bool] = False
    """Whether a bias is added to the router's logits."""

    gates_shared: ClassVar[bool] = False
    """Whether the shared experts' result is multiplied by the sigmoid of one more projection."""

    @property
    def shared_size(self) -> int:
        """The total intermediate size of the shared experts, which compute every token."""
        return 0

    @property
    def expert_size(self) -> int:
        """The intermediate size of an expert."""
        return self.intermediate_size

    @property
    def routing(self) -> Routing:
        """How experts are chosen."""
        return Routing(self.num_experts, self.num_experts_per_tok, renormalizes=True)

    @property
    def expert_gate(self) -> Gate:
        """The activation of an expert's gate and up."""
        return None

    def is_sparse(self, layer: int) -> bool:  # noqa: ARG002 - a family's layers may differ
        """Whether a layer has experts."""
        return True

    def count_experts(self) -> dict[str, int] | None:
        num_layers = sum(map(self.is_sparse, range(self.num_hidden_layers)))
        numbers = {"count": self.num_experts, "per_token": self.num_experts_per_tok, "size": self.expert_size}
        return {**numbers, "layers": num_layers}

    def channel_width(self, num_ranks: int) -> int:
        # For each expert: input, intermediate tensors and output.
        of_experts = self.num_experts_per_tok * (2 * self.hidden_size + 3 * self.expert_size // num_ranks)
        return max(super().channel_width(num_ranks), of_experts)

    def validate(self) -> None:
        super().validate()
        check_integer("num_experts", self.num_experts, low=1, high=MAX_EXPERTS)
        check_integer("num_experts_per_tok", self.num_experts_per_tok, low=1, high=self.num_experts)
        check_integer("moe_intermediate_size", self.expert_size, low=1)
        check_choice("hidden_act", self.hidden_act, ("silu",))


@dataclass(init=False, frozen=True)
class MixtralConfig(SparseConfig):
    """Mistral with experts in all layers."""

    model_type: str = "mixtral"
    intermediate_size: int = 14336
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5

    default_theta = 1_000_000.0
    window_settings = {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None}  # noqa: RUF012
    ignored_settings = frozenset({"attention_bias", "mlp_bias"})
    expert_names = ExpertNames("block_sparse_moe.", "gate", "w1", "w3", "w2")


@dataclass(init=False, frozen=True)
class Qwen3MoeConfig(SparseConfig):
    """Qwen3 with experts in every `decoder_sparse_step`-th layer, except those in `mlp_only_layers`."""

    model_type: str = "qwen3_moe"
    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 24
    num_key_value_heads: int = 4
    max_position_embeddings: int = 32768
    bos_token_id: int | list[int] | None = None
    eos_token_id: int | list[int] | None = None
    qk_norm: bool = True
    num_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None

    window_settings = {"use_sliding_window": False, "max_window_layers": 0, "sliding_window": 4096}  # noqa: RUF012

    @staticmethod
    def _read_windows(settings: Mapping[str, Any]) -> dict[str, Any]:
        window = settings["sliding_window"] if settings["use_sliding_window"] else None
        return {"sliding_window": window, "layer_types": None}  # for all layers; max_window_layers is ignored

    @property
    def expert_size(self) -> int:
        return self.moe_intermediate_size

    @property
    def routing(self) -> Routing:
        return Routing(self.num_experts, self.num_experts_per_tok, self.norm_topk_prob)

    def is_sparse(self, layer: int) -> bool:
        return layer not in (self.mlp_only_layers or ()) and (layer + 1) % self.decoder_sparse_step == 0

    def validate(self) -> None:
        check_integer("decoder_sparse_step", self.decoder_sparse_step, low=1)
        check_flag("norm_topk_prob", self.norm_topk_prob)
        if not isinstance(self.mlp_only_layers, list | None):
            raise InvalidValueError(f"mlp_only_layers={self.mlp_only_layers!r} must be a list of layers, or None")
        for layer in self.mlp_only_layers or ():
            check_integer("mlp_only_layers", layer, low=0)
        super().validate()


@dataclass(init=False, frozen=True)
class Glm4MoeConfig(SparseConfig):
    """Llama with experts from layer `first_k_dense_replace` on, some of them shared by all tokens."""

    model_type: str = "glm4_moe"
    vocab_size: int = 151552
    intermediate_size: int = 10944
    num_hidden_layers: int = 46
    num_attention_heads: int = 96
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    bos_token_id: int | list[int] | None = None
    eos_token_id: int | list[int] | None = None
    num_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 1408
    norm_topk_prob: bool = True
    n_shared_experts: int = 1
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 1

    rotates_partially = True
    has_router_bias = True
    aliases = {  # noqa: RUF012
        **SparseConfig.aliases,
        "n_routed_experts": "num_experts",
        "use_qk_norm": "qk_norm",
        "attention_bias": "qkv_bias",  # the o projection has none
    }

    @classmethod
    def read_rope(cls, settings: Mapping[str, Any], max_position_embeddings: int) -> dict[str, Any]:
        return super().read_rope({"partial_rotary_factor": 0.5, **settings}, max_position_embeddings)

    @property
    def expert_size(self) -> int:
        return self.moe_intermediate_size

    @property
    def shared_size(self) -> int:
        return self.n_shared_experts * self.moe_intermediate_size

    def is_ignorable(self, name: str) -> bool:
        """See `ModelConfig`. Layers after `num_hidden_layers` predict tokens after the next one."""
        found = re.match(r"model\.layers\.(\d+)\.", name)
        return super().is_ignorable(name) or (found is not None and int(found[1]) >= self.num_hidden_layers)

    @property
    def routing(self) -> Routing:
        return Routing(
            self.num_experts,
            self.num_experts_per_tok,
            self.norm_topk_prob,
            is_sigmoid=True,
            num_groups=self.n_group,
            top_groups=self.topk_group,
            scale=self.routed_scaling_factor,
        )

    def is_sparse(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace

    def validate(self) -> None:
        super().validate()
        check_integer("n_shared_experts", self.n_shared_experts, low=0)
        check_integer("first_k_dense_replace", self.first_k_dense_replace, low=0)
        check_flag("norm_topk_prob", self.norm_topk_prob)
        check_real("routed_scaling_factor", self.routed_scaling_factor, low=0.0, high=1e6, above_low=True)
        check_integer("n_group", self.n_group, low=1)
        check_integer("topk_group", self.topk_group, low=1, high=self.n_group)
        group_size = self.num_experts // self.n_group
        fits = self.num_experts % self.n_group == 0 and group_size * self.topk_group >= self.num_experts_per_tok
        if not fits or (self.n_group > 1 and group_size < 2):
            raise InvalidValueError(
                f"n_group={self.n_group} must divide n_routed_experts={self.num_experts} into groups of 2 or more, and "
                f"topk_group={self.topk_group} of them must have num_experts_per_tok={self.num_experts_per_tok} experts"
            )


@dataclass(init=False, frozen=True)
class GptOssConfig(SparseConfig):
    """Llama with experts in all layers, biases, attention sinks, and a window in every other layer."""

    model_type: str = "gpt_oss"
    vocab_size: int = 201088
    hidden_size: int = 2880
    intermediate_size: int = 2880
    num_hidden_layers: int = 36
    num_attention_heads: int = 64
    num_key_value_heads: int = 8
    head_dim: int = 64
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    bos_token_id: int | list[int] | None = None
    eos_token_id: int | list[int] | None = None
    sliding_window: int | None = 128
    attention_bias: bool = True
    num_experts: int = 128
    num_experts_per_tok: int = 4
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    default_theta = 150_000.0
    window_settings = {"sliding_window": 128}  # noqa: RUF012
    readable_quantizations = frozenset({"mxfp4"})
    expert_names = ExpertNames(router="router", has_biases=True)
    adds_router_bias = True

    @classmethod
    def read_rope(cls, settings: Mapping[str, Any], max_position_embeddings: int) -> dict[str, Any]:
        if not (settings.get("rope_parameters") or settings.get("rope_scaling")):
            yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
            settings = {**settings, "rope_parameters": yarn}
        return super().read_rope(settings, max_position_embeddings)

    @staticmethod
    def _read_windows(settings: Mapping[str, Any]) -> dict[str, Any]:
        count = settings["num_hidden_layers"]
        check_integer("num_hidden_layers", count, low=1, high=MAX_LAYERS)
        types = [FULL_ATTENTION if layer % 2 else SLIDING_ATTENTION for layer in range(count)]
        return {"sliding_window": settings["sliding_window"], "layer_types": settings.get("layer_types") or types}

    @property
    def has_sinks(self) -> bool:
        return True

    @property
    def expert_gate(self) -> Gate:
        return ClampedGate(self.swiglu_alpha, self.swiglu_limit)

    def validate(self) -> None:
        super().validate()
        for name in ("swiglu_alpha", "swiglu_limit"):
            check_real(name, getattr(self, name), low=0.0, high=1e6, above_low=True)
