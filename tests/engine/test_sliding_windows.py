"""Blocks outside a sliding window are released, and no result changes."""

from pathlib import Path

import pytest
import torch
from checkpoints import make_reference, reference_logits, save
from narrow import present
from packing import needs_native

from infinilm import LLM, InferEngine, SamplingParams
from infinilm.cache import DynamicCache, PagedKVCacheConfig
from infinilm.engine.block_manager import BlockPool
from infinilm.models import LlamaForCausalLM

WINDOW, BLOCK_SIZE, CHUNK, NUM_TOKENS = 1000, 16, 1024, 20_000
TINY = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
KINDS = {
    "all": ("mistral", {"sliding_window": WINDOW}),
    "mixed": ("qwen2-window", {"sliding_window": WINDOW, "max_window_layers": 1, "num_hidden_layers": 2}),
}
SMALL = {"all": ("mistral", {}), "mixed": ("qwen2-window", {"num_hidden_layers": 2})}  # windows of 24 and 20 tokens


@pytest.fixture(scope="module", params=KINDS)
def long_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, settings = KINDS[request.param]
    reference = make_reference(kind, **TINY, **settings, max_position_embeddings=32_768)
    return save(reference, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=SMALL)
def small_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, settings = SMALL[request.param]
    return save(make_reference(kind, **settings), tmp_path_factory.mktemp(request.param))


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 160, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=1)


def chosen_logprobs(answer) -> list[float]:
    return [entry.logprob for entry in answer.logprobs]


@torch.inference_mode()
def generate_unreleased(directory: Path, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities with a cache that keeps everything."""
    model, cache = LlamaForCausalLM.from_pretrained(directory, device="cpu"), DynamicCache()
    for part in torch.tensor([prompt]).split(CHUNK, dim=1):
        logits = model(part, past_key_values=cache, logits_to_keep=1).logits
    tokens, logprobs = [], []
    for _ in range(num_tokens):
        values, ids = logits[0, -1].log_softmax(-1).max(-1)
        tokens.append(int(ids))
        logprobs.append(float(values))
        logits = model(ids.view(1, 1), past_key_values=cache).logits
    return tokens, logprobs


def test_a_long_text_holds_a_bounded_number_of_blocks(long_dir: Path) -> None:
    prompt, num_blocks = random_tokens(NUM_TOKENS), -(-(NUM_TOKENS + 100) // BLOCK_SIZE)
    bound = -(-(WINDOW + CHUNK) // BLOCK_SIZE) + 2
    is_mixed = "mixed" in long_dir.name
    settings = {"max_num_batched_tokens": CHUNK, "max_num_seqs": 1, "device": "cpu"}
    # Where all layers have the window, the whole cache is an eighth of the text.
    with LLM(long_dir, num_kvcache_blocks=num_blocks if is_mixed else bound, **settings) as llm:
        windows = [group.window for group in llm.memory.groups]
        assert windows == ([None, WINDOW] if is_mixed else [WINDOW])
        pools, most = llm.scheduler.blocks.pools, 0
        llm.add_request(prompt, greedy(20))
        while not llm.is_finished():
            outputs = llm.step()
            most = max(most, pools[-1].num_blocks - len(pools[-1].free))
        assert WINDOW / BLOCK_SIZE < most <= bound
        assert pools[-1].num_blocks <= 2 * bound
        if is_mixed:
            assert llm.stats().num_preemptions == 0
            assert llm.memory.kv_bytes == llm.executor.cache_bytes
            assert f"{pools[-1].num_blocks} blocks for windows of 1000" in str(llm.memory)
    tokens, logprobs = generate_unreleased(long_dir, prompt, 20)
    assert outputs[0].outputs[0].token_ids == tokens
    assert chosen_logprobs(outputs[0].outputs[0]) == pytest.approx(logprobs, abs=1e-4)


def test_tokens_and_logprobs_are_those_of_transformers(tmp_path: Path) -> None:
    for kind, settings in SMALL.values():
        reference = make_reference(kind, **settings)
        prompt = random_tokens(180)
        with LLM(save(reference, tmp_path / kind), max_num_batched_tokens=32, device="cpu") as llm:
            (answer,) = llm.generate([prompt], greedy(60), use_tqdm=False)[0].outputs
        logprobs = reference_logits(reference, [*prompt, *answer.token_ids]).log_softmax(-1)[len(prompt) - 1 : -1]
        assert answer.token_ids == logprobs.argmax(-1).tolist()
        assert chosen_logprobs(answer) == pytest.approx(logprobs.max(-1).values.tolist(), abs=1e-4)


@pytest.fixture
def keep_all(monkeypatch: pytest.MonkeyPatch):
    """Have no block released."""
    return lambda: monkeypatch.setattr(BlockPool, "first_seen", lambda *_: 0)


def test_a_warm_cache_gives_equal_results(small_dir: Path) -> None:
    text, tails = random_tokens(130), [random_tokens(9, seed) for seed in range(3)]
    with LLM(small_dir, max_num_batched_tokens=48, device="cpu") as llm:
        first = llm.generate([text], greedy(30), use_tqdm=False)[0].outputs[0]
        again = llm.generate([text], greedy(30), use_tqdm=False)[0]
        assert again.metrics.num_cached_tokens == 128
        assert again.outputs[0].token_ids == first.token_ids
        # The next turn begins with the whole answer.
        turn = llm.generate([[*text, *first.token_ids, 5]], greedy(30), use_tqdm=False)[0]
        assert turn.metrics.num_cached_tokens == 144
        warm = [llm.generate([text + tail], greedy(20), use_tqdm=False)[0] for tail in tails]
        assert [output.metrics.num_cached_tokens for output in warm] == [128] * 3
    with LLM(small_dir, enable_prefix_caching=False, device="cpu") as llm:
        cold = llm.generate(
            [[*text, *first.token_ids, 5], *(text + tail for tail in tails)], greedy(30), use_tqdm=False
        )
    for one, other in zip([turn, *warm], cold, strict=True):
        count = len(one.outputs[0].token_ids)
        assert one.outputs[0].token_ids == other.outputs[0].token_ids[:count]
        assert chosen_logprobs(one.outputs[0]) == pytest.approx(chosen_logprobs(other.outputs[0])[:count], abs=1e-4)


def test_preemption_gives_equal_results(small_dir: Path, keep_all) -> None:
    prompts = [random_tokens(5 + 7 * seed, seed) for seed in range(4)]
    settings = {"max_num_batched_tokens": 40, "max_num_seqs": 4, "device": "cpu", "max_model_len": 160}
    with LLM(small_dir, num_kvcache_blocks=14 if "mixed" in small_dir.name else 9, **settings) as llm:
        short = llm.generate(prompts, greedy(60), use_tqdm=False)
        assert llm.stats().num_preemptions > 0
        assert llm.stats().num_free_blocks == llm.stats().num_blocks
    keep_all()
    with LLM(small_dir, num_kvcache_blocks=200, **settings) as llm:
        ample = llm.generate(prompts, greedy(60), use_tqdm=False)
        assert llm.stats().num_preemptions == 0
    for one, other in zip(short, ample, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_several_answers_to_a_prompt_give_equal_results(small_dir: Path, keep_all, enable_prefix_caching: bool) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=50, ignore_eos=True)
    settings = {"enable_prefix_caching": enable_prefix_caching, "device": "cpu", "max_num_batched_tokens": 64}
    prompt = random_tokens(155)

    def answers() -> list[list[int]]:
        with LLM(small_dir, **settings) as llm:
            found = llm.generate([prompt], params, use_tqdm=False)[0].outputs
            # The prompt is computed once.
            assert llm.stats().num_prefill_tokens <= 155 + 2 * (BLOCK_SIZE + 1)
        return [answer.token_ids for answer in found]

    released = answers()
    keep_all()
    assert released == answers()


def test_ranks_and_the_low_level_engine_serve_groups_of_layers(tmp_path: Path) -> None:
    reference = make_reference("qwen2-window", num_hidden_layers=2)
    directory, prompt = save(reference, tmp_path), random_tokens(100)
    with LLM(directory, device="cpu", tensor_parallel_size=2, max_num_batched_tokens=32) as llm:
        tokens = llm.generate([prompt], greedy(20), use_tqdm=False)[0].outputs[0].token_ids
    assert tokens == reference_logits(reference, [*prompt, *tokens])[99:-1].argmax(-1).tolist()
    with InferEngine(directory, device_type="cpu", cache_config=PagedKVCacheConfig(num_blocks=12)) as engine:
        cache_config = engine.get_cache_config()
        assert isinstance(cache_config, PagedKVCacheConfig)
        assert cache_config.num_blocks == 12
        first = engine.forward(input_ids=torch.tensor([prompt[:60]]), return_logits=True)
        second = engine.forward(
            input_ids=torch.tensor([prompt[60:]]), cache_lengths=torch.tensor([60]), return_logits=True
        )
    logits = torch.cat((present(first.logits), present(second.logits)), dim=1)[0]
    torch.testing.assert_close(logits, reference_logits(reference, prompt), atol=1e-4, rtol=0)


@needs_native
def test_quantised_layers_serve_groups_of_layers(tmp_path: Path) -> None:
    reference = make_reference("qwen2-window", num_hidden_layers=2, intermediate_size=128, vocab_size=161)
    directory, prompt = save(reference, tmp_path), random_tokens(100)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, prompt_logprobs=0)
    scores = {}
    for quantization in (None, "q8"):
        settings = {"device": "cpu", "max_num_batched_tokens": 32, "quantization": quantization}
        with LLM(directory, deterministic=False, **settings) as llm:
            assert llm.executor.info.attention == ("native" if quantization else "torch")
            (output,) = llm.generate([prompt], params, use_tqdm=False)
        scores[quantization] = torch.tensor([present(entry).logprob for entry in present(output.prompt_logprobs)[1:]])
    assert 1e-4 < (scores["q8"] - scores[None]).abs().mean() < 0.05
