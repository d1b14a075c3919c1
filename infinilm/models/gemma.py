"""Gemma 2 and 3: four norms per layer around Llama's mixers, sliding and full layers, caps of scores and logits."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infinilm.checks import check_integer, check_real
from infinilm.errors import InvalidValueError
from infinilm.layers.names import LayerNorms
from infinilm.models.config import FULL_ATTENTION, SLIDING_ATTENTION
from infinilm.models.dense import LlamaConfig


@dataclass(init=False, frozen=True)
class Gemma2Config(LlamaConfig):
    """Llama with soft caps, scaled embeddings and a window in every other layer."""

    model_type: str = "gemma2"
    vocab_size: int = 256_000
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    max_position_embeddings: int = 8192
    pad_token_id: int | None = 0
    bos_token_id: int | list[int] | None = 2
    eos_token_id: int | list[int] | None = 1
    tie_word_embeddings: bool = True
    sliding_window: int | None = 4096
    hidden_activation: str = "gelu_pytorch_tanh"
    query_pre_attn_scalar: float = 256
    """Attention scores are divided by the square root of this number."""
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0
    use_bidirectional_attention: bool | str | None = None
    """Whether tokens see later tokens, as in embedding models. Not supported."""

    window_settings = {"sliding_window": 4096, "sliding_window_pattern": 2}  # noqa: RUF012
    ignored_settings = frozenset({"hidden_act", "mlp_bias"})
    norms = LayerNorms(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    )
    has_zero_centred_norms = True
    exceeds_float16 = True

    @staticmethod
    def _read_windows(settings: Mapping[str, Any]) -> dict[str, Any]:
        every, count = settings["sliding_window_pattern"], settings["num_hidden_layers"]
        check_integer("sliding_window_pattern", every, low=1)
        types = [FULL_ATTENTION if (layer + 1) % every == 0 else SLIDING_ATTENTION for layer in range(count)]
        return {"sliding_window": settings["sliding_window"], "layer_types": settings.get("layer_types") or types}

    def validate(self) -> None:
        super().validate()
        check_real("query_pre_attn_scalar", self.query_pre_attn_scalar, low=0.0, high=1e9, above_low=True)
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if getattr(self, name) is not None:
                check_real(name, getattr(self, name), low=0.0, high=1e9, above_low=True)
        if self.use_bidirectional_attention not in (None, False, "vision"):  # "vision" only affects images
            raise InvalidValueError(
                f"use_bidirectional_attention={self.use_bidirectional_attention!r} is not supported: it is for "
                "embeddings of texts, and the engine generates text; use a checkpoint without it"
            )

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
    def attention_cap(self) -> float | None:
        return self.attn_logit_softcapping

    @property
    def logit_cap(self) -> float | None:
        return self.final_logit_softcapping


@dataclass(init=False, frozen=True)
class Gemma3Config(Gemma2Config):
    """Gemma 3's text model: normalised queries and keys, five sliding layers per full layer, no caps."""

    model_type: str = "gemma3_text"
    vocab_size: int = 262_208
    max_position_embeddings: int = 131_072
    rope_local_base_freq: float | None = None
    """Older files' name for the theta of the rotary embedding in sliding layers."""
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    qk_norm: bool = True

    default_theta = 1_000_000.0
    sliding_theta = 10_000.0
    window_settings = {"sliding_window": 4096, "sliding_window_pattern": 6}  # noqa: RUF012
