"""Tiny random checkpoints of every architecture, made by transformers, which is also the reference."""

from pathlib import Path
from typing import Any

import torch
import transformers
from narrow import dense
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from infinilm.distributed.group import SINGLE, CommunicationGroup
from infinilm.loading.parts import find_parts
from infinilm.models import CausalLM, LlamaConfig
from infinilm.models.registry import create_model

SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}

GEMMA4: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 20,
    "hidden_size_per_layer_input": 32,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
GEMMA4_MOE = {
    **GEMMA4,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 64,
}
YARN = {"rope_type": "yarn", "truncate": False}
GPT_OSS = {"num_local_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 64}

LINEAR = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 24}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("Llama", {}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 24}),
    "mistral-full": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral-tied": ("Mistral", {"sliding_window": 24, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-mha": ("Qwen3", {"head_dim": 16, "num_key_value_heads": 4}),
    "qwen3-bias": (
        "Qwen3",
        {
            "head_dim": 32,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 1,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 32,
            "sliding_window": 20,
            "num_hidden_layers": 3,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 3.0,
        },
    ),
    "glm4-moe": (
        "Glm4Moe",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "num_hidden_layers": 3,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
            "use_qk_norm": True,
            "head_dim": 32,
        },
    ),
    "glm4-moe-plain": (
        "Glm4Moe",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    "glm4-moe-mqa": (
        "Glm4Moe",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 0.5,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            **GPT_OSS,
            "num_hidden_layers": 3,
            "sliding_window": 20,
            "head_dim": 32,
            "swiglu_limit": 0.6,
            "rope_parameters": {**YARN, "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64},
        },
    ),
    "gpt-oss-full": (
        "GptOss",
        {
            **GPT_OSS,
            "num_experts_per_tok": 4,
            "head_dim": 16,
            "layer_types": ["full_attention"] * 2,
            "attention_bias": False,
            "swiglu_alpha": 1.0,
        },
    ),
    "gpt-oss-tied": ("GptOss", {**GPT_OSS, "num_key_value_heads": 1, "tie_word_embeddings": True, "head_dim": 32}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 24}),
    "mixtral-tied": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 3, "tie_word_embeddings": True}),
    "mixtral-mqa": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 4, "num_key_value_heads": 1}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True, "head_dim": 32}),
    "qwen3-moe-mha": ("Qwen3Moe", {**EXPERTS, "num_key_value_heads": 4, "mlp_only_layers": [0]}),
    "qwen3-moe-mixed": (  # layers 1 and 5 are sparse
        "Qwen3Moe",
        {
            **EXPERTS,
            "num_hidden_layers": 6,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [0, 3],
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 20,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3-plain": ("Gemma3", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 20}),
    "gemma3-bias": (
        "Gemma3",
        {
            "head_dim": 32,
            "sliding_window": 20,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "num_key_value_heads": 4,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "gemma4": (
        "Gemma4",
        {**GEMMA4, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "gemma4-shared": (
        "Gemma4",
        {
            **GEMMA4,
            "num_hidden_layers": 5,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 3.0,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "layer_types": [
                *("sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"),
            ],
        },
    ),
    "gemma4-plain": ("Gemma4", {**GEMMA4, "hidden_size_per_layer_input": 0, "global_head_dim": 16, "head_dim": 16}),
    "gemma4-moe": (
        "Gemma4",
        {
            **GEMMA4_MOE,
            "num_hidden_layers": 3,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 3.0,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
    ),
    "gemma4-moe-shared": (
        "Gemma4",
        {
            **GEMMA4_MOE,
            "num_experts": 4,
            "num_hidden_layers": 3,
            "num_kv_shared_layers": 1,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 32,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
    ),
    "gemma4-moe-plain": ("Gemma4", {**GEMMA4_MOE, "top_k_experts": 5, "moe_intermediate_size": 32}),
    "gemma2": ("Gemma2", {"head_dim": 32, "sliding_window": 20, "num_hidden_layers": 3, "query_pre_attn_scalar": 24}),
    "gemma2-capped": (
        "Gemma2",
        {
            "sliding_window": 20,
            "layer_types": ["full_attention", "sliding_attention"],
            "head_dim": 32,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 4,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma2-mha": (
        "Gemma2",
        {"num_key_value_heads": 4, "attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 16},
    ),
    "glm4": ("Glm4", {"head_dim": 32, "eos_token_id": 2}),
    "glm4-whole": (
        "Glm4",
        {
            "head_dim": 16,
            "eos_token_id": 2,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
        },
    ),
    "glm4-mqa": ("Glm4", {"head_dim": 32, "eos_token_id": 2, "num_key_value_heads": 1, "num_hidden_layers": 3}),
    "ministral": (
        "Ministral",
        {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 32},
    ),
    "ministral-mha": ("Ministral", {"head_dim": 16, "sliding_window": 20, "num_key_value_heads": 4}),
    "ministral-full": (
        "Ministral",
        {"head_dim": 16, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": True},
    ),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "ministral3-window": (
        "Ministral3",
        {
            "head_dim": 32,
            "sliding_window": 24,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500.0,
                "original_max_position_embeddings": 30,
                "llama_4_scaling_beta": 0.2,
            },
        },
    ),
    "ministral3-defaults": ("Ministral3", {"head_dim": 16}),
    "olmo3": ("Olmo3", {"num_hidden_layers": 4, "sliding_window": 20}),
    "olmo3-yarn": (
        "Olmo3",
        {
            "sliding_window": 20,
            "attention_bias": True,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "olmo3-mha": ("Olmo3", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "phi3": ("Phi3", {"eos_token_id": 2}),
    "phi3-longrope": (
        "Phi3",
        {
            "eos_token_id": 2,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "original_max_position_embeddings": 64,
                "short_factor": [1.0 + 0.1 * i for i in range(6)],
                "long_factor": [1.0 + 0.7 * i for i in range(6)],
            },
        },
    ),
    "phi3-window": (
        "Phi3",
        {
            "eos_token_id": 2,
            "sliding_window": 24,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {
            **LATENT,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.5,
        },
    ),
    "deepseek-v2-plain": (
        "DeepseekV2",
        {
            **LATENT,
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek-v2-bias": (
        "DeepseekV2",
        {
            **LATENT,
            "num_key_value_heads": 4,
            "attention_bias": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **LATENT,
            "num_key_value_heads": 4,
            "num_hidden_layers": 3,
            "attention_bias": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 2,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
                "beta_fast": 32,
                "beta_slow": 1,
            },
        },
    ),
    "deepseek-v3-halves": (
        "DeepseekV3",
        {
            **LATENT,
            "num_key_value_heads": 4,
            "rope_interleave": False,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 0.5,
        },
    ),
    "deepseek-v3-tied": (
        "DeepseekV3",
        {
            **LATENT,
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "tie_word_embeddings": True,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "qwen3.5": (
        "Qwen3_5",
        {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "head_dim": 32,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    ),
    "qwen3.5-tied": (
        "Qwen3_5",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_conv_kernel_dim": 2,
        },
    ),
    "qwen3.5-bias": (
        "Qwen3_5",
        {
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "linear_attention"],
            "head_dim": 32,
            "attention_bias": True,
            "num_key_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        {
            **EXPERTS,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "head_dim": 32,
            "shared_expert_intermediate_size": 96,
            **LINEAR,
        },
    ),
    "qwen3.5-moe-tied": (
        "Qwen3_5Moe",
        {
            **EXPERTS,
            "layer_types": ["linear_attention", "full_attention"],
            "num_experts_per_tok": 5,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "shared_expert_intermediate_size": 32,
            **LINEAR,
            "linear_num_key_heads": 4,
            "linear_conv_kernel_dim": 2,
        },
    ),
    "qwen3.5-moe-bias": (
        "Qwen3_5Moe",
        {
            **EXPERTS,
            "layer_types": ["full_attention", "linear_attention"],
            "head_dim": 32,
            "attention_bias": True,
            "num_experts": 5,
            "shared_expert_intermediate_size": 64,
            **LINEAR,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3-next": (
        "Qwen3Next",
        {
            **EXPERTS,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_hidden_layers": 3,
            "head_dim": 32,
            "shared_expert_intermediate_size": 96,
            "mlp_only_layers": [0],
            **LINEAR,
        },
    ),
    "qwen3-next-plain": (
        "Qwen3Next",
        {
            **EXPERTS,
            "layer_types": ["linear_attention", "full_attention"],
            "norm_topk_prob": False,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "shared_expert_intermediate_size": 32,
            **LINEAR,
            "linear_num_key_heads": 4,
        },
    ),
    "qwen3-next-bias": (
        "Qwen3Next",
        {
            **EXPERTS,
            "layer_types": ["full_attention", "linear_attention"],
            "decoder_sparse_step": 2,
            "head_dim": 32,
            "attention_bias": True,
            "shared_expert_intermediate_size": 64,
            **LINEAR,
            "linear_num_value_heads": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.6,
            "logits_scaling": 2.0,
            "attention_bias": True,
        },
    ),
    "granite-plain": ("Granite", {"attention_multiplier": 0.3}),
    "granite-tied": ("Granite", {"attention_multiplier": 0.2, "tie_word_embeddings": True, "mlp_bias": True}),
    "olmo2": ("Olmo2", {}),
    "olmo2-bias": ("Olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
    "olmo2-tied": ("Olmo2", {"tie_word_embeddings": True, "num_key_value_heads": 1, "rope_theta": 500.0}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]}),
    "smollm3-plain": ("SmolLM3", {"num_hidden_layers": 4}),
    "smollm3-bias": (
        "SmolLM3",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False, "no_rope_layers": [0, 1]},
    ),
}
"""Name → transformers' class prefix and the settings that differ from `SIZES`."""


def make_reference(kind: str, **settings: Any) -> PreTrainedModel:
    """A model of transformers with random weights, large enough that logits are of order 1 and tell tokens apart."""
    prefix, own = ARCHITECTURES[kind]
    text = "Text" if prefix in ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe") else ""
    is_zero_centred = prefix in (
        "Gemma2",
        "Gemma3",
        "Qwen3_5",
        "Qwen3_5Moe",
        "Qwen3Next",
    )  # these add 1 to norms themselves
    settings = {**SIZES, **own, **settings}
    if prefix == "Gemma4":
        settings["vocab_size_per_layer_input"] = settings["vocab_size"]
    config = getattr(transformers, f"{prefix}{text}Config")(**settings)
    config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(7)
    model: PreTrainedModel = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                weight.copy_((not is_zero_centred) + 0.2 * noise)
                if prefix == "Gemma4" and "q_norm" in name:  # its attention has no scale of its own
                    weight.mul_(len(weight) ** -0.5)
            elif name.endswith("bias"):
                weight.copy_(0.3 * noise)
            elif name.endswith(("router.scale", "per_expert_scale")):
                weight.copy_((len(weight) ** 0.5 if name.endswith("router.scale") else 1) * (1 + 0.2 * noise))
            else:
                weight.copy_(noise * weight.shape[-1] ** -0.5)
            if name.endswith("sinks"):
                weight.copy_(noise)
            if name.endswith(("mlp.gate.weight", "mlp.router.weight", "router.proj.weight")) and prefix not in (
                "Glm4Moe",
                "DeepseekV3",
            ):
                weight.mul_(3)  # the last experts of a token count little, so that rounding may choose others
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("layer_scalar"):
                buffer.copy_(0.8 + 0.2 * torch.rand(1, generator=generator))
    return model


def save(model: PreTrainedModel, directory: Path) -> Path:
    """Write config.json and safetensors, as transformers does."""
    model.save_pretrained(directory)
    return directory


def load(
    reference: PreTrainedModel,
    *,
    max_len: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    group: CommunicationGroup = SINGLE,
) -> CausalLM:
    """Our model, or the share of a group's rank, with the reference's configuration and weights."""
    config = LlamaConfig.from_dict(reference.config.to_dict())
    model = create_model(config, max_len=max_len, dtype=dtype, device=device, group=group)
    assert isinstance(model, CausalLM)
    state = revert_weight_conversion(reference, reference.state_dict())  # with the names of files
    parts = find_parts({name: tuple(tensor.shape) for name, tensor in state.items()}, reference.config.to_dict())
    for name, shard in model.weight_targets().items():
        dense(shard).tensor.copy_(dense(shard).cut(parts[name].cut(state[parts[name].source])))
    return model


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """What transformers computes in one pass: `[tokens, vocab]` float32."""
    return model(torch.tensor([tokens])).logits[0].float()
