"""Families beyond Llama in the engine: transformers' tokens and log-probabilities, chunked, warm, preempted."""

from pathlib import Path

import pytest
import torch
from checkpoints import make_reference, reference_logits, save

from infinilm import LLM, SamplingParams

FAMILIES = [
    *(
        "gemma2-capped",
        "gemma3",
        "gemma4-shared",
        "gemma4-moe",
        "glm4",
        "granite",
        "ministral3",
        "olmo2",
        "olmo3",
        "phi3-window",
        "smollm3",
    ),
    *("glm4-moe", "gpt-oss", "mixtral", "qwen3-moe-mixed"),
    *("qwen3.5", "qwen3.5-moe", "qwen3-next", "deepseek-v2", "deepseek-v3"),
]
PROMPTS = [[(7 * i + 3 * j) % 150 for i in range(length)] for j, length in enumerate((45, 18, 45, 3, 70))]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)


@pytest.mark.parametrize("kind", FAMILIES)
def test_tokens_and_logprobs_are_transformers(kind: str, tmp_path: Path) -> None:
    reference = make_reference(kind, eos_token_id=159, bos_token_id=158)
    # Few blocks, so that requests are preempted; short chunks; the second round finds its prompts in the cache.
    with LLM(save(reference, tmp_path), num_kvcache_blocks=14, max_num_batched_tokens=32) as llm:
        for _ in range(2):
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            for prompt, output in zip(PROMPTS, outputs, strict=True):
                logits = reference_logits(reference, [*prompt, *output.token_ids])[len(prompt) - 1 : -1]
                expected = torch.log_softmax(logits, dim=-1)
                assert output.token_ids == expected.argmax(dim=-1).tolist()
                assert output.logprobs is not None
                found = torch.tensor([entry.logprob for entry in output.logprobs])
                torch.testing.assert_close(found, expected.max(dim=-1).values, atol=1e-4, rtol=0)
        assert sum(output.metrics.num_cached_tokens for output in outputs) > 0
