"""Models of every architecture written as GGUF files compute what transformers computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ARCHITECTURES, make_reference, reference_logits, save
from gguf_files import write_gguf
from packing import needs_native
from transformers import PreTrainedModel

from infinilm import LLM, SamplingParams
from infinilm.loading.checkpoint import open_checkpoint
from infinilm.models.quantization import choose_formats

TOKENS = list(range(3, 60))
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
# What llama.cpp takes for granted, and so no file says.
SETTINGS: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 32},
    "mixtral": {"sliding_window": None},
    "olmo3-yarn": {
        "rope_parameters": {
            "full_attention": {**YARN, "rope_type": "yarn", "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        }
    },
    # The text is longer than the original length, so that transformers takes the long factors, too.
    "phi3-longrope": {
        "original_max_position_embeddings": 32,
        "rope_parameters": {
            **ARCHITECTURES["phi3-longrope"][1]["rope_parameters"],
            "original_max_position_embeddings": 32,
        },
    },
}
SCORED = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)


def prompt_logprobs(model: Path, dtype: str = "float32") -> torch.Tensor:
    with LLM(model, device="cpu", num_kvcache_blocks=16, dtype=dtype) as llm:
        [output] = llm.generate([TOKENS], SCORED, use_tqdm=False)
    assert output.prompt_logprobs is not None
    return torch.tensor([entry.logprob for entry in output.prompt_logprobs if entry is not None])


def expected_logprobs(reference: PreTrainedModel) -> torch.Tensor:
    scores = reference_logits(reference, TOKENS).log_softmax(-1)
    return scores[torch.arange(len(TOKENS) - 1), torch.tensor(TOKENS[1:])]


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        ("llama-bias", "llama"),
        ("mistral-full", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
        ("gemma2", "gemma2"),
        ("gemma3-plain", "gemma3"),
        ("glm4", "glm4"),
        ("granite", "granite"),
        ("ministral3", "mistral3"),
        ("mistral-full", "mistral3"),
        ("olmo2", "olmo2"),
        ("olmo3-yarn", "olmo2"),
        ("phi3", "phi3"),
        ("phi3-longrope", "phi3"),
        ("smollm3-plain", "smollm3"),
        ("mixtral", "llama"),
        ("qwen3-moe", "qwen3moe"),
    ],
)
def test_gguf_models_compute_what_transformers_computes(kind: str, architecture: str, tmp_path: Path) -> None:
    reference = make_reference(kind, **SETTINGS.get(kind, {}))
    path = write_gguf(reference, tmp_path / "model.gguf", architecture)
    torch.testing.assert_close(prompt_logprobs(path), expected_logprobs(reference), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["mistral-full", "qwen2", "qwen3"])
def test_biases_a_family_does_not_have_are_ignored_in_the_config(kind: str, tmp_path: Path) -> None:
    """As in transformers: Mistral has no biases, Qwen2 has those of q, k and v, Qwen3 has none in its MLP."""
    flags = {"mlp_bias": True} if kind == "qwen3" else {"mlp_bias": True, "attention_bias": True}
    reference = make_reference(kind, **flags)
    directory = save(reference, tmp_path)
    assert '"mlp_bias": true' in (directory / "config.json").read_text()
    torch.testing.assert_close(prompt_logprobs(directory), expected_logprobs(reference), atol=1e-4, rtol=0)


def test_experts_may_have_tensors_of_their_own(tmp_path: Path) -> None:
    reference = make_reference("mixtral", sliding_window=None)
    path = write_gguf(reference, tmp_path / "model.gguf", "llama", splits_experts=True)
    torch.testing.assert_close(prompt_logprobs(path), expected_logprobs(reference), atol=1e-4, rtol=0)


@needs_native
def test_quantised_experts_stay_so(tmp_path: Path) -> None:
    """Computed from their blocks as from the floats that these stand for, but where two experts are nearly as good."""
    reference = make_reference("qwen3-moe")
    path = write_gguf(reference, tmp_path / "model.gguf", "qwen3moe", "Q8_0")
    differences = (prompt_logprobs(path, dtype="auto") - prompt_logprobs(path)).abs()
    assert (differences < 1.5e-3).float().mean() > 0.9
    checkpoint = open_checkpoint(path)
    found = choose_formats(checkpoint, "qwen3_moe", quantization=None, dtype="auto", device=torch.device("cpu")).by_name
    checkpoint.close()
    assert found["model.layers.1.mlp.experts.7.down_proj.weight"] == "Q8_0"
    assert "model.layers.1.mlp.gate.weight" not in found
