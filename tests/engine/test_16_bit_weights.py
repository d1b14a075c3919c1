"""Dense matrices of 16 bits stay so on a CPU that computes in float32, with the same results."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_reference, save
from gguf_files import write_gguf
from narrow import dense, present, worker_of
from packing import needs_native

from infinilm import LLM, InferEngine, SamplingParams
from infinilm.cli.info import collect_facts
from infinilm.kernels import native

pytestmark = needs_native

SMALL: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 64}
SCORED = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=0)
PROMPTS = [list(range(3, 3 + length)) for length in (40, 1, 7, 23)]
FAMILIES = (
    *("llama-tied", "llama-bias", "qwen3-moe", "gemma3", "gemma4-moe", "deepseek-v3", "qwen3.5", "gpt-oss"),
    *("mixtral", "phi3"),
)


def write(directory: Path, kind: str, dtype: torch.dtype, **settings: Any) -> Path:
    return save(make_reference(kind, **settings).to(dtype), directory)


def scores_of(llm: LLM) -> list[Any]:
    outputs = llm.generate(PROMPTS, SCORED, use_tqdm=False)
    return [(output.token_ids, output.logprobs, output.prompt_logprobs) for output in outputs]


def kept_in(llm: LLM) -> dict[str, torch.dtype]:
    shards = worker_of(llm.executor).model.weight_targets()
    return {name: dense(shard).tensor.dtype for name, shard in shards.items() if len(shard.full_shape) == 2}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", FAMILIES)
def test_results_have_the_bits_of_float32_weights(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    path = write(tmp_path, kind, dtype)
    with LLM(path, **SMALL) as llm:
        kept = kept_in(llm)
        found = scores_of(llm)
        assert llm.stats().guarantee == "yes"
    with LLM(path, dtype="float32", **SMALL) as llm:
        assert set(kept_in(llm).values()) == {torch.float32}
        assert scores_of(llm) == found
    wide = {name for name, own in kept.items() if own != dtype}
    assert {name.split(".")[-2] for name in wide} <= {"gate", "router", "proj", "kv_b_proj"}, wide  # routers, latents


@pytest.mark.parametrize("format", ["F16", "BF16"])
def test_a_gguf_file(tmp_path: Path, format: str) -> None:
    """Whose rows of queries and keys are in another order."""
    path = write_gguf(make_reference("llama-tied"), tmp_path / "model.gguf", "llama", format)
    with LLM(path, **SMALL) as llm:
        assert set(kept_in(llm).values()) == {{"F16": torch.float16, "BF16": torch.bfloat16}[format]}
        found = scores_of(llm)
    with LLM(path, dtype="float32", **SMALL) as llm:
        assert scores_of(llm) == found


@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_ranks_have_shares_of_them(tmp_path: Path, ranks: dict[str, int]) -> None:
    path = write(tmp_path, "qwen3-moe", torch.bfloat16)
    with LLM(path, **SMALL, **ranks) as llm:
        assert torch.bfloat16 in kept_in(llm).values()
        found = scores_of(llm)
    with LLM(path, dtype="float32", **SMALL, **ranks) as llm:
        assert scores_of(llm) == found


def test_the_memory_is_that_of_16_bits(tmp_path: Path) -> None:
    path = write(tmp_path, "llama-gqa", torch.bfloat16)
    num_bytes = {}
    for dtype in ("auto", "float32"):
        with LLM(path, dtype=dtype, **SMALL) as llm:
            num_bytes[dtype] = worker_of(llm.executor).model.num_bytes()
    assert num_bytes["auto"] < 0.6 * num_bytes["float32"]
    assert collect_facts(path)["memory"]["16-bit weights"]["weight_bytes"] == pytest.approx(num_bytes["auto"], rel=0.1)


def test_the_low_level_engine_has_float32(tmp_path: Path) -> None:
    """What it loads into its weights is not rounded."""
    path, weight = write(tmp_path, "llama-gqa", torch.bfloat16), torch.randn(64, 64)
    name = "model.layers.0.self_attn.q_proj.weight"
    with InferEngine(path, device_type="cpu") as engine:
        assert {each.dtype for each in engine.state_dict()[0].values()} == {torch.float32}
        hidden = present(engine.forward(input_ids=PROMPTS[:1], return_hidden_states=True).hidden_states)
        engine.load_param(name, weight)
        assert engine.state_dict()[0][name].equal(weight)
    assert hidden[0].dtype == torch.float32


def test_without_vector_instructions_torch_multiplies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's products of floats are slow then."""
    path = write(tmp_path, "llama-gqa", torch.bfloat16)
    monkeypatch.setattr(native, "has_vectors", lambda: False)
    assert collect_facts(path)["deterministic"] == "yes, with deterministic=True"
    with LLM(path, **SMALL) as llm:
        assert set(kept_in(llm).values()) == {torch.float32}
        assert llm.stats().guarantee.startswith("no, because deterministic=True is not set")
        [output] = llm.generate(PROMPTS[:1], SCORED, use_tqdm=False)
    with LLM(path, deterministic=True, **SMALL) as llm:
        assert llm.stats().guarantee == "yes"
        [ordered] = llm.generate(PROMPTS[:1], SCORED, use_tqdm=False)
    assert output.token_ids == ordered.token_ids
