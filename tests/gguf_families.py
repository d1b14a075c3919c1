"""What llama.cpp's converter makes of the models of later architectures: metadata, tensors and their names."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from gguf.gguf_writer import GGUFValue
from narrow import present
from torch import Tensor
from transformers import PreTrainedModel

ARCHITECTURES = {
    "deepseek2": gguf.MODEL_ARCH.DEEPSEEK2,
    "gemma4": gguf.MODEL_ARCH.GEMMA4,
    "glm4moe": gguf.MODEL_ARCH.GLM4_MOE,
    "gpt-oss": gguf.MODEL_ARCH.GPT_OSS,
    "qwen35": gguf.MODEL_ARCH.QWEN35,
    "qwen35moe": gguf.MODEL_ARCH.QWEN35MOE,
    "qwen3next": gguf.MODEL_ARCH.QWEN3NEXT,
}
Named = Iterator[tuple[str, Tensor]]


def plain(name: str, tensor: Tensor, config: Any) -> Named:
    """Tensors of all experts: gate and up apart."""
    if name.endswith("experts.gate_up_proj"):
        for part, values in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
            yield name.replace("gate_up_proj", f"{part}_proj.weight"), values
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", tensor
    else:
        yield name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor


def deepseek2(name: str, tensor: Tensor, config: Any) -> Named:
    if not name.endswith("kv_b_proj.weight"):
        yield from plain(name, tensor, config)
        return
    by_head = tensor.view(config.num_attention_heads, -1, tensor.shape[1])
    keys, values = by_head.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
    yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), values


def gemma4(name: str, tensor: Tensor, config: Any) -> Named:
    if name.endswith(("router.scale", "per_expert_scale")):
        part = "ffn_gate_inp" if name.endswith("router.scale") else "ffn_down_exps"
        yield f"blk.{name.split('.')[2]}.{part}.scale", tensor
    elif name.endswith(("layer_scalar", "experts.gate_up_proj", "experts.down_proj")):
        yield f"{name}.weight", tensor
    else:
        yield from plain(name, tensor, config)


def gpt_oss(name: str, tensor: Tensor, config: Any) -> Named:
    if name.endswith("sinks"):
        yield f"{name}.weight", tensor
    elif "gate_up_proj" in name:
        kind, last = ("bias", tensor) if name.endswith("bias") else ("weight", tensor.transpose(1, 2))
        for start, part in enumerate(("gate", "up")):
            yield f"{name.split('gate_up', maxsplit=1)[0]}{part}_proj.{kind}", last[:, start::2]
    elif "experts.down_proj" in name:
        kind, last = ("bias", tensor) if name.endswith("bias") else ("weight", tensor.transpose(1, 2))
        yield f"{name.split('down', maxsplit=1)[0]}down_proj.{kind}", last
    else:
        yield name, tensor


def qwen3next(name: str, tensor: Tensor, config: Any) -> Named:
    if name.endswith(".A_log"):
        yield name, -tensor.exp()
    elif name.endswith(".dt_bias"):
        yield name.replace(".dt_bias", ".dt_proj.bias"), tensor
    elif "conv1d" in name:
        yield name, tensor.squeeze()
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        yield name, tensor + 1
    elif "in_proj_qkvz" in name:
        inner = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
        sizes = [config.linear_key_head_dim] * 2 + [inner] * 2
        *qkv, gate = tensor.view(config.linear_num_key_heads, -1, tensor.shape[1]).split(sizes, dim=1)
        layer = name.split(".")[2]
        yield f"blk.{layer}.attn_qkv.weight", torch.cat([part.flatten(0, 1) for part in qkv])
        yield f"blk.{layer}.attn_gate.weight", gate.flatten(0, 1)
    else:
        yield from plain(name, tensor, config)


def qwen35(name: str, tensor: Tensor, config: Any) -> Named:
    keys, values, dim = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim

    def tiled(rows: Tensor, size: int) -> Tensor:
        return rows.view(keys, values // keys, size, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)

    if "in_proj_qkv" in name or "conv1d" in name:
        first = 2 * keys * config.linear_key_head_dim
        tensor = torch.cat((tensor[:first], tiled(tensor[first:], dim)))
    elif "in_proj_z" in name:
        tensor = tiled(tensor, dim)
    elif name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        tensor = tiled(tensor, 1)
    elif "linear_attn.out_proj" in name:
        tensor = tiled(tensor.t(), dim).t()
    yield from qwen3next(name, tensor, config)


CONVERTERS: dict[str, Callable[[str, Tensor, Any], Named]] = {
    "deepseek2": deepseek2,
    "gemma4": gemma4,
    "glm4moe": plain,
    "gpt-oss": gpt_oss,
    "qwen35": qwen35,
    "qwen35moe": qwen35,
    "qwen3next": qwen3next,
}


def add_metadata(writer: GGUFWriter, config: Any, architecture: str, num_more: int) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_block_count(config.num_hidden_layers + num_more)
    if num_more:
        writer.add_nextn_predict_layers(num_more)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(getattr(config, "num_experts_per_tok", None) or config.top_k_experts)
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    {"deepseek2": _add_deepseek, "gemma4": _add_gemma4, "glm4moe": _add_glm, "gpt-oss": _add_gpt_oss}.get(
        architecture, _add_hybrid
    )(writer, config, rope)


def _add_heads(writer: GGUFWriter, config: Any) -> None:
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)


def _add_groups(writer: GGUFWriter, config: Any) -> None:
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.n_group is not None:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    writer.add_expert_weights_norm(config.norm_topk_prob)


def _add_glm(writer: GGUFWriter, config: Any, rope: Any) -> None:
    _add_heads(writer, config)
    _add_groups(writer, config)
    writer.add_rope_dimension_count(int(config.head_dim * rope["partial_rotary_factor"]))
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _add_deepseek(writer: GGUFWriter, config: Any, rope: Any) -> None:
    writer.add_head_count_kv(1)
    _add_groups(writer, config)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if config.model_type == "deepseek_v3":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _add_gpt_oss(writer: GGUFWriter, config: Any, rope: Any) -> None:
    _add_heads(writer, config)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_sliding_window(config.sliding_window)


def _add_hybrid(writer: GGUFWriter, config: Any, rope: Any) -> None:
    _add_heads(writer, config)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)
    writer.add_rope_dimension_count(int(config.head_dim * rope.get("partial_rotary_factor", 0.25)))
    if config.model_type != "qwen3_next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])


def _add_gemma4(writer: GGUFWriter, config: Any, rope: Any) -> None:
    is_sliding = [kind == "sliding_attention" for kind in config.layer_types]
    config.allow_global_per_layer_attribute_access = True
    full = config.per_layer_config[is_sliding.index(False)]
    global_dim = full.head_dim
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(is_sliding)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_key_length(global_dim)
    writer.add_value_length(global_dim)
    writer.add_key_length_swa(config.head_dim)
    writer.add_value_length_swa(config.head_dim)
    writer.add_rope_dimension_count(global_dim)
    writer.add_rope_dimension_count_swa(config.head_dim)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    kv_heads = full.num_key_value_heads
    writer.add_head_count_kv([config.num_key_value_heads if sliding else kv_heads for sliding in is_sliding])
    first_shared = config.num_hidden_layers - config.num_kv_shared_layers
    sizes = [config.intermediate_size * (1 + (layer >= first_shared)) for layer in range(config.num_hidden_layers)]
    writer.add_feed_forward_length(sizes if config.use_double_wide_mlp else config.intermediate_size)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    num_rotated = int(global_dim * rope["partial_rotary_factor"] / 2)
    factors = [1.0] * num_rotated + [1e30] * (global_dim // 2 - num_rotated)
    writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))


def write_family(
    model: PreTrainedModel,
    path: Path,
    architecture: str,
    format: str = "F32",
    *,
    num_more: int = 0,
    is_older: bool = False,
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """Write the model; its matrices in `format`, one that the gguf package can make.

    The first layer's attention norm is repeated in `num_more` layers that predict further tokens. Older files have
    matrices as one that newer ones divide. `changes` are made to the metadata.
    """
    kind, config = GGMLQuantizationType[format], model.config
    writer = GGUFWriter(path, architecture)
    add_metadata(writer, config, architecture, num_more)
    if is_older and architecture == "deepseek2":
        del writer.kv_data[0]["deepseek2.attention.key_length_mla"]
        changes = {
            "deepseek2.attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
            "deepseek2.attention.value_length": config.v_head_dim,
            "deepseek2.attention.head_count_kv": config.num_attention_heads,
        }
    for key, value in (changes or {}).items():
        kinds = [gguf.GGUFValueType.get_type(each) for each in (value, *(value if isinstance(value, list) else ()))]
        kinds = [gguf.GGUFValueType.UINT32 if each is gguf.GGUFValueType.INT32 else each for each in kinds[:2]]
        writer.kv_data[0][key] = GGUFValue(value, *kinds)
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        is_one = is_older and ("kv_b_proj" in name or "in_proj_qkvz" in name)
        converted = [(name, tensor)] if is_one else CONVERTERS[architecture](name, tensor, config)
        for own, values in converted:
            mapped = own if own.startswith("blk.") else present(names.get_name(own, try_suffixes=(".weight", ".bias")))
            array = values.contiguous().numpy()
            is_matrix = array.ndim >= 2 and not any(part in mapped for part in ("ffn_gate_inp", "conv1d", ".bias"))
            if format != "F32" and is_matrix and array.shape[-1] % 32 == 0:
                writer.add_tensor(mapped, quantize(array, kind), raw_dtype=kind)
            else:
                writer.add_tensor(mapped, array)
    norm = model.state_dict()["model.layers.0.input_layernorm.weight"].numpy()
    for layer in range(config.num_hidden_layers, config.num_hidden_layers + num_more):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", norm)
        writer.add_tensor(f"blk.{layer}.nextn.enorm.weight", norm)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
