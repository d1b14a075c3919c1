"""Pipeline stages against one rank: the same answers, whatever the requests ask for and whatever happens to them."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_reference, save
from packing import needs_native
from tiny_tokenizer import save_tokenizer

from infinilm import LLM, InferEngine, SamplingParams
from infinilm.cache import PagedKVCacheConfig, StaticKVCacheConfig
from infinilm.debug import HookRegistry
from infinilm.distributed import DistConfig
from infinilm.errors import InvalidValueError
from infinilm.executor.loader import select_devices
from infinilm.outputs import RequestOutput
from infinilm.structured_output import StructuredOutput

# By name: kind of model, tensor parallel size, stages. Layers are uneven, and in the last case of two groups.
CASES = {
    "pp2": ("llama-gqa", 1, 2),
    "tp2-pp2": ("llama-tied", 2, 2),
    "pp3": ("qwen2-window", 1, 3),
}
NUM_BLOCKS = 14
SETTINGS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 6, "max_num_batched_tokens": 48}
RNG = random.Random(5)
BEGINNING = [RNG.randrange(2, 300) for _ in range(40)]
PROMPTS = [BEGINNING + [RNG.randrange(2, 300) for _ in range(length)] for length in (3, 30, 50, 8)]
JSON_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def make_checkpoint(kind: str, directory: Path) -> Path:
    save(make_reference(kind, vocab_size=300, num_hidden_layers=5, eos_token_id=1, bos_token_id=0), directory)
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="module", params=CASES)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, LLM]]:
    """One rank, and the pipeline, on the same checkpoint."""
    kind, tp_size, num_stages = CASES[request.param]
    path = make_checkpoint(kind, tmp_path_factory.mktemp(kind))
    sizes = {"tensor_parallel_size": tp_size, "pipeline_parallel_size": num_stages}
    with (
        LLM(path, num_kvcache_blocks=256, **SETTINGS) as alone,
        LLM(path, num_kvcache_blocks=NUM_BLOCKS, **sizes, **SETTINGS) as staged,
    ):
        yield alone, staged


def params_of_all_kinds() -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=1.2, seed=3, max_tokens=12, n=3, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2),
        SamplingParams(temperature=0.9, top_p=0.8, top_k=50, repetition_penalty=1.3, seed=9, max_tokens=12),
        SamplingParams(temperature=1.0, seed=4, max_tokens=30, structured=StructuredOutput(json_schema=JSON_SCHEMA)),
        SamplingParams(temperature=1.0, seed=5, max_tokens=15, stop=("a",), logit_bias={7: 2.0}),
        SamplingParams(temperature=1.0, max_tokens=5, min_p=0.1, seed=1, stop_token_ids=(9,)),
    ]


def assert_alike(found: RequestOutput, expected: RequestOutput) -> None:
    assert found.error is None
    for own, other in zip(found.outputs, expected.outputs, strict=True):
        assert (own.token_ids, own.text, own.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        assert_near(own.logprobs, other.logprobs)
    assert_near(found.prompt_logprobs, expected.prompt_logprobs)


def assert_near(found: Any, expected: Any) -> None:
    """Log-probabilities of the same tokens, up to 1e-4."""
    assert (found is None) == (expected is None)
    for own, other in zip(found or (), expected or (), strict=True):
        assert (own is None) == (other is None)
        if own is not None:
            assert own.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert own.token_id == other.token_id


def test_layers_are_divided_and_ranks_hold_their_own(engines: tuple[LLM, LLM]) -> None:
    _, staged = engines
    info = staged.executor.info
    assert info.max_in_flight == info.num_stages + 1
    states = staged.executor.state_dicts()
    tp_size = info.num_ranks // info.num_stages
    held = [{int(name.split(".")[2]) for name in state if ".layers." in name} for state in states]
    assert sorted(layer for stage in held[::tp_size] for layer in stage) == list(range(5))
    assert all(held[rank] == held[rank // tp_size * tp_size] for rank in range(info.num_ranks))
    is_tied = staged.model_config.tie_word_embeddings
    for rank, state in enumerate(states):
        is_first, is_last = rank < tp_size, rank >= info.num_ranks - tp_size
        assert ("model.embed_tokens.weight" in state) == (is_first or (is_last and is_tied))
        assert ("model.norm.weight" in state) == is_last
        assert ("lm_head.weight" in state) == (is_last and not is_tied)
    assert f"on each rank of {staged.memory.stage}:" in str(staged.memory)


def test_requests_of_all_kinds_side_by_side(engines: tuple[LLM, LLM]) -> None:
    alone, staged = engines
    params = params_of_all_kinds()
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(params))]
    expected = [alone.generate(prompt, own, use_tqdm=False)[0] for prompt, own in zip(prompts, params, strict=True)]
    for _ in range(2):  # the second time with prefixes found
        found = staged.generate(prompts, params, use_tqdm=False)
        for own, other in zip(found, expected, strict=True):
            assert_alike(own, other)
    assert any(output.metrics.num_cached_tokens for output in found)


def test_histories_with_arrivals_aborts_and_preemption(engines: tuple[LLM, LLM]) -> None:
    """A finished request has the answer that it has alone; an aborted one has the beginning of it."""
    alone, staged = engines
    rng = random.Random(11)
    kinds = [
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=1.1, seed=2, max_tokens=30, n=2, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=8, max_tokens=15, prompt_logprobs=1),
    ]
    cases = [(prompt, params) for prompt in PROMPTS for params in kinds]
    expected = alone.generate([prompt for prompt, _ in cases], [params for _, params in cases], use_tqdm=False)
    before = staged.stats().num_preemptions
    requests: dict[str, int] = {}
    ended: dict[str, RequestOutput] = {}
    for step in range(2000):
        if step < 20 and rng.random() < 0.6:
            case = rng.randrange(len(cases))
            requests[staged.add_request(*cases[case])] = case
        if rng.random() < 0.05 and (alive := [name for name in requests if name not in ended]):
            staged.abort(rng.choice(alive))
        ended |= {output.request_id: output for output in staged.step() if output.finished}
        if step >= 20 and len(ended) == len(requests):
            break
    assert ended.keys() == requests.keys()
    assert staged.stats().num_preemptions > before
    assert staged.stats().num_free_blocks == sum(staged.memory.group_blocks)
    reasons = set()
    for name, output in ended.items():
        for own, other in zip(output.outputs, expected[requests[name]].outputs, strict=True):
            reasons.add(own.finish_reason)
            if own.finish_reason == "abort":
                assert own.token_ids == other.token_ids[: len(own.token_ids)]
            else:
                assert (own.token_ids, own.finish_reason) == (other.token_ids, other.finish_reason)
    assert "abort" in reasons
    assert len(reasons) > 1


def test_hooks_see_every_layer_and_may_change_it(engines: tuple[LLM, LLM]) -> None:
    seen: list[list[tuple[str, int, torch.Tensor]]] = []
    answers = []
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    vector = torch.linspace(-1, 1, 64)
    unseen = PROMPTS[1][::-1]  # what is found in the prefix cache, hooks don't see
    for llm in engines:
        registry = HookRegistry()
        calls: list[tuple[str, int, torch.Tensor]] = []

        def note(name: str, x: torch.Tensor, layer: int, calls: list[tuple[str, int, torch.Tensor]] = calls) -> None:
            calls.append((name, layer, x))

        registry.register_hook("*", note)
        registry.register_hook("layer1_output", lambda _name, x, _layer: x + vector)
        llm.set_hook_registry(registry)
        try:
            patched = llm.generate([unseen], greedy, use_tqdm=False)
        finally:
            llm.set_hook_registry(None)
        plain = llm.generate([unseen, *PROMPTS], greedy, use_tqdm=False)
        seen.append(calls)
        answers.append([output.token_ids for output in (*patched, *plain)])
        assert answers[-1][0] != answers[-1][1]
    assert answers[0] == answers[1]
    theirs, ours = seen
    assert [call[:2] for call in ours] == [call[:2] for call in theirs]
    assert {layer for _, layer, _ in ours} == {-1, *range(5)}
    for (name, _, own), (_, _, other) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, atol=1e-4, rtol=0, msg=name)


def test_a_hook_that_raises_ends_its_step_only(engines: tuple[LLM, LLM]) -> None:
    alone, staged = engines
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    (expected,) = alone.generate(PROMPTS[0], greedy, use_tqdm=False)
    registry = HookRegistry()
    registry.register_hook("layer0_output", lambda *_: 1 / 0)  # type: ignore[arg-type]
    staged.set_hook_registry(registry)
    (failed,) = staged.generate(PROMPTS[0], greedy, use_tqdm=False)
    staged.set_hook_registry(None)
    assert failed.error == "ZeroDivisionError: division by zero"
    assert_alike(staged.generate(PROMPTS[0], greedy, use_tqdm=False)[0], expected)


# --- the low-level engine ---


def test_the_low_level_engine(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path)
    ids = [prompt[:41] for prompt in PROMPTS[1:3]]
    registry, points = HookRegistry(), []
    registry.register_hook("*_output", lambda name, *_: points.append(name))
    results = []
    for distributed in (DistConfig(), DistConfig(pp_size=3)):
        with InferEngine(path, distributed, "cpu") as engine:
            found = [engine(input_ids=ids, return_logits=True, return_hidden_states=True)]
            engine.set_hook_registry(registry)
            found.append(engine(input_ids=ids, return_logits=True, return_hidden_states=True))
            engine.set_hook_registry(None)
            answers = []
            for cache in (StaticKVCacheConfig(2, 64), PagedKVCacheConfig(12)):
                engine.reset_cache(cache)
                answers.append(engine.generate(ids, 6, temperature=0).token_ids)
            head = dict(engine.state_dict()[-1])["model.embed_tokens.weight"]
            engine.load_param("model.embed_tokens.weight", head * 0.5)  # both stages that hold it
            engine.load_param("model.layers.4.input_layernorm.weight", torch.full((64,), 0.5))  # the last alone
            found.append(engine(input_ids=ids, return_logits=True, return_hidden_states=True, cache_lengths=[0, 0]))
            results.append((found, answers, engine.state_dict_keyname()))
            assert engine.get_dist_config() == distributed
    (alone, answers, names), (staged, staged_answers, staged_names) = results
    assert (staged_answers, staged_names) == (answers, names)
    assert points[: len(points) // 2] == points[len(points) // 2 :] != []
    for own, other in zip(staged, alone, strict=True):
        torch.testing.assert_close(own.logits, other.logits, atol=1e-4, rtol=0)
        torch.testing.assert_close(own.hidden_states, other.hidden_states, atol=1e-4, rtol=0)


@needs_native
def test_quantised_stages(tmp_path: Path) -> None:
    reference = make_reference("llama-tied", intermediate_size=128, vocab_size=161, num_hidden_layers=3)
    path = save(reference, tmp_path)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    outputs = []
    for num_stages in (1, 2):
        settings = {"pipeline_parallel_size": num_stages, "num_kvcache_blocks": 32, "device": "cpu"}
        with LLM(path, quantization="q8", **settings) as llm:
            outputs.append(llm.generate([list(range(2, 90)), list(range(60, 2, -1))], params, use_tqdm=False))
    for own, other in zip(outputs[1], outputs[0], strict=True):
        assert own.token_ids == other.token_ids
        assert own.prompt_logprobs is not None
        assert other.prompt_logprobs is not None
        for found, expected in zip(own.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert found is not None
            assert expected is not None
            assert found.logprob == pytest.approx(expected.logprob, abs=0.05)


# --- what is refused ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size=3 is more than the model's 2 layers; use 2 or less"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size=0"),
        ({"pipeline_parallel_size": 2, "executor": "local"}, "executor='local' runs one rank, not 2"),
        ({"pipeline_parallel_size": 2, "distributed": DistConfig(2)}, "pipeline_parallel_size=2 and .* disagree"),
        (
            {"tensor_parallel_size": 2, "distributed": DistConfig(tp_device_ids=[0, 1], pp_size=2)},
            "tensor_parallel_size=2 .* disagree",
        ),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str, tiny_dir: Path) -> None:
    with pytest.raises(InvalidValueError, match=message):
        LLM(tiny_dir, device="cpu", num_kvcache_blocks=8, **settings)


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert [device.index for device in select_devices("cuda", DistConfig(pp_size=3))] == [0, 1, 2]
    message = r"tp_device_ids=\[0, 1, 2, 3\] names \[3\], but there are 3 .* devices, .*; use fewer ranks, or others"
    with pytest.raises(InvalidValueError, match=message):
        select_devices("cuda", DistConfig(2, pp_size=2))


def test_stages_in_dist_config() -> None:
    config = DistConfig(2, pp_size=3)
    assert (config.tp_size, config.pp_size, config.num_ranks) == (2, 3, 6)
    assert repr(config) == "DistConfig(tp_device_ids=[0, 1, 2, 3, 4, 5], pp_size=3)"
    assert config == DistConfig(tp_device_ids=range(6), pp_size=3) != DistConfig(6)
    with pytest.raises(InvalidValueError, match=r"names 3 devices, .* over pp_size=2 stages; name a multiple of 2"):
        DistConfig(tp_device_ids=[0, 1, 2], pp_size=2)
    with pytest.raises(InvalidValueError, match="pp_size=0 must be 1 or more"):
        DistConfig(pp_size=0)
