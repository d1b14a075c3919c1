"""GGUF files of later architectures, with llama.cpp's names and transformations, compute what transformers computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_reference
from engine.test_gguf_models import expected_logprobs, prompt_logprobs
from gguf_families import write_family
from packing import needs_native

from infinilm import LLM
from infinilm.errors import CheckpointError
from infinilm.loading.checkpoint import open_checkpoint
from infinilm.loading.parts import find_parts
from infinilm.models.quantization import choose_formats

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
    "gemma4, shared": (
        "gemma4-shared",
        "gemma4",
        {
            "attention_bias": False,
            "layer_types": [*(["sliding_attention"] * 2), "full_attention", "sliding_attention", "full_attention"],
        },
    ),
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


@pytest.mark.parametrize("case", ["deepseek v3", "gpt-oss", "qwen35moe", "qwen3next"])
def test_ranks_read_their_parts(case: str, tmp_path: Path) -> None:
    """Rows and columns from the middle, as a rank of several has them; whole heads, and gates with their ups."""
    kind, architecture, settings = CASES[case]
    checkpoint = open_checkpoint(write_family(make_reference(kind, **settings), tmp_path / "model.gguf", architecture))
    for name, shape in checkpoint.shapes().items():
        whole = checkpoint.read(name)
        assert whole.shape == shape
        halves = [size // 2 if size % 2 == 0 else size for size in shape]
        starts = [size - half for size, half in zip(shape, halves, strict=True)]
        part = torch.empty(halves)
        checkpoint.read_into(name, part, starts)
        assert part.equal(whole[tuple(slice(start, None) for start in starts)])
    checkpoint.close()


def test_older_files_have_keys_and_values_as_one(tmp_path: Path) -> None:
    reference = make_reference("deepseek-v2")
    path = write_family(reference, tmp_path / "model.gguf", "deepseek2", is_older=True)
    torch.testing.assert_close(prompt_logprobs(path), expected_logprobs(reference), atol=1e-4, rtol=0)


def test_older_files_have_all_projections_as_one(tmp_path: Path) -> None:
    kind, architecture, settings = CASES["qwen3next"]
    reference = make_reference(kind, **settings)
    path = write_family(reference, tmp_path / "model.gguf", architecture, is_older=True)
    torch.testing.assert_close(prompt_logprobs(path), expected_logprobs(reference), atol=1e-4, rtol=0)


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    reference = make_reference("gpt-oss", swiglu_limit=7.0)
    path = write_family(reference, tmp_path / "model.gguf", "gpt-oss", "MXFP4")
    checkpoint = open_checkpoint(path)
    assert checkpoint.formats()["model.layers.0.mlp.experts.0.down_proj.weight"] == "MXFP4"
    state = reference.state_dict()
    before = state["model.layers.0.mlp.experts.gate_up_proj"].clone()
    parts = find_parts({name: tuple(tensor.shape) for name, tensor in state.items()}, reference.config.to_dict())
    for name, part in parts.items():
        stored = state[part.source]
        (stored if part.source == name else part.cut(stored)).copy_(checkpoint.read(name))  # both are views
    checkpoint.close()
    difference = (state["model.layers.0.mlp.experts.gate_up_proj"] - before).abs()
    assert 1e-3 < difference.mean() < 0.2 * before.abs().mean()
    torch.testing.assert_close(prompt_logprobs(path), expected_logprobs(reference), atol=1e-4, rtol=0)


@needs_native
def test_quantised_matrices_stay_so(tmp_path: Path) -> None:
    """Computed from their blocks as from the floats that these stand for, but where two experts are nearly as good."""
    kind, architecture, settings = CASES["qwen35moe"]
    path = write_family(make_reference(kind, **settings), tmp_path / "model.gguf", architecture, "Q4_0")
    differences = (prompt_logprobs(path, dtype="auto") - prompt_logprobs(path)).abs()
    assert (differences < 2e-2).float().mean() > 0.9
    checkpoint = open_checkpoint(path)
    found = choose_formats(
        checkpoint, "qwen3_5_moe_text", quantization=None, dtype="auto", device=torch.device("cpu")
    ).by_name
    checkpoint.close()
    assert found["model.layers.0.mlp.experts.7.down_proj.weight"] == "Q4_0"
    assert found["model.layers.0.linear_attn.in_proj_v.weight"] == "Q4_0"
    assert found["model.layers.0.linear_attn.out_proj.weight"] == "Q8_0"  # its columns are in another order
    assert not {"model.layers.0.mlp.gate.weight", "model.layers.0.mlp.shared_expert_gate.weight"} & set(found)


@pytest.mark.parametrize(
    ("case", "key", "value", "message"),
    [
        ("glm4moe", "expert_gating_func", 1, "expert_gating_func=1 is not supported for glm4moe"),
        ("glm4moe", "nextn_predict_layers", 9, "nextn_predict_layers leaves -6"),
        ("deepseek v2", "expert_weights_norm", True, "expert_weights_norm=True is not supported"),
        ("deepseek v2", "attention.temperature_scale", 0.1, "attention.temperature_scale is not supported"),
        ("qwen35", "ssm.inner_size", 63, "ssm.inner_size=63 is no multiple of ssm.time_step_rank=4"),
        ("qwen35", "ssm.group_count", 3, "linear_num_key_heads=3, .* must be positive integers"),
        ("qwen35moe", "expert_count", 0, "expert_count must be a positive integer"),
        ("gemma4", "attention.sliding_window_pattern", [True], "sliding_window_pattern has 1 layers, not 4"),
        ("gemma4", "attention.head_count_kv", [2, 2], "must be 4 positive integers"),
        ("gemma4", "rope.dimension_count_swa", 8, "rope.dimension_count_swa must be"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    case: str, key: str, value: object, message: str, tmp_path: Path
) -> None:
    kind, architecture, settings = CASES[case]
    changes = {f"{architecture}.{key}": value}
    path = write_family(make_reference(kind, **settings), tmp_path / "model.gguf", architecture, changes=changes)
    with pytest.raises(CheckpointError, match=message):
        LLM(path, device="cpu", num_kvcache_blocks=16)
