"""Steps on a GPU: with collectives of an NCCL group of one rank inside captured graphs, and with draft tokens."""

from pathlib import Path

import pytest
import torch
from drafts import essence, guesses
from gpu.whole_models import random_texts, write_checkpoint
from narrow import present, worker_of

from infinilm import LLM, RequestOutput, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=20, max_tokens=24, seed=7, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, frequency_penalty=0.5),
] * 5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("qwen3-0.6b", tmp_path_factory.mktemp("qwen3"), "cuda")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_texts([5 + 7 * i for i in range(len(PARAMS))], 1000)


@pytest.fixture(scope="module")
def plain(checkpoint: Path, prompts: list[list[int]]) -> list[RequestOutput]:
    with LLM(checkpoint, dtype="float32", enable_prefix_caching=False) as llm:
        return llm.generate(prompts, PARAMS, use_tqdm=False)


@pytest.mark.parametrize("eager", [False, True])
def test_an_nccl_group_changes_no_answer(checkpoint: Path, prompts, plain, eager: bool) -> None:
    settings = {"executor": "processes", "enforce_eager": eager, "enable_prefix_caching": False}
    with LLM(checkpoint, dtype="float32", **settings) as llm:
        worker = worker_of(llm.executor)
        assert worker.group.communicates
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        graphs = present(worker._runner)._graphs
        assert (graphs is None) if eager else len(present(graphs)._graphs) >= 4
    assert [essence(output) for output in outputs] == [essence(output) for output in plain]


@pytest.mark.parametrize("eager", [False, True])
def test_drafts_change_no_answer_on_a_gpu(checkpoint: Path, prompts, plain, eager: bool) -> None:
    with LLM(checkpoint, dtype="float32", enforce_eager=eager, enable_prefix_caching=False) as llm:
        llm.scheduler.draft_source = guesses(plain, 4)
        outputs = llm.generate(prompts[:3], PARAMS[:3], use_tqdm=False)
        assert llm.stats().num_steps < 20
        outputs += llm.generate(prompts[3:], PARAMS[3:], use_tqdm=False)
    assert [essence(output) for output in outputs] == [essence(output) for output in plain]
