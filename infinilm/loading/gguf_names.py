"""Hugging Face's names for the tensors of GGUF files."""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from infinilm.errors import CheckpointError
from infinilm.loading.gguf import GGUFFile, GGUFTensorInfo
from infinilm.loading.gguf_config import LAYER_PATTERN, ROPE_TENSORS

_OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_up_exps": "mlp.experts.{}.gate_up_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
"""Parts of Hugging Face's names by GGUF's, both with or without the end `.weight` or `.bias`."""
# The names that differ in some architectures.
_GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_HYBRID = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_OWN_LAYER_NAMES = {
    "deepseek2": {
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.k_b_proj",
        "attn_v_b": "self_attn.v_b_proj",
    },
    "gemma4": {
        **_GEMMA_NORMS,
        "layer_output_scale.weight": "layer_scalar",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        **{f"ffn_{part}_exps": f"experts.{{}}.{part}_proj" for part in ("gate", "up", "down", "gate_up")},
    },
    "glm4moe": {"post_attention_norm": "post_attention_layernorm"},
    "gpt-oss": {
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks.weight": "self_attn.sinks",
        "ffn_gate_inp": "mlp.router",
    },
    "qwen35": _HYBRID,
    "qwen35moe": _HYBRID,
    "qwen3next": _HYBRID,
    "gemma2": _GEMMA_NORMS,
    "gemma3": _GEMMA_NORMS,
    "llama": {  # with experts: Mixtral
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
    "glm4": {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
    "olmo2": {
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}
_OUTER_PATTERN = re.compile(r"(\w+)\.(weight|bias)")
_BARE_PATTERN = re.compile(r"blk\.(\d{1,6})\.ssm_a")
_LAYER = re.compile(r"blk\.(\d{1,6})\.")


def name_tensors(file: GGUFFile, architecture: str, num_layers: int) -> dict[str, GGUFTensorInfo]:
    """A file's tensors by Hugging Face's names, without those of layers after the last one, which draft tokens."""
    layer_names = _LAYER_NAMES | _OWN_LAYER_NAMES.get(architecture, {})
    tensors: dict[str, GGUFTensorInfo] = {}
    for name, tensor in file.tensors.items():
        layer = _LAYER.match(name)
        if name in ROPE_TENSORS or (layer and int(layer[1]) >= num_layers):
            continue
        hf_name = _hf_name(name, layer_names)
        for own_name, part in _of_experts(hf_name, tensor) if "{}" in hf_name else [(hf_name, tensor)]:
            if own_name in tensors:
                raise CheckpointError(f"{file.path}: {tensors[own_name].name!r} and {name!r} are both {own_name!r}")
            tensors[own_name] = _reshaped(own_name, part)
    return tensors


def _reshaped(name: str, tensor: GGUFTensorInfo) -> GGUFTensorInfo:
    """The tensor with the additional dimensions of size 1 that Hugging Face uses."""
    if name.endswith(".conv1d.weight") and len(tensor.shape) == 2:
        return replace(tensor, shape=(tensor.shape[0], 1, tensor.shape[1]))
    if name.endswith(".shared_expert_gate.weight") and len(tensor.shape) == 1:
        return replace(tensor, shape=(1, *tensor.shape))
    return tensor


def _of_experts(name: str, tensor: GGUFTensorInfo) -> Iterator[tuple[str, GGUFTensorInfo]]:
    """Split a tensor of all experts into the matrix of each expert, with its name."""
    num_experts, *shape = tensor.shape
    names = [name.replace("gate_up", half) for half in ("gate", "up")] if "gate_up" in name else [name]
    if not shape or shape[0] % len(names):
        yield name, tensor  # no model has a tensor of this name, so strict loading reports it
        return
    shape[0] //= len(names)
    num_bytes = tensor.num_bytes // (num_experts * len(names))
    for place, (expert, own_name) in enumerate(itertools.product(range(num_experts), names)):
        offset = tensor.offset + place * num_bytes
        yield own_name.format(expert), replace(tensor, shape=tuple(shape), offset=offset, num_bytes=num_bytes)


def _hf_name(name: str, layer_names: Mapping[str, str]) -> str:
    """Hugging Face's name for a tensor. An unknown tensor keeps its name, so that strict loading reports it."""
    if match := LAYER_PATTERN.fullmatch(name):
        layer, part, expert, kind = match.groups()
        if expert is not None and f"{part}_exps" in layer_names:
            return f"model.layers.{layer}.{layer_names[f'{part}_exps'].format(int(expert))}.{kind}"
        if expert is None and f"{part}.{kind}" in layer_names:
            return f"model.layers.{layer}.{layer_names[f'{part}.{kind}']}"
        if expert is None and part in layer_names:
            return f"model.layers.{layer}.{layer_names[part]}.{kind}"
    elif match := _BARE_PATTERN.fullmatch(name):
        return f"model.layers.{match[1]}.linear_attn.A_log"
    elif (match := _OUTER_PATTERN.fullmatch(name)) and match[1] in _OUTER_NAMES:
        return f"{_OUTER_NAMES[match[1]]}.{match[2]}"
    return name
