"""Checkpoints of random weights: every format is loaded, and its answers are finite."""

from pathlib import Path

import pytest

from benchmarks.random_checkpoint import Q4_K, SHAPES, write
from benchmarks.random_quantized import QUANTIZATIONS
from infinilm import LLM, SamplingParams
from infinilm.loading.checkpoint import open_checkpoint

TINY = {
    **SHAPES["llama-3.1-8b"],
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
}


@pytest.mark.parametrize("quantization", [None, *QUANTIZATIONS, Q4_K])
def test_random_weights_have_the_wanted_size_and_give_finite_answers(tmp_path: Path, quantization: str | None) -> None:
    num_bytes = write(TINY, tmp_path, quantization)
    path = tmp_path / "model.gguf" if quantization == Q4_K else tmp_path
    assert num_bytes >= sum(file.stat().st_size for file in tmp_path.iterdir()) * 0.8
    checkpoint = open_checkpoint(path)
    weight = checkpoint.read("model.layers.1.mlp.down_proj.weight").float()
    checkpoint.close()
    assert 0.015 < weight.std() < 0.03
    assert weight.mean().abs() < 0.005
    with LLM(str(path), device="cpu", num_kvcache_blocks=16) as llm:
        (output,) = llm.generate([[3, 4, 5]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert output.outputs[0].finish_reason == "length"  # NaN would end it with an error
