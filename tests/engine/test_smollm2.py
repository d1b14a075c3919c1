"""The embedded real model, held against transformers' own reading of the same GGUF file."""

import pytest
import torch
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from infinilm import LLM, SamplingParams
from infinilm.bench.transformers_peer import TransformersPeer, compare

PROMPTS = ["The capital of France is", "def fib(n):", "日本の首都は", "Emoji: 🙂🚀 and then", "1, 1, 2, 3, 5, 8,"]


@pytest.fixture(scope="module")
def real_llm(smollm2):
    with LLM(smollm2, max_model_len=1024, dtype="float32") as llm:
        yield llm


def test_tokens_and_logprobs_are_transformers(real_llm, smollm2) -> None:
    """Raw text, chat, code and scripts: every greedy token is the reference's own most likely one."""
    peer = TransformersPeer(smollm2, dtype="float32", device="cpu")
    # Its weights as transformers itself reads them from the file, not as we do.
    theirs = load_gguf_checkpoint(smollm2, return_tensors=True, model_to_load=peer.model)["tensors"]
    problems = peer.model.load_state_dict(
        {name: torch.as_tensor(values) for name, values in theirs.items()}, strict=False
    )
    assert problems.missing_keys in ([], ["lm_head.weight"])
    found = compare(real_llm, peer, max_tokens=24, tie_width=1e-3)
    assert found.num_prompts >= 20
    assert found.num_tokens >= 20 * 20
    assert found.num_wrong == 0, found.examples
    assert found.max_prompt_difference < 1e-3
    assert found.max_output_difference < 1e-3


def test_company_chunks_and_prefix_hits_change_no_token(real_llm, smollm2) -> None:
    params = [SamplingParams(temperature=0, max_tokens=12), SamplingParams(seed=4, top_p=0.9, max_tokens=12)] * 3
    together = [o.token_ids for o in real_llm.generate(PROMPTS, params[: len(PROMPTS)], use_tqdm=False)]
    alone = [real_llm.generate(*pair, use_tqdm=False)[0].token_ids for pair in zip(PROMPTS, params, strict=False)]
    assert together == alone
    settings = {"max_model_len": 1024, "dtype": "float32"}
    with LLM(smollm2, max_num_batched_tokens=5, num_kvcache_blocks=8, **settings) as tight:
        chunked = [o.token_ids for o in tight.generate(PROMPTS, params[: len(PROMPTS)], use_tqdm=False)]
    assert chunked == alone


def test_chat_ends_by_itself_and_streams_the_same_text(real_llm) -> None:
    messages = [{"role": "user", "content": "Answer with one word: what is the capital of France?"}]
    params = SamplingParams(temperature=0, max_tokens=60)
    [output] = real_llm.chat(messages, params, use_tqdm=False)
    assert "Paris" in output.text
    assert output.finish_reason == "stop"
    assert "".join(real_llm.stream(real_llm.chat_prompt(messages), params)) == output.text
