"""Gemma 3: four norms per layer around Llama's mixers, sliding and full layers with a rotary embedding each."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infinilm.checks import check_integer, check_real
from infinilm.layers.norm import ZeroCentredRMSNorm
from infinilm.models.config import FULL_ATTENTION, SLIDING_ATTENTION
from infinilm.models.decoder import LayerNorms
from infinilm.models.dense import CausalLM, LlamaConfig
from infinilm.models.rope_parameters import read_rope_parameters


@dataclass(init=False, frozen=True)
class Gemma3Config(LlamaConfig):
    """Gemma 3's text model. `rope_parameters` are by layer type."""

    model_type: str = "gemma3_text"
    vocab_size: int = 262_208
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    max_position_embeddings: int = 131_072
    pad_token_id: int | None = 0
    bos_token_id: int | list[int] | None = 2
    eos_token_id: int | list[int] | None = 1
    tie_word_embeddings: bool = True
    sliding_window: int | None = 4096
    hidden_activation: str = "gelu_pytorch_tanh"
    rope_local_base_freq: float | None = None
    """The base of the rotary embedding in sliding layers, as older files name it."""
    query_pre_attn_scalar: float = 256
    """Attention scores are divided by its square root."""
    final_logit_softcapping: float | None = None
    qk_norm: bool = True

    default_theta = 1_000_000.0
    local_theta = 10_000.0
    window_settings = {"sliding_window": 4096, "sliding_window_pattern": 6}  # noqa: RUF012
    ignored_settings = frozenset({"hidden_act", "mlp_bias"})

    @classmethod
    def read_rope(cls, settings: Mapping[str, Any], max_position_embeddings: int) -> dict[str, Any]:
        given = settings.get("rope_parameters") or {}
        full = {**(settings.get("rope_scaling") or {}), **(given.get(FULL_ATTENTION) or {})}
        sliding = dict(given.get(SLIDING_ATTENTION) or {})
        thetas = {FULL_ATTENTION: settings.get("rope_theta"), SLIDING_ATTENTION: settings.get("rope_local_base_freq")}
        defaults = {FULL_ATTENTION: cls.default_theta, SLIDING_ATTENTION: cls.local_theta}
        return {
            kind: read_rope_parameters(
                {"rope_parameters": rope, "rope_theta": thetas[kind]}, max_position_embeddings, defaults[kind]
            )
            for kind, rope in ((FULL_ATTENTION, full), (SLIDING_ATTENTION, sliding))
        }

    @staticmethod
    def _read_windows(settings: Mapping[str, Any]) -> dict[str, Any]:
        every, count = settings["sliding_window_pattern"], settings["num_hidden_layers"]
        check_integer("sliding_window_pattern", every, low=1)
        types = [FULL_ATTENTION if (layer + 1) % every == 0 else SLIDING_ATTENTION for layer in range(count)]
        return {"sliding_window": settings["sliding_window"], "layer_types": settings.get("layer_types") or types}

    def validate(self) -> None:
        super().validate()
        check_real("query_pre_attn_scalar", self.query_pre_attn_scalar, low=0.0, high=1e9, above_low=True)
        if self.final_logit_softcapping is not None:
            check_real("final_logit_softcapping", self.final_logit_softcapping, low=0.0, high=1e9, above_low=True)

    def rope(self, layer: int) -> Mapping[str, Any]:
        rope: Mapping[str, Any] = self.rope_parameters[
            FULL_ATTENTION if self.window(layer) is None else SLIDING_ATTENTION
        ]
        return rope

    @property
    def main_rope(self) -> Mapping[str, Any]:
        rope: Mapping[str, Any] = self.rope_parameters[FULL_ATTENTION]
        return rope

    @property
    def activation(self) -> str:
        return self.hidden_activation

    @property
    def embedding_scale(self) -> float:
        return math.sqrt(self.hidden_size)

    @property
    def attention_scale(self) -> float | None:
        return 1 / math.sqrt(self.query_pre_attn_scalar)

    @property
    def logit_cap(self) -> float | None:
        return self.final_logit_softcapping


class Gemma3ForCausalLM(CausalLM):
    norms = LayerNorms(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    )
    norm_class = ZeroCentredRMSNorm
