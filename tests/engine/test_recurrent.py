"""Models with recurrent layers: states are found again, shared, given up and computed again, and change no answer."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_reference, reference_logits, save
from narrow import present
from packing import needs_native

from infinilm import LLM, InferEngine, SamplingParams
from infinilm.cache import StaticKVCacheConfig
from infinilm.debug import HookRegistry
from infinilm.errors import InvalidValueError

RNG = random.Random(2)
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=1)
SETTINGS: dict[str, Any] = {"device": "cpu", "max_model_len": 1500}


def text(length: int) -> list[int]:
    return [RNG.randrange(150) for _ in range(length)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    reference = make_reference("qwen3.5", max_position_embeddings=2048, eos_token_id=159, bos_token_id=158)
    return save(reference, tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, enable_prefix_caching=False, **SETTINGS) as llm:
        yield llm


def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("num_shared", [1000, 1100, 777])
def test_all_but_a_block_of_a_shared_beginning_is_found(path: Path, llm: LLM, num_shared: int) -> None:
    beginning = text(num_shared)
    prompts = [beginning + text(40) for _ in range(3)]
    with LLM(path, **SETTINGS) as caching:
        first, *others = (caching.generate([prompt], GREEDY, use_tqdm=False)[0] for prompt in prompts)
    assert first.metrics.num_cached_tokens == 0
    for output in others:
        assert num_shared - 64 <= output.metrics.num_cached_tokens <= num_shared
    assert [output.token_ids for output in (first, *others)] == answers(llm, prompts)


def test_states_that_were_given_up_are_computed_again(path: Path, llm: LLM) -> None:
    prompts = [text(length) for length in (60, 58, 62, 59, 61, 170)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = answers(llm, prompts, params)
    with LLM(path, num_kvcache_blocks=7, max_num_batched_tokens=400, **SETTINGS) as short:
        for _ in range(2):
            assert answers(short, prompts, params) == expected
        assert short.stats().num_preemptions > 0


def test_several_answers_share_the_prompt(path: Path, llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=4, n=3, max_tokens=20, ignore_eos=True)
    prompt = text(150)
    with LLM(path, **SETTINGS) as caching:
        (together,) = caching.generate([prompt], params, use_tqdm=False)
    (alone,) = llm.generate([prompt], params, use_tqdm=False)
    assert [each.token_ids for each in together.outputs] == [each.token_ids for each in alone.outputs]


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_ranks_and_stages_give_the_same_answers(path: Path, llm: LLM, sizes: tuple[int, int]) -> None:
    prompts = [text(length) for length in (130, 20, 64)]
    tp_size, num_stages = sizes
    with LLM(path, tensor_parallel_size=tp_size, pipeline_parallel_size=num_stages, **SETTINGS) as ranks:
        assert answers(ranks, prompts) == answers(llm, prompts)


@needs_native
def test_quantised_matrices(path: Path, llm: LLM) -> None:
    prompts = [text(length) for length in (70, 20)]
    with LLM(path, quantization="q8", **SETTINGS) as packed:
        together = answers(packed, prompts)
        assert together == [answers(packed, [prompt])[0] for prompt in prompts]
    assert (
        sum(a == b for x, y in zip(together, answers(llm, prompts), strict=True) for a, b in zip(x, y, strict=True))
        > 10
    )


@needs_native
def test_quantised_states_give_the_same_bits_in_any_circumstance(tmp_path: Path) -> None:
    path = save(make_reference("qwen3.5", max_position_embeddings=2048, intermediate_size=128), tmp_path)
    beginning = text(140)
    prompts = [beginning + text(length) for length in (50, 48, 45)]
    settings = {**SETTINGS, "quantization": "q8"}

    def run(llm: LLM, order: list[int]) -> list[Any]:
        outputs = llm.generate([prompts[i] for i in order], GREEDY, use_tqdm=False)
        return [(each.token_ids, each.outputs[0].logprobs) for each in outputs]

    with LLM(path, enable_prefix_caching=False, **settings) as alone:
        expected = [run(alone, [i])[0] for i in range(3)]
        assert alone.stats().guarantee == "yes"
    with LLM(path, max_num_batched_tokens=48, **settings) as caching:
        assert run(caching, [0, 1, 2]) == expected
        (again,) = caching.generate([prompts[2]], GREEDY, use_tqdm=False)
        assert again.metrics.num_cached_tokens >= 128
        assert run(caching, [2, 0]) == [expected[2], expected[0]]
    with LLM(path, num_kvcache_blocks=7, enable_prefix_caching=False, **settings) as short:
        assert run(short, [0, 1, 2]) == expected
        assert short.stats().num_preemptions > 0
    with LLM(path, executor="processes", **settings) as hosted:
        assert run(hosted, [0, 1, 2]) == expected


def test_hooks_see_and_replace_states(path: Path) -> None:
    registry, shapes = HookRegistry(), []

    def forget(_name: str, state: torch.Tensor, _layer: int) -> torch.Tensor:
        shapes.append(tuple(state.shape))
        return torch.zeros_like(state)

    prompt = text(20)
    with LLM(path, **SETTINGS) as llm:
        plain = answers(llm, [prompt])
        registry.register_hook("layer0_state", forget)
        llm.set_hook_registry(registry)
        assert answers(llm, [prompt]) != plain
    assert set(shapes) == {(1, 4, 16, 24)}


def test_infer_engine_goes_on_where_a_text_ends(path: Path) -> None:
    reference = make_reference("qwen3.5", max_position_embeddings=2048, eos_token_id=159, bos_token_id=158)
    tokens = text(100)
    expected = reference_logits(reference, tokens)
    with InferEngine(path, device_type="cpu", cache_config=StaticKVCacheConfig(1, 256)) as engine:
        parts = [
            present(
                engine(
                    input_ids=[tokens[start:end]],
                    position_ids=[list(range(start, end))],
                    cache_lengths=[start],
                    return_logits=True,
                ).logits
            )
            for start, end in ((0, 70), (70, 71), (71, 100))
        ]
        torch.testing.assert_close(parts[-1].reshape(-1, 160)[-1], expected[-1], atol=1e-4, rtol=0)
        with pytest.raises(InvalidValueError, match=r"goes on after 90 tokens, but the recurrent state .* has seen 96"):
            engine(input_ids=[tokens[90:]], position_ids=[list(range(90, 100))], cache_lengths=[90])
