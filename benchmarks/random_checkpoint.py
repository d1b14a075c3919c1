"""Writes a checkpoint with random weights of a public model's shape, to measure speeds with.

    python -m benchmarks.random_checkpoint qwen3-moe-24l DIRECTORY      # 31 GB
    python -m benchmarks.random_checkpoint qwen3.5-4b DIRECTORY         # 8 GB

Weights are drawn on a GPU if there is one. There is no tokenizer: requests are token ids.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from infinilm.models import ModelConfig
from infinilm.models.auto import outline_model

SHAPES: dict[str, dict[str, Any]] = {
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
}
DEVIATION = 0.02


def write(config: dict[str, Any], directory: Path) -> int:
    """Write the checkpoint, a file for each layer; returns the bytes of its weights."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = {"bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16", **config}
    (directory / "config.json").write_text(json.dumps(settings, indent=1))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=torch.bfloat16)
        return (torch.randn(shape, generator=generator, device=device) * DEVIATION).to("cpu", torch.bfloat16)

    files: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shard in outline_model(ModelConfig.from_dict(settings), torch.bfloat16).weight_targets().items():
        _, is_layer, rest = name.partition("layers.")
        part = f"layer{rest.partition('.')[0]}" if is_layer else "rest"
        files.setdefault(f"{part}.safetensors", {})[name] = shard.full_shape
    num_bytes = 0
    for file, shapes in files.items():
        weights = {name: draw(name, shape) for name, shape in shapes.items()}
        save_file(weights, directory / file, metadata={"format": "pt"})
        num_bytes += sum(weight.nbytes for weight in weights.values())
    index = {name: file for file, shapes in files.items() for name in shapes}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    print(f"{write(SHAPES[arguments.shape], arguments.directory) / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
