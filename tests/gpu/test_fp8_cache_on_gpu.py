"""Whole models with a cache of 8-bit floats on a GPU: circumstances change no bits, and it is near a bfloat16 cache."""

from pathlib import Path

import pytest
import torch
from gpu.whole_models import random_texts, write_checkpoint

from infinilm import LLM, SamplingParams
from infinilm.bench.circumstances import all_circumstances
from infinilm.bench.determinism import Session, Workload, check
from infinilm.config import Config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SCORED = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, prompt_logprobs=0)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-gqa", "gemma3", "gpt-oss"])
def test_circumstances(name: str, tmp_path: Path) -> None:
    path = write_checkpoint(name, tmp_path / "model", "cuda")
    longest, vocab_size = (2049, 100_000) if name == "llama-3.1-8b" else (513, 160)
    work = Workload.make(vocab_size, num_requests=16, max_tokens=32, max_prompt_len=longest, num_others=100)
    config = Config(
        model=path,
        device="cuda",
        max_model_len=4096,
        deterministic=True,
        kv_cache_dtype="fp8",
        gpu_memory_utilization=0.2,  # so that tests can run side by side
    )
    session = Session(config, work)
    try:
        circumstances = all_circumstances(session, num_others=100)
        circumstances = [each for each in circumstances if each.name not in ("AsyncLLM", "server")]
        assert session.engine().stats().guarantee == "yes"
        assert [finding for finding in check(session, circumstances) if not finding.is_equal] == []
    finally:
        session.close()


@pytest.mark.parametrize("name", ["qwen3-0.6b", "gemma3"])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_scores_are_near_those_of_a_wide_cache(name: str, enforce_eager: bool, tmp_path: Path) -> None:
    """Prompts of all ways to be attended: short, in chunks, and long enough for cuDNN."""
    path = write_checkpoint(name, tmp_path / "model", "cuda")
    longest, vocab_size = (9000, 100_000) if name == "qwen3-0.6b" else (500, 160)
    prompts = random_texts((5, 100, longest), vocab_size)
    settings = {
        "device": "cuda",
        "enforce_eager": enforce_eager,
        "max_model_len": longest + 64,
        "gpu_memory_utilization": 0.3,
    }
    scores, block_bytes = [], []
    for kind in ("auto", "fp8"):
        with LLM(path, kv_cache_dtype=kind, **settings) as llm:
            outputs = llm.generate(prompts, SCORED, use_tqdm=False)
            block_bytes.append(llm.memory.block_bytes)
        found = [entry.logprob for each in outputs for entry in each.prompt_logprobs or () if entry is not None]
        scores.append(torch.tensor(found))
    assert 0 < (scores[1] - scores[0]).abs().mean() < 0.1
    assert block_bytes[1] < 0.55 * block_bytes[0]
