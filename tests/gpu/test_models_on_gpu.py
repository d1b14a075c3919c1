"""Whole models on a GPU: against the torch backend on a CPU, against transformers, and against themselves.

The checkpoints have random weights in bfloat16: two public models' shapes, cut to four layers, and the tiny models of
every architecture. What bfloat16 may do to a result is measured, not guessed: by how much the reference itself moves
when it is computed in bfloat16 instead of float32.
"""

from random import Random
from typing import Any

import pytest
import torch
from gpu.whole_models import (
    NAMES,
    NUM_TOP,
    SHAPES,
    Reference,
    answer,
    logprobs_of,
    random_texts,
    start,
    write_checkpoint,
)
from narrow import present

from infinilm import RequestOutput, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = "cuda"

EDGES = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 599, 600]
LENGTHS = EDGES + Random(0).sample(range(1, 601), 64 - len(EDGES))
NUM_ANSWERED = 24
WINDOWED = ("mistral", "qwen2-window")


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The checkpoint that a test names, with transformers' model of it on the GPU."""
    return Reference.of(write_checkpoint(request.param, tmp_path_factory.mktemp(request.param), DEVICE), DEVICE)


def on(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("reference", names, indirect=True)


def prompts_for(reference: Reference) -> list[list[int]]:
    return random_texts(LENGTHS, reference.model.config.vocab_size)


def read_on_cpu(reference: Reference, outputs: list[RequestOutput], dtype: str) -> list[torch.Tensor]:
    """Log-probabilities of whole texts, computed in one pass each by the torch backend."""
    texts = [output.prompt_token_ids + output.token_ids for output in outputs]
    with start(reference.path, "cpu", dtype=dtype, num_kvcache_blocks=128) as llm:
        assert llm.executor.info.attention == "torch"
        return [logprobs_of(present(output.prompt_logprobs)) for output in answer(llm, texts, 1, NUM_TOP)]


@on(*NAMES)
def test_log_probabilities_are_those_of_a_cpu(reference: Reference) -> None:
    """Of prompts, computed in one go, and of answers, decoded one token at a time.

    Ours and transformers' bfloat16 on a CPU are off by means that differ by less than a tenth, and by maxima of which
    one is up to 1.6 times the other. Of mixtures of experts medians and deciles are compared: where rounding changes a
    router's choice, an error can be of any size.
    """
    prompts = random_texts((1, 40, 150, 17), reference.model.config.vocab_size, seed=5)
    with start(reference.path, DEVICE) as llm:
        assert llm.executor.info.attention == "triton"
        outputs = answer(llm, prompts, NUM_ANSWERED, NUM_TOP)
    ours = [logprobs_of([*present(output.prompt_logprobs), *present(output.logprobs)]) for output in outputs]
    exact = read_on_cpu(reference, outputs, "float32")
    rounded = read_on_cpu(reference, outputs, "bfloat16")
    for part in (slice(None, -NUM_ANSWERED), slice(-NUM_ANSWERED, None)):
        gpu, cpu, truth = (torch.cat([each[part] for each in read]) for read in (ours, rounded, exact))
        usual, error, between = (cpu - truth).abs(), (gpu - truth).abs(), (gpu - cpu).abs()
        mean, most = (torch.median, _last_decile) if reference.exact is not None else (torch.mean, torch.max)
        assert mean(error) <= 1.5 * mean(usual)
        assert most(error) <= 3 * most(usual)
        assert mean(between) <= 2 * mean(usual)


def _last_decile(errors: torch.Tensor) -> torch.Tensor:
    return errors.flatten().quantile(0.9)


@on(*NAMES)
def test_greedy_tokens_are_transformers(reference: Reference) -> None:
    with start(reference.path, DEVICE) as llm:
        reference.check_greedy(answer(llm, prompts_for(reference), NUM_ANSWERED), NUM_ANSWERED)


@on(*SHAPES, *WINDOWED)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"enforce_eager": True}, id="no graphs"),
        pytest.param({"max_num_batched_tokens": 64}, id="in chunks"),
        pytest.param({"max_num_seqs": 1}, id="one at a time"),
    ],
)
def test_settings_change_nothing(reference: Reference, settings: dict[str, Any]) -> None:
    """The tokens are transformers', as they are without the setting."""
    with start(reference.path, DEVICE, **settings) as llm:
        reference.check_greedy(answer(llm, prompts_for(reference), NUM_ANSWERED), NUM_ANSWERED)


@on(*SHAPES, *WINDOWED)
def test_preemption_changes_nothing(reference: Reference) -> None:
    # Where all layers have a window, few blocks are in use at a time.
    num_blocks = 20 if reference.model.config.model_type == "mistral" else 120
    with start(reference.path, DEVICE, num_kvcache_blocks=num_blocks) as llm:
        outputs = answer(llm, prompts_for(reference), NUM_ANSWERED)
        assert llm.stats().num_preemptions > 0
    reference.check_greedy(outputs, NUM_ANSWERED)


@on(*SHAPES, *WINDOWED)
def test_prefix_hits_change_nothing(reference: Reference) -> None:
    """Neither on prompts that were computed before, nor on a beginning that all rows of a step have in common."""
    prompts = prompts_for(reference)
    [common] = random_texts([400], reference.model.config.vocab_size, seed=9)
    together = [common + prompt[:20] for prompt in prompts]
    with start(reference.path, DEVICE) as llm:
        answer(llm, prompts, 1)
        again = answer(llm, prompts, NUM_ANSWERED)
        assert [output.metrics.num_cached_tokens for output in again] == [(length - 1) // 16 * 16 for length in LENGTHS]
        sharing = answer(llm, together, NUM_ANSWERED)
        assert sum(output.metrics.num_cached_tokens >= 400 for output in sharing) >= len(together) - 1
    reference.check_greedy(again, NUM_ANSWERED)
    reference.check_greedy(sharing, NUM_ANSWERED)


@on(*SHAPES)
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_the_same_steps_give_the_same_bits(reference: Reference, enforce_eager: bool) -> None:
    """Every kernel adds up in a fixed order. All rows go together, so that one graph serves for all their steps."""
    prompts = random_texts([40] * 16, reference.model.config.vocab_size)
    with start(reference.path, DEVICE, enable_prefix_caching=False, enforce_eager=enforce_eager) as llm:
        _, *runs = [answer(llm, prompts, NUM_ANSWERED, NUM_TOP) for _ in range(3)]  # the first captures graphs
    for first, second in zip(*runs, strict=True):
        assert first.token_ids == second.token_ids
        assert torch.equal(logprobs_of(first.prompt_logprobs), logprobs_of(second.prompt_logprobs))
        assert torch.equal(logprobs_of(first.logprobs), logprobs_of(second.logprobs))


@on(*SHAPES)
def test_decoding_never_waits_but_for_its_tokens(reference: Reference) -> None:
    """An event is the one thing that may be waited for; torch tells of everything else, like `item()` or `cpu()`."""
    num_rows = 32
    prompts = random_texts([30 + index for index in range(num_rows)], reference.model.config.vocab_size)
    with start(reference.path, DEVICE) as llm:
        for index, prompt in enumerate(prompts):
            llm.add_request(prompt, SamplingParams(temperature=0.6 * (index % 2), max_tokens=100, ignore_eos=True))
        for _ in range(10):
            llm.step_deltas()
        assert llm.stats().num_running == num_rows
        torch.cuda.set_sync_debug_mode("error")
        try:
            with pytest.raises(RuntimeError, match="synchronizing"):
                torch.ones(1, device=DEVICE).item()
            steps = [llm.step_deltas() for _ in range(20)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for deltas in steps:
        assert [(delta.error, len(delta.token_ids)) for delta in deltas] == [(None, 1)] * num_rows
