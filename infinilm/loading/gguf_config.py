"""Makes a Hugging Face `config.json` from a GGUF file's metadata."""

import math
import re
from collections.abc import Mapping
from typing import Any

from infinilm.errors import CheckpointError
from infinilm.loading.gguf import GGUFFile, GGUFTensorInfo
from infinilm.loading.gguf_families import (
    CHECKED_BY_TENSORS,
    HYBRIDS,
    read_family,
    read_layer_types,
    read_rotary_part,
    read_sizes,
)
from infinilm.loading.quantize import PLAIN_TYPES

_ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "glm4": ("glm4", "Glm4ForCausalLM"),
    "granite": ("granite", "GraniteForCausalLM"),
    "mistral3": ("mistral", "MistralForCausalLM"),
    "olmo2": ("olmo2", "Olmo2ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "deepseek2": ("deepseek_v2", "DeepseekV2ForCausalLM"),
    "gemma4": ("gemma4_text", "Gemma4ForCausalLM"),
    "glm4moe": ("glm4_moe", "Glm4MoeForCausalLM"),
    "gpt-oss": ("gpt_oss", "GptOssForCausalLM"),
    "qwen35": ("qwen3_5_text", "Qwen3_5ForCausalLM"),
    "qwen35moe": ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
    "qwen3next": ("qwen3_next", "Qwen3NextForCausalLM"),
}
"""Hugging Face's `model_type` and class, by GGUF's name."""
_SPARSE_ARCHITECTURES = {
    "llama": ("mixtral", "MixtralForCausalLM"),
    **{
        name: _ARCHITECTURES[name]
        for name in ("deepseek2", "gemma4", "glm4moe", "gpt-oss", "qwen35moe", "qwen3moe", "qwen3next")
    },
}
"""The same for files with experts."""
_RENAMED = {"deepseek2": "deepseek_v3", "mistral3": "ministral3", "olmo2": "olmo3"}
"""The `model_type` of files with certain additional metadata, by GGUF's name; see `_own_settings`."""
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
ROPE_TENSORS = (ROPE_FACTORS, *LONG_FACTORS)
"""Tensors with settings of the rotary embedding. Hugging Face checkpoints have these in the config."""
LAYER_PATTERN = re.compile(r"blk\.(\d{1,6})\.(\w+)(?:\.(\d{1,6}))?\.(weight|bias|scale)")
"""Layer, part, the expert's number (in files with a tensor for each expert), and kind."""


def architectures(model_type: str) -> list[str]:
    """GGUF's names for models of a Hugging Face `model_type`."""
    known = [name for name, (found, _) in _ARCHITECTURES.items() if found == model_type]
    sparse = [name for name, (found, _) in _SPARSE_ARCHITECTURES.items() if found == model_type and name not in known]
    return known + sparse + [name for name, found in _RENAMED.items() if found == model_type]


class GGUFMetadata:
    """Typed access to a file's metadata. Keys without their own dot-prefix get the architecture's."""

    def __init__(self, file: GGUFFile) -> None:
        self._path = file.path
        self._pairs = file.metadata
        num_parts = self._pairs.get("split.count", 1)
        if num_parts not in (0, 1):
            raise self.error(
                f"it is one of {num_parts} parts of a split model; merge the parts into one file first "
                f"(llama.cpp's gguf-split tool does it with --merge)"
            )
        architecture = self._pairs.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
            supported = ", ".join(_ARCHITECTURES)
            raise self.error(f"architecture {architecture!r} is not supported; supported are {supported}")
        self.architecture = architecture

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {message}")

    def get(self, key: str) -> Any:
        return self._pairs.get(f"{self.architecture}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self._positive(key, default, (int,), "a positive integer"))

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._positive(key, default, (int, float), "a positive number"))

    def _positive(self, key: str, default: float | None, types: tuple[type, ...], wanted: str) -> Any:
        """The value of one of the architecture's keys, which is required if there is no default."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) not in types or not 0 < value < (math.inf if float in types else 2**32):
            seen = "missing" if value is None else repr(value)[:80]
            raise self.error(f"metadata {self.architecture}.{key} must be {wanted}, it is {seen}")
        return value

    def token_id(self, name: str, vocab_size: int) -> int | None:
        """A special token's id, such as `eos`."""
        key = f"tokenizer.ggml.{name}_token_id"
        value = self._pairs.get(key)
        if value is None or value == 0xFFFFFFFF:  # the format's value for none
            return None
        if type(value) is not int or not 0 <= value < vocab_size:
            raise self.error(f"{key} is {value!r}, which is no token of a vocabulary of {vocab_size}")
        return value

    def sampling(self, key: str) -> Any:
        """A default in `general.sampling`. Float32 values are converted back to the digits they were written with."""
        value = self._pairs.get(f"general.sampling.{key}")
        return float(f"{value:.6g}") if isinstance(value, float) else value

    def scaling_keys(self) -> set[str]:
        """The ends of the architecture's keys that begin with `rope.scaling.`."""
        prefix = f"{self.architecture}.rope.scaling."
        return {key.removeprefix(prefix) for key in self._pairs if key.startswith(prefix)}


def make_config(metadata: GGUFMetadata, file: GGUFFile) -> dict[str, Any]:
    """Make the `config.json` that Hugging Face would have for the file."""
    _refuse_other_structures(metadata)
    tensors = file.tensors
    hidden_size = metadata.integer("embedding_length")
    num_heads = metadata.integer("attention.head_count")
    sizes = read_sizes(metadata, hidden_size, num_heads)
    head_dim: int = sizes["head_dim"]
    architecture, sliding_window = metadata.architecture, None
    if metadata.get("attention.sliding_window") not in (None, 0):
        sliding_window = metadata.integer("attention.sliding_window")
        if architecture in ("qwen2", "qwen3"):
            raise metadata.error(f"sliding window attention in {architecture} files is not supported")
        architecture = "mistral" if architecture == "llama" else architecture
    experts = _expert_settings(metadata, tensors)
    model_type, class_name = _SPARSE_ARCHITECTURES[metadata.architecture] if experts else _ARCHITECTURES[architecture]
    config: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [class_name],
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        **sizes,
        "hidden_act": "silu",
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.integer("context_length"),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "sliding_window": sliding_window,
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "qkv_bias": "blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": _stored_dtype_name(file),
        **experts,
    }
    for key in ("attention.value_length", "rope.dimension_count"):
        is_partial = key == "rope.dimension_count" and architecture in ("glm4", "glm4moe", "phi3", *HYBRIDS)
        is_partial = is_partial or architecture in ("deepseek2", "gemma4")  # these have heads of several sizes
        if metadata.integer(key, head_dim) != head_dim and not is_partial:
            raise metadata.error(f"{key} is {metadata.get(key)}, and the head dimension {head_dim}; they must agree")
    if head_dim % 2:
        raise metadata.error(f"the head dimension {head_dim} is odd; rotary embedding needs an even one")
    config["vocab_size"] = vocab_size = _check_sizes(metadata, config, tensors)
    config["rope_scaling"] = _rope_scaling(metadata, config, file)
    config |= _own_settings(metadata, config, file) | read_family(metadata, config, file)
    ends = [metadata.token_id(name, vocab_size) for name in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(token for token in ends if token is not None))
    return config | {
        "bos_token_id": metadata.token_id("bos", vocab_size),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,  # a list if several tokens end an answer
        "pad_token_id": metadata.token_id("padding", vocab_size),
    }


def _expert_settings(metadata: GGUFMetadata, tensors: Mapping[str, GGUFTensorInfo]) -> dict[str, Any]:
    """The settings of mixtures of experts; empty for other files."""
    if not metadata.get("expert_count"):
        if metadata.architecture in _SPARSE_ARCHITECTURES and metadata.architecture not in ("gemma4", "llama"):
            metadata.integer("expert_count")  # raises the error
        return {}
    experts = {
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
    }
    if metadata.architecture not in ("qwen3moe", "qwen3next"):
        return experts
    layers = range(metadata.integer("block_count"))
    return experts | {
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,  # as llama.cpp computes these models
        "mlp_only_layers": [layer for layer in layers if f"blk.{layer}.ffn_gate_inp.weight" not in tensors],
    }


def _own_settings(metadata: GGUFMetadata, config: dict[str, Any], file: GGUFFile) -> dict[str, Any]:
    """The additional settings of an architecture, including those that llama.cpp sets without metadata."""
    settings: dict[str, Any] = {}
    match metadata.architecture:
        case "gemma2" | "gemma3":
            settings = _gemma_settings(metadata, config)
        case "glm4":
            settings = {"attention_bias": config["qkv_bias"], "qkv_bias": False}
            settings["partial_rotary_factor"] = read_rotary_part(metadata, config)
        case "granite":
            settings = {
                "embedding_multiplier": metadata.number("embedding_scale", 1.0),
                "attention_multiplier": metadata.number("attention.scale", config["head_dim"] ** -0.5),
                "residual_multiplier": metadata.number("residual_scale", 1.0),
                "logits_scaling": metadata.number("logit_scale"),
            }
        case "mistral3" if metadata.get("attention.temperature_scale"):
            beta = metadata.number("attention.temperature_scale")
            settings = {"model_type": "ministral3", "architectures": ["Ministral3ForCausalLM"]}
            settings["rope_scaling"] = {**(config["rope_scaling"] or {}), "llama_4_scaling_beta": beta}
        case "olmo2" if config["sliding_window"] is not None:
            settings = {"model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"]}
            settings["layer_types"] = read_layer_types(metadata, config["num_hidden_layers"], every=4)
            full = {"rope_theta": config["rope_theta"], **(config["rope_scaling"] or {})}
            sliding = {"rope_theta": metadata.number("rope.freq_base_swa", config["rope_theta"])}
            settings |= {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}
        case "phi3":
            settings = _phi3_settings(metadata, config, file)
    return settings


def _phi3_settings(metadata: GGUFMetadata, config: dict[str, Any], file: GGUFFile) -> dict[str, Any]:
    settings: dict[str, Any] = {"partial_rotary_factor": read_rotary_part(metadata, config)}
    if all(name in file.tensors for name in LONG_FACTORS):
        num_pairs = metadata.integer("rope.dimension_count", config["head_dim"]) // 2
        short, long = (_read_factors(metadata, name, num_pairs, file) for name in LONG_FACTORS)
        settings["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": metadata.integer("rope.scaling.original_context_length"),
            "attention_factor": metadata.number("rope.scaling.attn_factor", 1.0),
        }
    return settings


def _gemma_settings(metadata: GGUFMetadata, config: dict[str, Any]) -> dict[str, Any]:
    is_gemma2 = metadata.architecture == "gemma2"
    every, layers_of_27b, caps = (2, 46, (50.0, 30.0)) if is_gemma2 else (6, 62, (None, None))
    is_27b = config["num_hidden_layers"] == layers_of_27b
    width = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    settings: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": read_layer_types(metadata, config["num_hidden_layers"], every),
        "query_pre_attn_scalar": width,
        "sliding_window": config["sliding_window"] or 4096,
    }
    for name, default in zip(("attn_logit_softcapping", "final_logit_softcapping"), caps, strict=True):
        settings[name] = default if metadata.get(name) is None else metadata.number(name)
    if not is_gemma2:
        settings["rope_local_base_freq"] = metadata.number("rope.freq_base_swa", 10000.0)
    del config["hidden_act"]
    return settings


def _refuse_other_structures(metadata: GGUFMetadata) -> None:
    """Refuse settings that would load but would be computed wrongly."""
    if metadata.get("expert_count") and metadata.architecture not in _SPARSE_ARCHITECTURES:
        raise metadata.error(
            f"{metadata.architecture} files with experts are not supported, it has {metadata.get('expert_count')}"
        )
    for key in ("attention.scale", "logit_scale", "embedding_scale", "residual_scale"):
        if metadata.get(key) is not None and metadata.architecture != "granite":
            raise metadata.error(f"metadata {metadata.architecture}.{key} is not supported")


def _check_sizes(metadata: GGUFMetadata, config: dict[str, Any], tensors: Mapping[str, GGUFTensorInfo]) -> int:
    """Check the metadata against the tensors. Returns the vocabulary size."""
    num_layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    layers = {int(match[1]) for name in tensors if (match := LAYER_PATTERN.fullmatch(name))}
    if metadata.get("nextn_predict_layers"):  # these layers come last, or are left out
        layers &= set(range(num_layers))
    if len(layers) != num_layers:
        raise metadata.error(f"block_count is {num_layers}, but there are tensors of {len(layers)} layers")
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    rows: dict[str, int | None] = {}
    if metadata.architecture not in CHECKED_BY_TENSORS:
        is_phi = metadata.architecture == "phi3"
        rows |= {"blk.0.attn_qkv": q + 2 * kv} if is_phi else {"blk.0.attn_q": q, "blk.0.attn_k": kv}
        is_fused = metadata.architecture in ("glm4", "phi3")
        rows |= {"blk.0.ffn_up" if is_fused else "blk.0.ffn_gate": config["intermediate_size"] * (1 + is_fused)}
    wanted = {f"{name}.weight": (count, config["hidden_size"]) for name, count in ({"token_embd": None} | rows).items()}
    if rows and "num_experts" in config and 0 not in config.get("mlp_only_layers", ()):
        del wanted["blk.0.ffn_gate.weight"]  # experts are checked with all tensors
        wanted["blk.0.ffn_gate_inp.weight"] = (config["num_experts"], config["hidden_size"])
    for name, (num_rows, num_columns) in wanted.items():
        if name not in tensors:
            raise metadata.error(f"the tensor {name!r} is missing")
        shape = tensors[name].shape
        if len(shape) != 2 or num_rows not in (None, shape[0]) or shape[1] != num_columns:
            asked = f"[{'vocabulary' if num_rows is None else num_rows}, {num_columns}]"
            raise metadata.error(f"the tensor {name!r} has shape {list(shape)}, but the metadata ask for {asked}")
    return tensors["token_embd.weight"].shape[0]


def _rope_scaling(metadata: GGUFMetadata, config: dict[str, Any], file: GGUFFile) -> dict[str, Any] | None:
    """Hugging Face's `rope_scaling`, from metadata or, in Llama 3.1 files, from the tensor of factors."""
    kind = metadata.get("rope.scaling.type")
    if kind is None and metadata.get("rope.scale_linear") is not None:
        return {"rope_type": "linear", "factor": metadata.number("rope.scale_linear")}
    if ROPE_FACTORS in file.tensors and metadata.architecture != "gemma4":
        if kind not in (None, "none"):
            raise metadata.error(f"rope scaling {kind!r} together with the tensor {ROPE_FACTORS!r} is not supported")
        return _rope_factors(metadata, config, file)
    if kind in (None, "none", "longrope" if metadata.architecture == "phi3" else "none"):
        return None
    if kind not in ("linear", "yarn"):
        raise metadata.error(f"rope scaling {kind!r} is not supported in GGUF files; linear and yarn are")
    scaling = {"rope_type": kind, "factor": metadata.number("rope.scaling.factor")}
    understood = {"type", "factor", "original_context_length", "finetuned"}
    if kind == "yarn":
        understood |= {"attn_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_log_multiplier"}
        scaling |= _yarn_details(metadata, scaling["factor"])
    if unknown := metadata.scaling_keys() - understood:
        raise metadata.error(f"rope scaling {kind!r} has keys that are not supported: {sorted(unknown)}")
    return scaling


def _yarn_details(metadata: GGUFMetadata, factor: float) -> dict[str, Any]:
    details: dict[str, Any] = {}
    if metadata.get("rope.scaling.original_context_length") is not None:
        details["original_max_position_embeddings"] = metadata.integer("rope.scaling.original_context_length")
    for name in ("beta_fast", "beta_slow"):
        if metadata.get(f"rope.scaling.yarn_{name}") is not None:
            details[name] = metadata.number(f"rope.scaling.yarn_{name}")
    if metadata.get("rope.scaling.yarn_log_multiplier"):
        details |= {"mscale": 1.0, "mscale_all_dim": metadata.number("rope.scaling.yarn_log_multiplier")}
    for name in ("attn_factor", "yarn_attn_factor"):
        if metadata.get(f"rope.scaling.{name}") is not None:
            # GGUF multiplies the usual factor by this one; Hugging Face replaces the usual factor.
            usual = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
            details["attention_factor"] = metadata.number(f"rope.scaling.{name}") * usual
    return details


def _rope_factors(metadata: GGUFMetadata, config: dict[str, Any], file: GGUFFile) -> dict[str, Any] | None:
    """Divisors of the rotary frequencies, one per pair of a head, as longrope with one set of factors."""
    factors = _read_factors(metadata, ROPE_FACTORS, config["head_dim"] // 2, file)
    if all(factor == 1.0 for factor in factors):
        return None
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": config["max_position_embeddings"],
    }


def _read_factors(metadata: GGUFMetadata, name: str, num_pairs: int, file: GGUFFile) -> list[float]:
    tensor = file.tensors[name]
    if tensor.shape != (num_pairs,) or tensor.ggml_type.name != "F32":
        raise metadata.error(
            f"the tensor {name!r} must be F32 of shape [{num_pairs}], it is "
            f"{tensor.ggml_type.name} of shape {list(tensor.shape)}"
        )
    factors: list[float] = file.read_blocks(tensor, (0,), tensor.shape).view("<f4").ravel().tolist()
    if not all(0 < factor < math.inf for factor in factors):
        raise metadata.error(f"the tensor {name!r} has factors that are not positive numbers")
    return factors


def _stored_dtype_name(file: GGUFFile) -> str:
    """The common type of dense matrices, or float32 if they have several; bfloat16 if any matrix is quantised.

    Quantised matrices have no float type, and a GPU's kernels multiply them with 16-bit numbers.
    """
    types = {tensor.ggml_type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if not types <= PLAIN_TYPES.keys():
        return "bfloat16"
    return PLAIN_TYPES[types.pop()] if len(types) == 1 else "float32"
