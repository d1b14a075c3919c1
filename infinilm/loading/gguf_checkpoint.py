"""A GGUF file seen as a Hugging Face checkpoint: its names, its config, its row order."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infinilm.errors import CheckpointError
from infinilm.loading.dequantize import dequantize, stored_dtype
from infinilm.loading.gguf import GGMLType, GGUFFile, GGUFTensorInfo
from infinilm.loading.piece import locate_piece
from infinilm.loading.tokenizer import Tokenizer

# Tensors are decoded in slices of about this many elements, few enough for the caches.
_SLICE_ELEMENTS = 2**18

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Their files keep the rows of q and k in another order, see `_unpermute`.
_PERMUTED_ARCHITECTURES = {"llama", "mistral"}

_ROPE_FACTORS = "rope_freqs.weight"
_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
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
}
_LAYER_PATTERN = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)")
_OUTER_PATTERN = re.compile(r"(\w+)\.(weight|bias)")


class GGUFCheckpoint:
    """One GGUF file; see `Checkpoint` for the attributes and methods."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._file = GGUFFile(self.path)
        try:
            metadata = _Metadata(self._file)
            self.config: dict[str, Any] = _make_config(metadata, self._file)
            self._tensors = _name_tensors(self._file)
        except BaseException:
            self._file.close()
            raise
        self.generation_config: dict[str, Any] = {
            key: self.config[key]
            for key in ("bos_token_id", "eos_token_id", "pad_token_id")
            if self.config[key] is not None
        }
        self.num_bytes = sum(tensor.num_bytes for tensor in self._tensors.values())
        self._has_permuted_rows = metadata.architecture in _PERMUTED_ARCHITECTURES

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's shape, in the order of the file."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        """Read one tensor: float16 and bfloat16 as stored, all else as float32."""
        tensor = self._tensor(name)
        target = torch.empty(tensor.shape, dtype=stored_dtype(tensor.ggml_type))
        self.read_into(name, target)
        return target

    def read_into(self, name: str, target: Tensor, starts: Sequence[int] | None = None) -> None:
        """Decode one tensor, or the piece of it that begins at `starts`, into `target`, slice by slice."""
        tensor = self._tensor(name)
        starts = locate_piece(self.path, name, tensor.shape, target.shape, starts)
        if not target.numel():
            return
        head_dim = None
        if self._has_permuted_rows and (".q_proj." in name or ".k_proj." in name):
            head_dim = self.config["head_dim"]
            if starts[0] % head_dim or len(target) % head_dim:
                raise CheckpointError(
                    f"{self.path}: rows {starts[0]} to {starts[0] + len(target)} of {name!r} cannot be read alone: "
                    f"rows change places inside a head, so a piece must hold whole heads of {head_dim} rows"
                )
        _, num_blocks = _covering_blocks(tensor.ggml_type, starts[-1], target.shape[-1])
        decoded_shape = (*target.shape[:-1], num_blocks * tensor.ggml_type.block_elements)
        row_elements = math.prod(decoded_shape[1:])
        granule = head_dim or 1  # a slice must hold whole heads where rows change places
        step = max(1, _SLICE_ELEMENTS // (row_elements * granule)) * granule
        for offset in range(0, len(target), step):
            self._fill(target[offset : offset + step], tensor, (starts[0] + offset, *starts[1:]), head_dim)

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that the metadata describes."""
        return Tokenizer.from_gguf(self._file.metadata)

    def close(self) -> None:
        """Unmap the file."""
        self._file.close()

    def _tensor(self, name: str) -> GGUFTensorInfo:
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: there is no tensor {name!r}") from None

    def _fill(self, part: Tensor, tensor: GGUFTensorInfo, starts: tuple[int, ...], head_dim: int | None) -> None:
        """Fill `part` with what begins at `starts`; with `head_dim` the rows of heads are put in order."""
        block = tensor.ggml_type
        first, num_blocks = _covering_blocks(block, starts[-1], part.shape[-1])
        raw = torch.from_numpy(self._file.read_blocks(tensor, (*starts[:-1], first), (*part.shape[:-1], num_blocks)))
        shape = (*part.shape[:-1], num_blocks * block.block_elements)
        if head_dim is None and _can_decode_into(part, shape, stored_dtype(block)):
            dequantize(raw, block, shape, part)
            return
        values = dequantize(raw, block, shape)
        values = values.narrow(-1, starts[-1] - first * block.block_elements, part.shape[-1])
        part.copy_(values if head_dim is None else _unpermute(values, head_dim))


def _covering_blocks(block: GGMLType, start: int, length: int) -> tuple[int, int]:
    """The first block and the number of blocks that hold `length` elements of a row from `start` on."""
    first = start // block.block_elements
    return first, -(-(start + length) // block.block_elements) - first


def _can_decode_into(part: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    is_same = part.shape == torch.Size(shape) and part.dtype == dtype
    return is_same and part.device.type == "cpu" and part.is_contiguous()


def _unpermute(rows: Tensor, head_dim: int) -> Tensor:
    """Put the rows of q or k (`[heads · head_dim, …]`) into Hugging Face's order.

    Rotary embedding turns pairs of rows. GGUF's llama keeps the two of a pair next to each other (0, 1),
    (2, 3), …; Hugging Face keeps all first ones before all second ones: (0, half), (1, half + 1), …
    """
    return rows.view(-1, head_dim // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _name_tensors(file: GGUFFile) -> dict[str, GGUFTensorInfo]:
    """The tensors to load, by Hugging Face's names."""
    tensors: dict[str, GGUFTensorInfo] = {}
    for name, tensor in file.tensors.items():
        if name == _ROPE_FACTORS:
            continue
        hf_name = _hf_name(name)
        if hf_name in tensors:
            raise CheckpointError(f"{file.path}: {tensors[hf_name].name!r} and {name!r} are both {hf_name!r}")
        tensors[hf_name] = tensor
    return tensors


def _hf_name(name: str) -> str:
    """Hugging Face's name for a tensor. An unknown one keeps its own, so that strict loading lists it."""
    if match := _LAYER_PATTERN.fullmatch(name):
        layer, part, kind = match.groups()
        if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
    elif (match := _OUTER_PATTERN.fullmatch(name)) and match[1] in _OUTER_NAMES:
        return f"{_OUTER_NAMES[match[1]]}.{match[2]}"
    return name


class _Metadata:
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
        """Make an error that names the file."""
        return CheckpointError(f"{self._path}: {message}")

    def get(self, key: str) -> Any:
        """The value of one of the architecture's keys, None if it is absent."""
        return self._pairs.get(f"{self.architecture}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        """One of the architecture's keys that must be a positive integer; required without a default."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or value <= 0:
            raise self._bad_value(key, value, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """One of the architecture's keys that must be a positive number; required without a default."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self._bad_value(key, value, "a positive number")
        return float(value)

    def token_id(self, name: str, vocab_size: int) -> int | None:
        """A special token's id, such as `eos`."""
        key = f"tokenizer.ggml.{name}_token_id"
        value = self._pairs.get(key)
        if value is None or value == 0xFFFFFFFF:  # the format's own way of saying that there is none
            return None
        if type(value) is not int or not 0 <= value < vocab_size:
            raise self.error(f"{key} is {value!r}, which is no token of a vocabulary of {vocab_size}")
        return value

    def scaling_keys(self) -> set[str]:
        """What follows `rope.scaling.` in the architecture's keys."""
        prefix = f"{self.architecture}.rope.scaling."
        return {key.removeprefix(prefix) for key in self._pairs if key.startswith(prefix)}

    def _bad_value(self, key: str, value: Any, wanted: str) -> CheckpointError:
        seen = "missing" if value is None else repr(value)[:80]
        return self.error(f"metadata {self.architecture}.{key} must be {wanted}, it is {seen}")


def _make_config(metadata: _Metadata, file: GGUFFile) -> dict[str, Any]:
    """The equal of a Hugging Face `config.json`."""
    _refuse_other_structures(metadata)
    tensors = file.tensors
    hidden_size = metadata.integer("embedding_length")
    num_heads = metadata.integer("attention.head_count")
    head_dim = metadata.integer("attention.key_length", hidden_size // num_heads)
    sliding_window = metadata.get("attention.sliding_window")
    model_type = metadata.architecture
    if sliding_window is not None:
        sliding_window = metadata.integer("attention.sliding_window")
        if model_type in ("qwen2", "qwen3"):
            raise metadata.error(f"sliding window attention in {model_type} files is not supported")
        model_type = "mistral"
    config: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [_ARCHITECTURES[model_type]],
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
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": _stored_dtype_name(file),
    }
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.integer(key, head_dim) != head_dim:
            raise metadata.error(f"{key} is {metadata.get(key)}, and the head dimension {head_dim}; they must agree")
    if head_dim % 2:
        raise metadata.error(f"the head dimension {head_dim} is odd; rotary embedding needs an even one")
    config["vocab_size"] = _check_sizes(metadata, config, tensors)
    config["rope_scaling"] = _rope_scaling(metadata, config, file)
    config |= _token_ids(metadata, config["vocab_size"])
    return config


def _refuse_other_structures(metadata: _Metadata) -> None:
    """Refuse what would load but compute something else."""
    if metadata.get("expert_count"):
        raise metadata.error(f"mixtures of experts are not supported, it has {metadata.get('expert_count')} experts")
    for key in ("attention.scale", "logit_scale", "embedding_scale", "residual_scale"):
        if metadata.get(key) is not None:
            raise metadata.error(f"metadata {metadata.architecture}.{key} is not supported")


def _check_sizes(metadata: _Metadata, config: dict[str, Any], tensors: Mapping[str, GGUFTensorInfo]) -> int:
    """Hold the metadata against the tensors before anyone builds a model from them; the vocabulary size."""
    num_layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    layers = {match[1] for name in tensors if (match := _LAYER_PATTERN.fullmatch(name))}
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


def _rope_scaling(metadata: _Metadata, config: dict[str, Any], file: GGUFFile) -> dict[str, Any] | None:
    """Hugging Face's `rope_scaling`, from metadata or from the tensor of factors of Llama 3.1 files."""
    kind = metadata.get("rope.scaling.type")
    if kind is None and metadata.get("rope.scale_linear") is not None:
        return {"rope_type": "linear", "factor": metadata.number("rope.scale_linear")}
    if _ROPE_FACTORS in file.tensors:
        if kind not in (None, "none"):
            raise metadata.error(f"rope scaling {kind!r} together with the tensor {_ROPE_FACTORS!r} is not supported")
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


def _yarn_details(metadata: _Metadata, factor: float) -> dict[str, Any]:
    details: dict[str, Any] = {}
    if metadata.get("rope.scaling.original_context_length") is not None:
        details["original_max_position_embeddings"] = metadata.integer("rope.scaling.original_context_length")
    for name in ("beta_fast", "beta_slow"):
        if metadata.get(f"rope.scaling.yarn_{name}") is not None:
            details[name] = metadata.number(f"rope.scaling.yarn_{name}")
    for name in ("attn_factor", "yarn_attn_factor"):
        if metadata.get(f"rope.scaling.{name}") is not None:
            # GGUF multiplies the usual factor by this one, Hugging Face puts its own in the place of it.
            usual = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
            details["attention_factor"] = metadata.number(f"rope.scaling.{name}") * usual
    return details


def _rope_factors(metadata: _Metadata, config: dict[str, Any], file: GGUFFile) -> dict[str, Any] | None:
    """Divisors of the rotary frequencies, one per pair of a head; longrope with one set says just this."""
    tensor = file.tensors[_ROPE_FACTORS]
    num_pairs = config["head_dim"] // 2
    if tensor.shape != (num_pairs,) or tensor.ggml_type.name != "F32":
        raise metadata.error(
            f"the tensor {_ROPE_FACTORS!r} must be F32 of shape [{num_pairs}], it is "
            f"{tensor.ggml_type.name} of shape {list(tensor.shape)}"
        )
    factors = file.read_blocks(tensor, (0,), tensor.shape).view("<f4").ravel().tolist()
    if not all(0 < factor < math.inf for factor in factors):
        raise metadata.error(f"the tensor {_ROPE_FACTORS!r} has factors that are not positive numbers")
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


def _token_ids(metadata: _Metadata, vocab_size: int) -> dict[str, Any]:
    """Special tokens; a model may end with any of several tokens, then `eos_token_id` is a list."""
    ends = [metadata.token_id(name, vocab_size) for name in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(token for token in ends if token is not None))
    return {
        "bos_token_id": metadata.token_id("bos", vocab_size),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": metadata.token_id("padding", vocab_size),
    }


def _stored_dtype_name(file: GGUFFile) -> str:
    """The type that all matrices share if it is a half-precision one, else float32."""
    types = {tensor.ggml_type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return {"F16": "float16", "BF16": "bfloat16"}.get(types.pop(), "float32") if len(types) == 1 else "float32"
