"""Models of transformers as GGUF files."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType, quantize
from narrow import present
from torch import Tensor
from transformers import PreTrainedModel

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate": "ffn_gate_exps",
    "mlp.experts.up": "ffn_up_exps",
    "mlp.experts.down": "ffn_down_exps",
}
"""Hugging Face's names of modules and GGUF's."""


_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OWN_NAMES: dict[str, dict[str, str]] = {
    "gemma2": _GEMMA_NORMS,
    "gemma3": _GEMMA_NORMS,
    "glm4": {
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm",
        "mlp.gate_up_proj": "ffn_up",
    },
    "olmo2": {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"},
    "phi3": {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
}
"""Where an architecture's names differ."""
PERMUTED = ("llama", "mistral3", "granite", "smollm3")
"""Architectures whose converter puts pairs of rotated rows side by side."""


def gguf_name(name: str, architecture: str = "llama") -> str:
    match = present(re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.+)\.(weight|bias)", name))
    layer, module, kind = match.groups()
    names = NAMES | OWN_NAMES.get(architecture, {})
    return f"{'' if layer is None else f'blk.{layer}.'}{names[module]}.{kind}"


def add_own_metadata(writer: GGUFWriter, config: Any, architecture: str, head_dim: int) -> None:
    """What llama.cpp's converter writes for an architecture besides what it writes for all."""
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if architecture in ("gemma2", "gemma3", "olmo2", "phi3") and hasattr(config, "sliding_window"):
        writer.add_sliding_window(config.sliding_window or 0)
    if architecture == "olmo2" and hasattr(config, "layer_types"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if architecture in ("glm4", "phi3"):
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "llama_4_scaling_beta" in rope:
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        stretch = config.max_position_embeddings / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(original)))
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], dtype=np.float32))


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Weights by name; gate and up of experts, which transformers has in one tensor, apart."""
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for part, values in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                yield name.replace("gate_up_proj", f"{part}.weight"), values
        elif name.endswith("experts.down_proj"):
            yield name.replace("down_proj", "down.weight"), tensor
        else:
            yield name, tensor


def write_gguf(
    model: PreTrainedModel, path: Path, architecture: str, format: str = "F32", *, splits_experts: bool = False
) -> Path:
    """Write the model; its matrices in `format`, one that the gguf package can make.

    If it `splits_experts`, each has tensors of its own, as in older files.
    """
    kind = GGMLQuantizationType[format]
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    add_own_metadata(writer, config, architecture, head_dim)
    if num_experts := getattr(config, "num_local_experts", 0):
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    for name, tensor in _tensors(model):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor
        if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            values = tensor + 1
        if architecture in PERMUTED and re.search(r"[qk]_proj", name):  # pairs of rotated rows stand side by side
            halves = tensor.unflatten(0, (-1, 2, head_dim // 2))
            values = halves.transpose(1, 2).reshape(tensor.shape)
        array = values.contiguous().numpy()
        if array.ndim == 3 and splits_experts:
            for expert, own in enumerate(array):
                writer.add_tensor(gguf_name(name, architecture).replace("_exps", f".{expert}"), own)
            continue
        if array.ndim >= 2 and format != "F32" and ".mlp.gate." not in name:
            writer.add_tensor(gguf_name(name, architecture), quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name, architecture), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
