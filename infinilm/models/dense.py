"""Llama, Mistral, Ministral 3, Qwen2 and Qwen3: attention, full or sliding, and a gated MLP in every layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from infinilm.checks import check_choice, check_flag
from infinilm.errors import InvalidValueError
from infinilm.layers.names import ACTIVATION_NAMES, PRE_NORMS, LayerNorms
from infinilm.models.config import ModelConfig


@dataclass(init=False, frozen=True)
class LlamaConfig(ModelConfig):
    """Hugging Face's configuration of Llama, plus flags for the differences of its relatives."""

    model_type: str = "llama"
    bos_token_id: int | list[int] | None = 1
    eos_token_id: int | list[int] | None = 2
    hidden_act: str = "silu"
    attention_bias: bool = False
    """Whether the q, k, v and o projections have biases."""
    qkv_bias: bool = False
    """Whether only the q, k and v projections have biases."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether the query and key of each head are normalised."""

    norms: ClassVar[LayerNorms] = PRE_NORMS
    has_zero_centred_norms: ClassVar[bool] = False
    """Whether norms multiply by 1 + weight."""
    norms_all_heads: ClassVar[bool] = False
    """Whether a query or key norm normalises all heads as one vector."""
    norms_values: ClassVar[bool] = False
    """Whether the values of each head are also normalised, by a norm without weights."""

    has_gates: ClassVar[bool] = False
    """Whether each query has a gate. Its attention result is multiplied by the gate's sigmoid."""

    @property
    def activation(self) -> str:
        """The activation function of the MLP."""
        return self.hidden_act

    @property
    def has_sinks(self) -> bool:
        """Whether each head of attention has a sink."""
        return False

    @property
    def out_bias(self) -> bool:
        """Whether the o projection has a bias."""
        return self.attention_bias

    def projections(self, layer: int) -> tuple[str, ...]:  # noqa: ARG002 - a family's layers may differ
        """A layer's attention projections. Without `v_proj` the keys are also the values; with only `q_proj`, keys and
        values are another layer's."""
        return ("q_proj", "k_proj", "v_proj")

    def mlp_size(self, layer: int) -> int:  # noqa: ARG002 - a family's layers may differ
        """The intermediate size of a layer's MLP."""
        return self.intermediate_size

    def validate(self) -> None:
        super().validate()
        check_choice("hidden_act", self.activation, ACTIVATION_NAMES)
        for name in ("attention_bias", "qkv_bias", "mlp_bias", "qk_norm"):
            check_flag(name, getattr(self, name))
            if getattr(self, name) and name in self._family.config.ignored_settings:
                raise InvalidValueError(f"{name}=True is not a setting of {self.model_type} models; leave it out")


@dataclass(init=False, frozen=True)
class MistralConfig(LlamaConfig):
    """Llama with a sliding window in all layers."""

    model_type: str = "mistral"
    intermediate_size: int = 14336
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096

    window_settings = {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 4096}  # noqa: RUF012
    ignored_settings = frozenset({"attention_bias", "mlp_bias"})


@dataclass(init=False, frozen=True)
class Ministral3Config(LlamaConfig):
    """Llama with queries that are scaled depending on their positions."""

    model_type: str = "ministral3"
    vocab_size: int = 131072
    intermediate_size: int = 14336
    num_hidden_layers: int = 34
    num_key_value_heads: int = 8
    head_dim: int = 128
    max_position_embeddings: int = 262144
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 11

    window_settings = {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None}  # noqa: RUF012
    ignored_settings = frozenset({"attention_bias", "mlp_bias"})

    @classmethod
    def read_rope(cls, settings: Mapping[str, Any], max_position_embeddings: int) -> dict[str, Any]:
        if not (settings.get("rope_parameters") or settings.get("rope_scaling")):
            yarn = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384}
            factors = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
            settings = {**settings, "rope_parameters": {"rope_theta": 1e6, **yarn, **factors}}
        return super().read_rope(settings, max_position_embeddings)


@dataclass(init=False, frozen=True)
class Qwen2Config(LlamaConfig):
    """Llama with biases in the q, k and v projections."""

    model_type: str = "qwen2"
    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int = 32
    max_position_embeddings: int = 32768
    bos_token_id: int | list[int] | None = None
    eos_token_id: int | list[int] | None = None
    qkv_bias: bool = True

    window_settings = {"use_sliding_window": False, "max_window_layers": 28, "sliding_window": 4096}  # noqa: RUF012
    ignored_settings = frozenset({"attention_bias", "mlp_bias"})


@dataclass(init=False, frozen=True)
class Qwen3Config(Qwen2Config):
    """Llama with normalised query and key heads."""

    model_type: str = "qwen3"
    head_dim: int = 128
    qkv_bias: bool = False
    qk_norm: bool = True

    ignored_settings = frozenset({"mlp_bias"})
