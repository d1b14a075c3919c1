"""Published models against transformers: greedy tokens and log-probabilities. `tests/real_weights.py` fetches them."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import reference_logits
from real_weights import GEMMA3_270M, QWEN2_5_CODER, RealModel
from transformers import PreTrainedModel

from infinilm import LLM, SamplingParams
from infinilm.loading.checkpoint import open_checkpoint
from infinilm.outputs import RequestOutput

PROMPTS = [
    "The three largest cities of France are",
    "def fibonacci(n):\n    ",
    "In 1969, the first people who",
]
NUM_TOKENS = 10
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)


@dataclass(frozen=True)
class Case:
    path: Path
    reference: PreTrainedModel


@pytest.fixture(scope="module", params=[GEMMA3_270M, QWEN2_5_CODER], ids=lambda model: model.name)
def case(request: pytest.FixtureRequest) -> Case:
    model: RealModel = request.param
    path = model.path()
    with closing(open_checkpoint(path)) as checkpoint:
        settings = {name: value for name, value in checkpoint.config.items() if name not in ("qkv_bias", "torch_dtype")}
        config = transformers.AutoConfig.for_model(**settings)
        config._attn_implementation = "eager"
        reference: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config)
        weights = {name: checkpoint.read(name).float() for name in checkpoint.shapes()}
    missing, unexpected = reference.load_state_dict(weights, strict=False)
    assert (unexpected, set(missing) - {"lm_head.weight"}) == ([], set())
    return Case(path, reference.eval())


def expected_logprobs(case: Case, output: RequestOutput) -> torch.Tensor:
    tokens = [*output.prompt_token_ids, *output.token_ids]
    logits = reference_logits(case.reference, tokens)[len(output.prompt_token_ids) - 1 : -1]
    return logits.log_softmax(-1)


def test_plain_weights_give_transformers_tokens(case: Case) -> None:
    """Twice: the second time prompts are found in the cache. Few tokens at a time, so that prompts are cut."""
    with LLM(case.path, device="cpu", dtype="float32", max_num_batched_tokens=8, num_kvcache_blocks=24) as llm:
        for _ in range(2):
            for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False):
                expected = expected_logprobs(case, output)
                assert output.token_ids == expected.argmax(-1).tolist()
                assert output.logprobs is not None
                found = torch.tensor([entry.logprob for entry in output.logprobs])
                torch.testing.assert_close(found, expected.max(-1).values, atol=1e-3, rtol=0)


def test_quantised_weights_are_near(case: Case) -> None:
    """Activations are rounded to 8 bits where weights stay quantised."""
    with LLM(case.path, device="cpu", num_kvcache_blocks=24) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    differences, num_best = [], 0
    for output in outputs:
        expected = expected_logprobs(case, output)
        assert output.logprobs is not None
        found = torch.tensor([entry.logprob for entry in output.logprobs])
        differences.append((found - expected.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]).abs())
        num_best += sum(token == best for token, best in zip(output.token_ids, expected.argmax(-1), strict=True))
    assert torch.cat(differences).mean() < 0.1
    assert num_best >= 0.9 * len(PROMPTS) * NUM_TOKENS
