"""The model of DeepSeek V2 and V3. Their configurations are in `latent.py`."""

from infinilm.layers.formats import LayerOptions
from infinilm.layers.latent_attention import LatentAttention
from infinilm.layers.mixer import Mixer
from infinilm.models.causal_lm import Glm4MoeForCausalLM
from infinilm.models.latent import DeepseekV3Config


class DeepseekForCausalLM(Glm4MoeForCausalLM):
    config: DeepseekV3Config

    def token_mixer(self, layer: int, options: LayerOptions) -> Mixer:
        config = self.config
        assert config.attention_scale is not None
        return LatentAttention(
            layer,
            config.hidden_size,
            num_heads=config.num_attention_heads,
            rank=config.kv_lora_rank,
            query_rank=config.q_lora_rank,
            plain_dim=config.qk_nope_head_dim,
            value_dim=config.v_head_dim,
            rotary=self.rotaries[layer],
            scale=config.attention_scale,
            bias=config.attention_bias,
            norm_eps=config.latent_eps,
            **options,
        )
