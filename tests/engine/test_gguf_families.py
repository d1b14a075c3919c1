"""GGUF files of later architectures, with llama.cpp's names and transformations, compute what transformers computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_reference
from engine.test_gguf_models import expected_logprobs, prompt_logprobs
from gguf_families import write_family

# What llama.cpp takes for granted, and so no file says.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek v2": ("deepseek-v2", "deepseek2", {}),
    "deepseek v2 lite": ("deepseek-v2-plain", "deepseek2", {}),
    "deepseek v3": (
        "deepseek-v3",
        "deepseek2",
        {
            "attention_bias": False,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "mscale": 0.7,
                "mscale_all_dim": 0.7,
            },
        },
    ),
    "gemma4": ("gemma4", "gemma4", {}),
    "gemma4, shared": ("gemma4-shared", "gemma4", {"attention_bias": False}),
    "gemma4, experts": ("gemma4-moe", "gemma4", {"attention_bias": False}),
    "glm4moe": ("glm4-moe", "glm4moe", {}),
    "glm4moe, plain": ("glm4-moe-plain", "glm4moe", {"head_dim": 16}),
    "gpt-oss": ("gpt-oss", "gpt-oss", {"swiglu_limit": 7.0}),
    "qwen35": ("qwen3.5-tied", "qwen35", {}),
    "qwen35, tiled": (
        "qwen3.5-tied",
        "qwen35",
        {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_value_head_dim": 24},
    ),
    "qwen35moe": ("qwen3.5-moe-tied", "qwen35moe", {"linear_num_key_heads": 2, "linear_num_value_heads": 8}),
    "qwen3next": ("qwen3-next-plain", "qwen3next", {"norm_topk_prob": True, "linear_num_key_heads": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_files_compute_what_transformers_computes(case: str, tmp_path: Path) -> None:
    kind, architecture, settings = CASES[case]
    reference = make_reference(kind, **settings)
    num_more = architecture in ("glm4moe", "qwen35", "qwen35moe")
    path = write_family(reference, tmp_path / "model.gguf", architecture, num_more=num_more)
    torch.testing.assert_close(prompt_logprobs(path), expected_logprobs(reference), atol=1e-4, rtol=0)
