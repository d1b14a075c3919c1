"""Converts the metadata of GGUF's later architectures to settings of a Hugging Face `config.json`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from infinilm.loading.gguf import GGUFFile

if TYPE_CHECKING:
    from infinilm.loading.gguf_config import GGUFMetadata

HYBRIDS = ("qwen35", "qwen35moe", "qwen3next")
"""Architectures with gated delta nets."""
CHECKED_BY_TENSORS = (*HYBRIDS, "deepseek2", "gemma4", "glm4moe", "gpt-oss")
"""Architectures whose sizes are only checked when their tensors are compared with the model's."""
_SOFTMAX, _SIGMOID = 1, 2  # values of `expert_gating_func`


def read_sizes(metadata: "GGUFMetadata", hidden_size: int, num_heads: int) -> dict[str, Any]:
    """The sizes of layers, heads and MLPs."""
    num_layers = metadata.integer("block_count") - _count(metadata, "nextn_predict_layers")
    if num_layers < 1:
        raise metadata.error(f"nextn_predict_layers leaves {num_layers} of block_count layers")
    sizes: dict[str, Any] = {"num_hidden_layers": num_layers}
    match metadata.architecture:
        case "gemma4":
            types = read_layer_types(metadata, num_layers, 6)
            first = types.index("sliding_attention") if "sliding_attention" in types else 0
            sizes["head_dim"] = metadata.integer("attention.key_length_swa")
            sizes["num_key_value_heads"] = _per_layer(metadata, "attention.head_count_kv", num_layers)[first]
            sizes["intermediate_size"] = min(_per_layer(metadata, "feed_forward_length", num_layers))
            return sizes
        case "deepseek2":
            head_dim, num_kv_heads = metadata.integer("rope.dimension_count"), num_heads
        case _:
            head_dim = metadata.integer("attention.key_length", hidden_size // num_heads)
            num_kv_heads = metadata.integer("attention.head_count_kv", num_heads)
    in_experts = metadata.architecture in ("gpt-oss", "qwen35moe", "qwen3next")  # no layer has another MLP
    key = "expert_feed_forward_length" if in_experts else "feed_forward_length"
    return sizes | {
        "head_dim": head_dim,
        "num_key_value_heads": num_kv_heads,
        "intermediate_size": metadata.integer(key),
    }


def read_layer_types(metadata: "GGUFMetadata", num_layers: int, every: int) -> list[str]:
    """Hugging Face's types of all layers: every `every`-th layer is full, unless the metadata name the sliding ones."""
    pattern = metadata.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        every = metadata.integer("attention.sliding_window_pattern", every)
        pattern = [(layer + 1) % every != 0 for layer in range(num_layers)]
    if len(pattern) < num_layers:
        raise metadata.error(f"attention.sliding_window_pattern has {len(pattern)} layers, not {num_layers}")
    return ["sliding_attention" if flag else "full_attention" for flag in pattern[:num_layers]]


def read_family(metadata: "GGUFMetadata", config: dict[str, Any], file: GGUFFile) -> dict[str, Any]:
    """The additional settings of an architecture in `CHECKED_BY_TENSORS`; empty for others."""
    own: dict[str, Any]
    match metadata.architecture:
        case "deepseek2":
            return _deepseek_settings(metadata, config)
        case "gemma4":
            return _gemma4_settings(metadata, config, file)
        case "glm4moe":
            gating = metadata.get("expert_gating_func")
            if gating not in (None, _SIGMOID):
                raise metadata.error(f"expert_gating_func={gating!r} is not supported for glm4moe; {_SIGMOID} is")
            own = {"qk_norm": "blk.0.attn_q_norm.weight" in file.tensors}
            own["partial_rotary_factor"] = read_rotary_part(metadata, config)
            return own | _grouped_experts(metadata)
        case "gpt-oss":
            own = {"layer_types": read_layer_types(metadata, config["num_hidden_layers"], 2)}
            if config["rope_scaling"]:
                own["rope_scaling"] = {**config["rope_scaling"], "truncate": False}
            return own
        case "qwen35" | "qwen35moe" | "qwen3next":
            return _hybrid_settings(metadata, config)
    return {}


def _grouped_experts(metadata: "GGUFMetadata") -> dict[str, Any]:
    """The settings of experts that may be shared or come in groups."""
    scale = metadata.get("expert_weights_scale")  # 0: there is none
    return {
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "n_shared_experts": _count(metadata, "expert_shared_count"),
        "n_group": metadata.integer("expert_group_count", 1),
        "topk_group": metadata.integer("expert_group_used_count", 1),
        "routed_scaling_factor": metadata.number("expert_weights_scale") if scale else 1.0,
        "norm_topk_prob": bool(metadata.get("expert_weights_norm")),
        "first_k_dense_replace": _count(metadata, "leading_dense_block_count"),
    }


def _deepseek_settings(metadata: "GGUFMetadata", config: dict[str, Any]) -> dict[str, Any]:
    if metadata.get("attention.temperature_scale"):
        raise metadata.error("deepseek2.attention.temperature_scale is not supported")
    # Newer files have separate keys, ending in _mla, for the sizes of the heads that are made from latent vectors.
    end = "" if metadata.get("attention.key_length_mla") is None else "_mla"
    settings: dict[str, Any] = {
        "qk_rope_head_dim": config["head_dim"],
        "qk_nope_head_dim": metadata.integer(f"attention.key_length{end}") - config["head_dim"],
        "v_head_dim": metadata.integer(f"attention.value_length{end}"),
        "kv_lora_rank": metadata.integer("attention.kv_lora_rank"),
        "q_lora_rank": None,
        **_grouped_experts(metadata),
    }
    if metadata.get("attention.q_lora_rank"):
        settings["q_lora_rank"] = metadata.integer("attention.q_lora_rank")
    if config["rope_scaling"] and metadata.get("rope.scaling.yarn_log_multiplier"):
        weight = float(f"{10 * metadata.number('rope.scaling.yarn_log_multiplier'):.6g}")
        settings["rope_scaling"] = {**config["rope_scaling"], "mscale": weight, "mscale_all_dim": weight}
    gating = metadata.get("expert_gating_func")
    if gating == _SIGMOID:
        return settings | {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    if gating not in (None, _SOFTMAX) or settings["norm_topk_prob"]:
        raise metadata.error(
            f"expert_gating_func={gating!r} with expert_weights_norm={settings['norm_topk_prob']} is not supported "
            "for deepseek2"
        )
    return settings | {"topk_method": "group_limited_greedy" if settings["n_group"] > 1 else "greedy"}


def _hybrid_settings(metadata: "GGUFMetadata", config: dict[str, Any]) -> dict[str, Any]:
    num_layers, num_heads = config["num_hidden_layers"], metadata.integer("ssm.time_step_rank")
    inner_size = metadata.integer("ssm.inner_size")
    if inner_size % num_heads:
        raise metadata.error(f"ssm.inner_size={inner_size} is no multiple of ssm.time_step_rank={num_heads}")
    recurrent = metadata.get("attention.recurrent_layers")
    if not isinstance(recurrent, list):
        every = metadata.integer("full_attention_interval", 4)
        recurrent = [(layer + 1) % every != 0 for layer in range(num_layers)]
    if len(recurrent) < num_layers:
        raise metadata.error(f"attention.recurrent_layers has {len(recurrent)} layers, not {num_layers}")
    settings: dict[str, Any] = {
        "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.integer("ssm.state_size"),
        "linear_value_head_dim": inner_size // num_heads,
        "linear_num_key_heads": metadata.integer("ssm.group_count"),
        "linear_num_value_heads": num_heads,
        "layer_types": ["linear_attention" if flag else "full_attention" for flag in recurrent[:num_layers]],
        "partial_rotary_factor": metadata.integer("rope.dimension_count", config["head_dim"]) / config["head_dim"],
    }
    if metadata.architecture == "qwen35":
        return settings
    size = metadata.integer("expert_feed_forward_length")
    settings["shared_expert_intermediate_size"] = metadata.integer("expert_shared_feed_forward_length", size)
    return settings | {"moe_intermediate_size": size}


def _gemma4_settings(metadata: "GGUFMetadata", config: dict[str, Any], file: GGUFFile) -> dict[str, Any]:
    num_layers, num_shared = config["num_hidden_layers"], _count(metadata, "attention.shared_kv_layers")
    types = read_layer_types(metadata, num_layers, 6)
    wide = [size != config["intermediate_size"] for size in _per_layer(metadata, "feed_forward_length", num_layers)]
    settings: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": types,
        "global_head_dim": metadata.integer("attention.key_length"),
        "num_kv_shared_layers": num_shared,
        "use_double_wide_mlp": any(wide),
        "hidden_size_per_layer_input": _count(metadata, "embedding_length_per_layer_input"),
        "final_logit_softcapping": None,
    }
    if metadata.integer("rope.dimension_count_swa", config["head_dim"]) != config["head_dim"]:
        raise metadata.error("rope.dimension_count_swa must be attention.key_length_swa: sliding layers rotate all")
    if settings["hidden_size_per_layer_input"] and "per_layer_token_embd.weight" in file.tensors:
        settings["vocab_size_per_layer_input"] = file.tensors["per_layer_token_embd.weight"].shape[0]
    if metadata.get("final_logit_softcapping") is not None:
        settings["final_logit_softcapping"] = metadata.number("final_logit_softcapping")
    full = [layer for layer in range(num_layers - num_shared) if types[layer] == "full_attention"]
    if full:
        settings["attention_k_eq_v"] = f"blk.{full[0]}.attn_v.weight" not in file.tensors
        heads = _per_layer(metadata, "attention.head_count_kv", num_layers)[full[0]]
        if heads != config["num_key_value_heads"]:
            settings["num_global_key_value_heads"] = heads
    if "num_experts" in config:
        settings |= {"enable_moe_block": True, "top_k_experts": config.pop("num_experts_per_tok")}
        settings["moe_intermediate_size"] = metadata.integer("expert_feed_forward_length")
    part = _proportion(metadata, file, settings["global_head_dim"] // 2)
    rope = {"rope_type": "proportional", "rope_theta": config["rope_theta"], "partial_rotary_factor": part}
    sliding = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", 10000.0)}
    del config["hidden_act"]
    return settings | {"rope_parameters": {"full_attention": rope, "sliding_attention": sliding}}


def _proportion(metadata: "GGUFMetadata", file: GGUFFile, num_pairs: int) -> float:
    """The share of a full layer's pairs that are rotated: those with a frequency divisor of 1."""
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None or tensor.shape != (num_pairs,) or tensor.ggml_type.name != "F32":
        raise metadata.error(f"the tensor 'rope_freqs.weight' must be F32 of shape [{num_pairs}]")
    factors: list[float] = file.read_blocks(tensor, (0,), tensor.shape).view("<f4").ravel().tolist()
    count = factors.count(1.0)
    if any(factor < 1e20 for factor in factors[count:]):
        raise metadata.error("the tensor 'rope_freqs.weight' must be 1 for the first pairs and 1e30 for the others")
    return count / num_pairs


def read_rotary_part(metadata: "GGUFMetadata", config: dict[str, Any]) -> float:
    """The share of a head that is rotated."""
    if metadata.get("rope.dimension_sections"):
        raise metadata.error("rope.dimension_sections is not supported: positions in pictures are refused")
    head_dim: int = config["head_dim"]
    return metadata.integer("rope.dimension_count", head_dim) / head_dim


def _count(metadata: "GGUFMetadata", key: str) -> int:
    """The value of an architecture's key that may be 0 or missing."""
    return metadata.integer(key) if metadata.get(key) not in (None, 0) else 0


def _per_layer(metadata: "GGUFMetadata", key: str, num_layers: int) -> Sequence[int]:
    """The values of a key that has one number for all layers, or one for each layer."""
    value = metadata.get(key)
    if not isinstance(value, list):
        return [metadata.integer(key)] * num_layers
    if len(value) < num_layers or not all(type(each) is int and each > 0 for each in value):
        raise metadata.error(
            f"{metadata.architecture}.{key} must be {num_layers} positive integers, it is {value!r:.80}"
        )
    return value[:num_layers]
