"""Makes a Hugging Face `config.json` from a GGUF file's metadata."""

import math
import re
from collections.abc import Mapping
from typing import Any

from infinilm.errors import CheckpointError
from infinilm.loading.gguf import GGUFFile, GGUFTensorInfo

_ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
"""By GGUF's name: Hugging Face's `model_type` and class."""
ROPE_FACTORS = "rope_freqs.weight"
LAYER_PATTERN = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)")


class GGUFMetadata:
    """Typed access to a file's metadata; keys without a dot-prefix of their own get the architecture's."""

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
        """One of the architecture's keys; required without a default."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) not in types or not 0 < value < math.inf:
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
        """A default of `general.sampling`. A float32 gets the decimal digits that it was written with."""
        value = self._pairs.get(f"general.sampling.{key}")
        return float(f"{value:.6g}") if isinstance(value, float) else value

    def scaling_keys(self) -> set[str]:
        """What follows `rope.scaling.` in the architecture's keys."""
        prefix = f"{self.architecture}.rope.scaling."
        return {key.removeprefix(prefix) for key in self._pairs if key.startswith(prefix)}


def make_config(metadata: GGUFMetadata, file: GGUFFile) -> dict[str, Any]:
    """The `config.json` that Hugging Face would have for the file."""
    _refuse_other_structures(metadata)
    tensors = file.tensors
    hidden_size = metadata.integer("embedding_length")
    num_heads = metadata.integer("attention.head_count")
    head_dim = metadata.integer("attention.key_length", hidden_size // num_heads)
    sliding_window = metadata.get("attention.sliding_window")
    architecture = metadata.architecture
    if sliding_window is not None:
        sliding_window = metadata.integer("attention.sliding_window")
        if architecture in ("qwen2", "qwen3"):
            raise metadata.error(f"sliding window attention in {architecture} files is not supported")
        architecture = "mistral" if architecture == "llama" else architecture
    model_type, class_name = _ARCHITECTURES[architecture]
    config: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [class_name],
        "hidden_size": hidden_size,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": metadata.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.integer("context_length"),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "sliding_window": sliding_window,
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "qkv_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": _stored_dtype_name(file),
    }
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.integer(key, head_dim) != head_dim:
            raise metadata.error(f"{key} is {metadata.get(key)}, and the head dimension {head_dim}; they must agree")
    if head_dim % 2:
        raise metadata.error(f"the head dimension {head_dim} is odd; rotary embedding needs an even one")
    config["vocab_size"] = vocab_size = _check_sizes(metadata, config, tensors)
    config["rope_scaling"] = _rope_scaling(metadata, config, file)
    if model_type == "gemma3_text":
        config |= _gemma3_settings(metadata, config)
        del config["hidden_act"]
    ends = [metadata.token_id(name, vocab_size) for name in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(token for token in ends if token is not None))
    return config | {
        "bos_token_id": metadata.token_id("bos", vocab_size),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,  # a list where several tokens end an answer
        "pad_token_id": metadata.token_id("padding", vocab_size),
    }


def _gemma3_settings(metadata: GGUFMetadata, config: dict[str, Any]) -> dict[str, Any]:
    """What llama.cpp knows of Gemma 3 without metadata."""
    is_27b = config["num_hidden_layers"] == 62
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window_pattern": 6,
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if is_27b
        else config["head_dim"],
    }


def _refuse_other_structures(metadata: GGUFMetadata) -> None:
    """Refuse settings that would load but be computed wrongly."""
    if metadata.get("expert_count"):
        raise metadata.error(f"mixtures of experts are not supported, it has {metadata.get('expert_count')} experts")
    for key in ("attention.scale", "logit_scale", "embedding_scale", "residual_scale"):
        if metadata.get(key) is not None:
            raise metadata.error(f"metadata {metadata.architecture}.{key} is not supported")


def _check_sizes(metadata: GGUFMetadata, config: dict[str, Any], tensors: Mapping[str, GGUFTensorInfo]) -> int:
    """Check the metadata against the tensors; the vocabulary size."""
    num_layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    layers = {match[1] for name in tensors if (match := LAYER_PATTERN.fullmatch(name))}
    if len(layers) != num_layers:
        raise metadata.error(f"block_count is {num_layers}, but there are tensors of {len(layers)} layers")
    wanted = {
        "token_embd.weight": (None, config["hidden_size"]),
        "blk.0.attn_q.weight": (config["num_attention_heads"] * head_dim, config["hidden_size"]),
        "blk.0.attn_k.weight": (config["num_key_value_heads"] * head_dim, config["hidden_size"]),
        "blk.0.ffn_gate.weight": (config["intermediate_size"], config["hidden_size"]),
    }
    for name, (num_rows, num_columns) in wanted.items():
        if name not in tensors:
            raise metadata.error(f"the tensor {name!r} is missing")
        shape = tensors[name].shape
        if len(shape) != 2 or num_rows not in (None, shape[0]) or shape[1] != num_columns:
            rows = "vocabulary" if num_rows is None else num_rows
            raise metadata.error(
                f"the tensor {name!r} has shape {list(shape)}, but the metadata ask for [{rows}, {num_columns}]"
            )
    return tensors["token_embd.weight"].shape[0]


def _rope_scaling(metadata: GGUFMetadata, config: dict[str, Any], file: GGUFFile) -> dict[str, Any] | None:
    """Hugging Face's `rope_scaling`, from metadata or from the tensor of factors of Llama 3.1 files."""
    kind = metadata.get("rope.scaling.type")
    if kind is None and metadata.get("rope.scale_linear") is not None:
        return {"rope_type": "linear", "factor": metadata.number("rope.scale_linear")}
    if ROPE_FACTORS in file.tensors:
        if kind not in (None, "none"):
            raise metadata.error(f"rope scaling {kind!r} together with the tensor {ROPE_FACTORS!r} is not supported")
        return _rope_factors(metadata, config, file)
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn"):
        raise metadata.error(f"rope scaling {kind!r} is not supported in GGUF files; linear and yarn are")
    scaling = {"rope_type": kind, "factor": metadata.number("rope.scaling.factor")}
    understood = {"type", "factor", "original_context_length", "finetuned"}
    if kind == "yarn":
        understood |= {"attn_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"}
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
    for name in ("attn_factor", "yarn_attn_factor"):
        if metadata.get(f"rope.scaling.{name}") is not None:
            # GGUF multiplies the usual factor by this one; Hugging Face replaces the usual factor.
            usual = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
            details["attention_factor"] = metadata.number(f"rope.scaling.{name}") * usual
    return details


def _rope_factors(metadata: GGUFMetadata, config: dict[str, Any], file: GGUFFile) -> dict[str, Any] | None:
    """Divisors of the rotary frequencies, one per pair of a head, as longrope with one set of factors."""
    tensor = file.tensors[ROPE_FACTORS]
    num_pairs = config["head_dim"] // 2
    if tensor.shape != (num_pairs,) or tensor.ggml_type.name != "F32":
        raise metadata.error(
            f"the tensor {ROPE_FACTORS!r} must be F32 of shape [{num_pairs}], it is "
            f"{tensor.ggml_type.name} of shape {list(tensor.shape)}"
        )
    factors = file.read_blocks(tensor, (0,), tensor.shape).view("<f4").ravel().tolist()
    if not all(0 < factor < math.inf for factor in factors):
        raise metadata.error(f"the tensor {ROPE_FACTORS!r} has factors that are not positive numbers")
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


def _stored_dtype_name(file: GGUFFile) -> str:
    """The type that all matrices share if it is a half-precision one, else float32."""
    types = {tensor.ggml_type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return {"F16": "float16", "BF16": "bfloat16"}.get(types.pop(), "float32") if len(types) == 1 else "float32"
