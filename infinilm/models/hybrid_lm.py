"""The models of Qwen3.5, dense or with experts, and Qwen3-Next. Their configurations are in `hybrid.py`."""

from typing import Any

from infinilm.layers.delta_net import GatedDeltaNet
from infinilm.layers.formats import LayerOptions
from infinilm.layers.mixer import Mixer
from infinilm.layers.norm import ZeroCentredRMSNorm
from infinilm.models.causal_lm import CausalLM, SparseCausalLM, build_attention
from infinilm.models.hybrid import Qwen3NextConfig, Qwen35Config, Qwen35MoeConfig


class Qwen35ForCausalLM(CausalLM):
    norm_class = ZeroCentredRMSNorm
    config: Qwen35Config

    def token_mixer(self, layer: int, options: LayerOptions) -> Mixer:
        config = self.config
        if not config.is_recurrent(layer):
            return build_attention(
                config, layer, self.rotaries[layer], norm_class=self.norm_class, has_gate=config.has_gates, **options
            )
        return GatedDeltaNet(
            layer,
            config.hidden_size,
            num_key_heads=config.linear_num_key_heads,
            num_value_heads=config.linear_num_value_heads,
            key_dim=config.linear_key_head_dim,
            value_dim=config.linear_value_head_dim,
            conv_width=config.linear_conv_kernel_dim,
            norm_eps=config.rms_norm_eps,
            **options,
        )


class Qwen35MoeForCausalLM(Qwen35ForCausalLM, SparseCausalLM):
    config: Qwen35MoeConfig | Qwen3NextConfig
    expert_names = Qwen35MoeConfig.expert_names

    def expert_options(self) -> dict[str, Any]:
        return {"shared_size": self.config.shared_size, "gates_shared": self.config.gates_shared}
