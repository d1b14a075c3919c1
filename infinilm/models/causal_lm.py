"""The models of Llama and its relatives, including those with experts. Their configurations are in other files."""

from typing import Any, ClassVar, Unpack

import torch

from infinilm.layers.attention import Attention
from infinilm.layers.formats import LayerOptions
from infinilm.layers.mixer import Mixer
from infinilm.layers.mlp import MLP
from infinilm.layers.moe import SparseMLP
from infinilm.layers.names import ExpertNames
from infinilm.layers.norm import RMSNorm, ZeroCentredRMSNorm
from infinilm.layers.rotary_embedding import RotaryEmbedding
from infinilm.models.decoder import Decoder
from infinilm.models.dense import LlamaConfig
from infinilm.models.gemma import Gemma2Config
from infinilm.models.relatives import Glm4Config, Olmo2Config
from infinilm.models.sparse import Glm4MoeConfig, GptOssConfig, MixtralConfig, SparseConfig


class CausalLM(Decoder):
    """The model of Llama-like families, and the base class of the others in this file."""

    config: LlamaConfig
    norms_all_heads: ClassVar[bool] = False
    """Whether a query or key norm normalises all heads as one vector."""

    def token_mixer(self, layer: int, options: LayerOptions) -> Mixer:
        norms: dict[str, Any] = {"norm_class": self.norm_class, "norms_all_heads": self.norms_all_heads}
        return build_attention(self.config, layer, self.rotaries[layer], **norms, **options)

    def channel_mixer(self, layer: int, options: LayerOptions) -> Mixer:
        return build_mlp(self.config, layer, **options)


def build_attention(
    config: LlamaConfig,
    layer: int,
    rotary: RotaryEmbedding,
    prefix: str = "self_attn.",
    *,
    norm_class: type[RMSNorm] = RMSNorm,
    norms_all_heads: bool = False,
    has_gate: bool = False,
    **options: Unpack[LayerOptions],
) -> Attention:
    return Attention(
        layer,
        config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rotary=rotary,
        window=config.window(layer),
        scale=config.attention_scale,
        cap=config.attention_cap,
        has_sinks=config.has_sinks,
        qkv_bias=config.attention_bias or config.qkv_bias,
        out_bias=config.out_bias,
        qk_norm_eps=config.rms_norm_eps if config.qk_norm else None,
        norm_class=norm_class,
        norms_all_heads=norms_all_heads,
        has_gate=has_gate,
        prefix=prefix,
        **options,
    )


def build_mlp(config: LlamaConfig, layer: int, prefix: str = "mlp.", **options: Unpack[LayerOptions]) -> MLP:
    sizes = (config.hidden_size, config.intermediate_size)
    return MLP(layer, *sizes, bias=config.mlp_bias, activation=config.activation, prefix=prefix, **options)


class GemmaForCausalLM(CausalLM):
    norms = Gemma2Config.norms
    norm_class: ClassVar[type[RMSNorm]] = ZeroCentredRMSNorm


class Glm4ForCausalLM(CausalLM):
    norms = Glm4Config.norms


class Olmo2ForCausalLM(CausalLM):
    norms = Olmo2Config.norms
    norms_all_heads: ClassVar[bool] = Olmo2Config.norms_all_heads


class SparseCausalLM(CausalLM):
    """A decoder with experts in the layers that its configuration names."""

    config: SparseConfig
    expert_names: ClassVar[ExpertNames] = ExpertNames()

    def channel_mixer(self, layer: int, options: LayerOptions) -> Mixer:
        config = self.config
        if not config.is_sparse(layer):
            return super().channel_mixer(layer, options)
        sizes = (config.hidden_size, config.expert_size)
        return SparseMLP(layer, *sizes, config.routing, self.expert_names, **self.expert_options(), **options)

    def expert_options(self) -> dict[str, Any]:
        """The family's options of `SparseMLP`."""
        return {}


class MixtralForCausalLM(SparseCausalLM):
    expert_names = MixtralConfig.expert_names


class Glm4MoeForCausalLM(SparseCausalLM):
    config: Glm4MoeConfig

    def expert_options(self) -> dict[str, Any]:
        biases = {"has_router_bias": self.config.has_router_bias}
        return {"router_dtype": torch.float32, "shared_size": self.config.shared_size, **biases}


class GptOssForCausalLM(SparseCausalLM):
    config: GptOssConfig
    expert_names = GptOssConfig.expert_names

    def expert_options(self) -> dict[str, Any]:
        return {"adds_router_bias": self.config.adds_router_bias, "gate": self.config.expert_gate}
