"""Models of transformers as GGUF files."""

import re
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFWriter, quantize
from narrow import present
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
}
"""Hugging Face's names of modules and GGUF's."""


def gguf_name(name: str) -> str:
    match = present(re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.+)\.(weight|bias)", name))
    layer, module, kind = match.groups()
    return f"{'' if layer is None else f'blk.{layer}.'}{NAMES[module]}.{kind}"


def write_gguf(model: PreTrainedModel, path: Path, architecture: str, format: str = "F32") -> Path:
    """Write the model; its matrices in `format`, one that the gguf package can make."""
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
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor
        if architecture == "llama" and re.search(r"[qk]_proj", name):  # pairs of rotated rows stand side by side
            halves = tensor.unflatten(0, (-1, 2, head_dim // 2))
            values = halves.transpose(1, 2).reshape(tensor.shape)
        array = values.contiguous().numpy()
        if array.ndim == 2 and format != "F32":
            writer.add_tensor(gguf_name(name), quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
