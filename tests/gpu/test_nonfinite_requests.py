"""A request that computes NaN or infinity on a GPU changes no other request's answer.

Rows of a step may be computed in another order than alone, so that a near tie may go either way: as in all tests of
whole models, transformers reads the answers, and each token must be its choice.
"""

from pathlib import Path
from random import Random

import pytest
import torch
from gpu.whole_models import Reference, answer, random_texts, start, write_checkpoint
from safetensors.torch import load_file, save_file

from infinilm import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = "cuda"
NUM_ANSWERED = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_ANSWERED, ignore_eos=True)
LENGTHS = (1, 15, 16, 17, 40, 64, 100, 129, 300)


@pytest.fixture(scope="module", params=["llama-gqa", "mistral", "qwen3-0.6b"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A checkpoint and transformers' model of it."""
    return Reference.of(write_checkpoint(request.param, tmp_path_factory.mktemp(request.param), DEVICE), DEVICE)


@pytest.fixture(scope="module")
def nonfinite_path(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same checkpoint, but that the embeddings of the last two tokens are NaN and infinite."""
    directory = tmp_path_factory.mktemp("nonfinite")
    weights = load_file(reference.path / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    weights.setdefault("lm_head.weight", embedding.clone())
    embedding[-2:] = torch.tensor([[float("nan")], [float("inf")]])
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = (reference.path / "config.json").read_text()
    (directory / "config.json").write_text(
        config.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    )
    return directory


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_neighbours_and_successors_are_unharmed(
    reference: Reference, nonfinite_path: Path, enforce_eager: bool
) -> None:
    """Blocks are few: those of the bad requests go to others soon."""
    vocab_size = reference.model.config.vocab_size
    prompts = random_texts(LENGTHS, vocab_size - 2)
    bad = [
        [*before, vocab_size - which, *after]
        for which in (1, 2)
        for before, after in zip(random_texts((0, 20, 90), 100, 1), random_texts((3, 0, 200), 100, 2), strict=True)
    ]
    settings = {"num_kvcache_blocks": 160, "max_num_batched_tokens": 256, "enforce_eager": enforce_eager}
    with start(nonfinite_path, DEVICE, **settings) as llm:
        assert llm.executor.info.attention == "triton"
        for seed in range(3):
            batch = [(prompt, True) for prompt in prompts] + [(prompt, False) for prompt in bad]
            Random(seed).shuffle(batch)
            outputs = llm.generate([prompt for prompt, _ in batch], GREEDY, use_tqdm=False)
            sound = [output for output, (_, is_finite) in zip(outputs, batch, strict=True) if is_finite]
            assert [output.error for output in sound] == [None] * len(prompts)
            reference.check_greedy(sound, NUM_ANSWERED)
        reference.check_greedy(answer(llm, prompts, NUM_ANSWERED), NUM_ANSWERED)


def test_a_beginning_shared_with_a_bad_prompt_is_unharmed(reference: Reference, nonfinite_path: Path) -> None:
    """The bad prompt's first chunk is sound up to the bad token, and its blocks go to the prefix cache."""
    vocab_size = reference.model.config.vocab_size
    common, after, good = random_texts((40, 500, 30), vocab_size - 2)
    with start(nonfinite_path, DEVICE, max_num_batched_tokens=128) as llm:
        llm.generate([[*common, vocab_size - 2, *after]], GREEDY, use_tqdm=False)
        [output] = answer(llm, [common + good], NUM_ANSWERED)
    assert output.metrics.num_cached_tokens == 32
    reference.check_greedy([output], NUM_ANSWERED)
