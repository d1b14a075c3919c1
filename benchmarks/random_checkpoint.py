"""Writes a checkpoint with random weights of a public model's shape, to measure speeds with.

    python -m benchmarks.random_checkpoint qwen3-0.6b DIRECTORY         # 1.2 GB
    python -m benchmarks.random_checkpoint qwen3-moe-24l DIRECTORY      # 31 GB
    python -m benchmarks.random_checkpoint qwen3.5-4b DIRECTORY         # 8 GB
    python -m benchmarks.random_checkpoint llama-3.1-8b DIRECTORY --quantization fp8     # 9 GB
    python -m benchmarks.random_checkpoint llama-3.1-8b DIRECTORY --quantization q4_k    # 5 GB, DIRECTORY/model.gguf

`--quantization`: fp8 (compressed-tensors, a scale for each row), fp8-block (blocks of 128 x 128), awq, gptq, int4
(compressed-tensors, groups of 128), q4_k (GGUF). Embedding and head stay dense, except in GGUF files. Weights are drawn
on a GPU if there is one. There is no tokenizer: requests are token ids.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.random_quantized import DEVIATION, QUANTIZATIONS, Draw, write_q4_k
from infinilm.models import ModelConfig
from infinilm.models.auto import outline_model

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    "qwen3-moe-24l": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
    },
    "qwen3.5-4b": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": False,
    },
}
Q4_K = "q4_k"
OUTER_NAMES = ("model.embed_tokens.weight", "lm_head.weight")


def write(config: dict[str, Any], directory: Path, quantization: str | None = None) -> int:
    """Write the checkpoint, a file for each layer; returns the bytes of its weights."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = {"bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16", **config}
    targets = outline_model(ModelConfig.from_dict(settings), torch.bfloat16).weight_targets()
    shapes = {name: shard.full_shape for name, shard in targets.items()}
    if quantization == Q4_K:
        return write_q4_k(settings, shapes, directory / "model.gguf")
    if quantization is not None:
        settings["quantization_config"] = {**QUANTIZATIONS[quantization].config, "ignore": ["lm_head"]}
    (directory / "config.json").write_text(json.dumps(settings, indent=1))
    draw = Draw()

    def tensors(name: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
        if name.endswith("norm.weight"):
            return {name: torch.ones(shape, dtype=torch.bfloat16)}
        if quantization is None or name in OUTER_NAMES or len(shape) != 2:
            return {name: draw.normal(shape, DEVIATION, torch.bfloat16)}
        drawn = QUANTIZATIONS[quantization].draw(draw, *shape)
        return {name.removesuffix("weight") + end: tensor for end, tensor in drawn.items()}

    files: dict[str, list[str]] = {}
    for name in shapes:
        _, is_layer, rest = name.partition("layers.")
        part = f"layer{rest.partition('.')[0]}" if is_layer else "rest"
        files.setdefault(f"{part}.safetensors", []).append(name)
    num_bytes = 0
    index: dict[str, str] = {}
    for file, names in files.items():
        weights = {key: tensor for name in names for key, tensor in tensors(name, shapes[name]).items()}
        save_file(weights, directory / file, metadata={"format": "pt"})
        num_bytes += sum(weight.nbytes for weight in weights.values())
        index |= dict.fromkeys(weights, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--quantization", choices=[*QUANTIZATIONS, Q4_K])
    arguments = parser.parse_args()
    if arguments.quantization == Q4_K and SHAPES[arguments.shape]["model_type"] != "llama":
        parser.error(f"--quantization {Q4_K} writes Llamas only, and {arguments.shape} is none")
    num_bytes = write(SHAPES[arguments.shape], arguments.directory, arguments.quantization)
    print(f"{num_bytes / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
