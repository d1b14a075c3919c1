"""`InferEngine` on 1 to 4 ranks against transformers: every kind of cache, ragged and mixed batches, generating."""

import random
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import save
from engine.infer_cases import VOCAB_SIZE, assert_near, expected_logits, greedy, reference_of, text
from halved_cache import HalvedCacheConfig
from narrow import present

from infinilm.cache import CacheConfig, PagedKVCacheConfig, StaticKVCacheConfig
from infinilm.debug import HookRegistry
from infinilm.distributed import DistConfig
from infinilm.engine import InferEngine
from infinilm.errors import EngineError
from infinilm.models import LlamaConfig

# All kinds on 2, 3 and 4 ranks that are threads: see tests/layers/test_parallel_layers.py.
CASES = [("mha", 1), ("tied", 1), ("mha", 2), ("window", 3), ("norms", 4)]
LENGTHS = (70, 33, 17, 16, 1)
PROMPTS = [text(17), text(18)[1:], text(19)[2:]]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-tp{case[1]}")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, InferEngine]]:
    """A kind of model, and an engine without a cache on the checkpoint of it."""
    kind, num_ranks = request.param
    path = save(reference_of(kind), tmp_path_factory.mktemp(kind))
    with InferEngine(path, DistConfig(num_ranks)) as engine:
        yield kind, engine


# --- without a cache (first, since a cache that was made stays) ---


def test_one_request_without_a_cache(case: tuple[str, InferEngine]) -> None:
    kind, engine = case
    assert engine.get_cache_config() is None
    for length in LENGTHS:
        expected = expected_logits(kind, text(length))
        for ids in (list(text(length)), [text(length)]):
            output = engine(input_ids=ids, return_logits=True, top_k=1)
            assert_near(present(output.logits).view(length, VOCAB_SIZE), expected)
            assert present(output.logits).shape == (*np.shape(ids), VOCAB_SIZE)
            assert output.output_ids.tolist() == [expected[-1].argmax()]


def test_ragged_batches_without_a_cache(case: tuple[str, InferEngine]) -> None:
    kind, engine = case
    ids = np.full((len(LENGTHS), max(LENGTHS)), -1)  # padding may be anything
    for row, length in enumerate(LENGTHS):
        ids[row, :length] = text(length)
    expected = [expected_logits(kind, text(length)) for length in LENGTHS]
    padded = engine(input_ids=ids, input_lengths=LENGTHS, return_logits=True, temperature=0)
    for row, length in enumerate(LENGTHS):
        assert_near(present(padded.logits)[row, :length], expected[row])
        assert not present(padded.logits)[row, length:].any()
    packed = np.concatenate([text(length) for length in LENGTHS])
    ends = np.cumsum([0, *LENGTHS])
    for offsets in (ends, ends[:-1]):
        output = engine(input_ids=packed, input_offsets=offsets, return_logits=True, temperature=0)
        assert_near(output.logits, torch.cat(expected))
        assert output.output_ids.tolist() == padded.output_ids.tolist() == [each[-1].argmax() for each in expected]


def test_greedy_answers_without_a_cache_are_transformers(case: tuple[str, InferEngine]) -> None:
    kind, engine = case
    assert engine.get_cache_config() is None
    assert engine.generate(PROMPTS, 9, temperature=0).token_ids == greedy(kind, PROMPTS, 9)


# --- with one: steps in which some requests begin, some go on and some decode ---


def test_mixed_steps_in_a_static_cache(case: tuple[str, InferEngine]) -> None:
    kind, engine = case
    engine.reset_cache(StaticKVCacheConfig(len(LENGTHS), 72))
    expected = [expected_logits(kind, text(length)) for length in LENGTHS]
    rng = random.Random(1)
    done = [0] * len(LENGTHS)
    while done != list(LENGTHS):
        # Those that are done compute their last token again: a row has to bring something.
        start = [min(n, length - 1) for n, length in zip(done, LENGTHS, strict=True)]
        new = [min(rng.choice([1, 1, 9, 30]), length - n) for n, length in zip(start, LENGTHS, strict=True)]
        done = [n + m for n, m in zip(start, new, strict=True)]
        ids = [[*text(LENGTHS[i])[start[i] : done[i]], *[999] * (max(new) - new[i])] for i in range(len(LENGTHS))]
        output = engine(input_ids=ids, cache_lengths=start, input_lengths=done, return_logits=True, temperature=0)
        for i, logits in enumerate(present(output.logits)):
            assert_near(logits[: new[i]], expected[i][start[i] : done[i]])
            assert output.output_ids[i] == expected[i][done[i] - 1].argmax()


@pytest.mark.parametrize("block_size", [16, 48])
def test_mixed_steps_in_shuffled_blocks_of_a_paged_cache(case: tuple[str, InferEngine], block_size: int) -> None:
    kind, engine = case
    engine.reset_cache(PagedKVCacheConfig(20, block_size))
    expected = [expected_logits(kind, text(length)) for length in LENGTHS]
    tables, slots = shuffled_tables(block_size)
    rng = random.Random(2)
    done = [0] * len(LENGTHS)
    num_steps = 0
    while done != list(LENGTHS):
        waiting = [i for i, length in enumerate(LENGTHS) if done[i] < length]
        chosen = rng.sample(waiting, rng.randint(1, len(waiting)))
        start = [done[i] for i in chosen]
        new = [min(rng.choice([1, 1, 9, 30]), LENGTHS[i] - done[i]) for i in chosen]
        end = [n + m for n, m in zip(start, new, strict=True)]
        offsets = np.cumsum([0, *new])
        spans = list(zip(chosen, start, end, strict=True))
        output = engine(
            input_ids=np.concatenate([text(LENGTHS[i])[a:b] for i, a, b in spans])[None],
            input_offsets=offsets[: len(chosen) + num_steps % 2],  # both forms
            input_lengths=end,
            cache_lengths=start if num_steps % 3 else None,
            block_tables=tables[chosen],
            slot_mapping=np.concatenate([slots[i][a:b] for i, a, b in spans]) if num_steps % 5 else None,
            position_ids=np.concatenate([np.arange(a, b) for _, a, b in spans]) if num_steps % 7 else None,
            return_logits=True,
            temperature=0,
        )
        assert_near(present(output.logits)[0], torch.cat([expected[i][a:b] for i, a, b in spans]))
        assert output.output_ids.tolist() == [expected[i][b - 1].argmax() for i, _, b in spans]
        for i, _, b in spans:
            done[i] = b
        num_steps += 1
    assert num_steps > 7


def shuffled_tables(block_size: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Block tables padded with -1, and the slot of every token."""
    needed = [-(-length // block_size) for length in LENGTHS]
    free = np.random.default_rng(0).permutation(20).tolist()
    tables = np.full((len(LENGTHS), max(needed)), -1)
    for row, count in enumerate(needed):
        tables[row, :count] = [free.pop() for _ in range(count)]
    slots = []
    for row, length in enumerate(LENGTHS):
        places = np.arange(length)
        slots.append(tables[row, places // block_size] * block_size + places % block_size)
    return tables, slots


# --- generating ---


@pytest.mark.parametrize("cache", [StaticKVCacheConfig(3, 40), PagedKVCacheConfig(24)], ids=["static", "paged"])
def test_greedy_answers_are_transformers(case: tuple[str, InferEngine], cache: CacheConfig) -> None:
    kind, engine = case
    engine.reset_cache(cache)
    for prompts in ([text(31)], PROMPTS, [text(1)]):
        answers = engine.generate(prompts, 9, temperature=0).token_ids
        assert answers == greedy(kind, prompts, 9)


def test_state_dicts_are_pieces_of_the_weights(case: tuple[str, InferEngine]) -> None:
    """Rows of q, k, v, gate, up, embedding and head, columns of o and down; norms and their biases whole."""
    kind, engine = case
    whole = {name: w for name, w in reference_of(kind).state_dict().items() if name in engine.state_dict_keyname()}
    states = engine.state_dict()
    num_ranks, kv_heads = len(states), engine.config.num_key_value_heads
    assert num_ranks == engine.get_dist_config().tp_size
    assert all(list(state) == engine.state_dict_keyname() for state in states)
    assert set(whole) == set(engine.state_dict_keyname())
    for name, weight in whole.items():
        pieces = [state[name] for state in states]
        if any(part in name for part in ("k_proj", "v_proj")):
            copies = max(1, num_ranks // kv_heads)
            assert all(piece.equal(pieces[i // copies * copies]) for i, piece in enumerate(pieces))
            pieces = pieces[::copies]
        if any(part in name for part in ("norm", "o_proj.bias", "down_proj.bias")):
            assert all(piece.equal(weight) for piece in pieces), name
            continue
        dim = 1 if any(part in name for part in ("o_proj", "down_proj")) else 0
        assert num_ranks == 1 or pieces[0].shape[dim] < weight.shape[dim] or (kv_heads == 1 and len(pieces) == 1)
        assert torch.cat(pieces, dim).equal(weight), name


def test_state_dicts_are_copies(case: tuple[str, InferEngine]) -> None:
    kind, engine = case
    engine.state_dict()[-1]["model.norm.weight"].fill_(0)
    assert engine.state_dict()[-1]["model.norm.weight"].equal(reference_of(kind).state_dict()["model.norm.weight"])


# --- no checkpoint, other types, several engines ---


def test_weights_from_a_seed_are_the_same_however_they_are_shared_out() -> None:
    config = LlamaConfig(
        vocab_size=9,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        attention_bias=True,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    logits, weights = [], []
    for num_ranks in (1, 2):
        with InferEngine(config, DistConfig(num_ranks), cache_config=PagedKVCacheConfig(4)) as engine:
            logits.append(present(engine(input_ids=[[3, 1, 4, 1, 5], [8, 2, 6, 5, 3]], return_logits=True).logits))
            weights.append(engine.state_dict())
    assert {weight.dtype for state in weights[1] for weight in state.values()} == {torch.bfloat16}
    assert [len(state["model.embed_tokens.weight"]) for state in weights[1]] == [5, 4]
    for name, weight in weights[0][0].items():
        pieces = [state[name] for state in weights[1]]
        dim = 1 if "o_proj.w" in name or "down_proj" in name else 0
        assert pieces[0].equal(weight) or torch.cat(pieces, dim).equal(weight), name
    assert logits[0].std() > 1e-3
    torch.testing.assert_close(*logits, atol=0.05 * float(logits[0].std()), rtol=0)


def test_calls_in_the_middle_of_a_call_are_refused_to_hooks_and_queued_for_threads(
    case: tuple[str, InferEngine],
) -> None:
    """Neither disturbs the call that is running."""
    kind, engine = case
    engine.reset_cache(StaticKVCacheConfig(2, 64))
    weight = reference_of(kind).state_dict()["model.norm.weight"]
    calls = {
        "forward": lambda: engine(input_ids=[[1, 2, 3], [4, 5, 6]]),
        "generate": lambda: engine.generate([1], 1),
        "reset_cache": lambda: engine.reset_cache(PagedKVCacheConfig(2)),
        "load_param": lambda: engine.load_param("model.norm.weight", torch.zeros_like(weight)),
        "load_params": lambda: engine.load_params({"model.norm.weight": torch.zeros_like(weight)}, strict=False),
        "state_dict": engine.state_dict,
    }
    told: list[str] = []
    queued: list[Future[list[dict[str, torch.Tensor]]]] = []
    registry = HookRegistry()

    def call_all(name: str, tensor: torch.Tensor, layer: int) -> None:
        requests = registry.requests
        for method, call in calls.items():
            with pytest.raises(EngineError, match=f"{method}: the engine is in the middle of another call, which this"):
                call()
            told.append(method)
        queued.append(others.submit(engine.state_dict))
        assert registry.requests is requests

    registry.register_hook("layer1_mlp_output", call_all)
    engine.set_hook_registry(registry)
    with ThreadPoolExecutor(1) as others:
        try:
            output = engine(input_ids=[text(20)], return_logits=True)
        finally:
            engine.set_hook_registry(None)
    assert told == list(calls)
    assert len(queued[0].result()) == engine.get_dist_config().tp_size
    assert_near(present(output.logits)[0], expected_logits(kind, text(20)))
    assert engine.get_cache_config() == StaticKVCacheConfig(2, 64)
    output = engine(input_ids=[text(20)[19:]], cache_lengths=[19], return_logits=True)
    assert_near(present(output.logits)[0], expected_logits(kind, text(20))[19:])


def test_a_cache_strategy_of_ones_own_is_used_by_all_ranks(case: tuple[str, InferEngine]) -> None:
    kind, engine = case
    results = []
    for config in (PagedKVCacheConfig(8), HalvedCacheConfig(8, factor=1.0), HalvedCacheConfig(8)):
        engine.reset_cache(config)
        engine(input_ids=[text(20)[:13]])
        results.append(present(engine(input_ids=[text(20)[13:]], cache_lengths=[13], return_logits=True).logits)[0])
    plain, same, halved = results
    assert_near(plain, expected_logits(kind, text(20))[13:])
    assert torch.equal(same, plain)
    registry = HookRegistry()
    registry.register_hook("layer*_v_proj", lambda name, tensor, layer: tensor * 0.5)
    engine.set_hook_registry(registry)
    engine.reset_cache(PagedKVCacheConfig(8))
    expected = present(engine(input_ids=[text(20)], return_logits=True).logits)[0, 13:]
    engine.set_hook_registry(None)
    assert_near(halved, expected)
    assert (halved - plain).abs().max() > 0.1


def test_two_engines_side_by_side_and_from_other_threads(tmp_path: Path) -> None:
    paths = {kind: save(reference_of(kind), tmp_path / kind) for kind in ("mha", "bias")}
    num_threads = torch.get_num_threads()
    with (
        InferEngine(paths["mha"], DistConfig(2), cache_config=StaticKVCacheConfig(3)) as first,
        InferEngine(paths["bias"], DistConfig(2), cache_config=PagedKVCacheConfig(8)) as second,
        ThreadPoolExecutor(2) as threads,
    ):
        engines = {"mha": first, "bias": second}
        expected = {kind: greedy(kind, PROMPTS, 9) for kind in engines}
        for _ in range(3):  # one after the other, in this thread
            for kind, engine in engines.items():
                assert engine.generate(PROMPTS, 9, temperature=0).token_ids == expected[kind]
        for _ in range(3):  # both at the same time, in others
            answers = {kind: threads.submit(e.generate, PROMPTS, 9, temperature=0) for kind, e in engines.items()}
            assert {kind: answer.result().token_ids for kind, answer in answers.items()} == expected
        first.close()
        with pytest.raises(EngineError, match="the engine was closed; make a new one"):
            first.generate(PROMPTS, 9)
        assert second.generate(PROMPTS, 9, temperature=0).token_ids == expected["bias"]
    assert torch.get_num_threads() == num_threads


# --- the real model ---


def test_smollm2_on_three_ranks_is_smollm2(smollm2: Path) -> None:
    """Logits there go up to 33; sums in another order move them by 1e-4 or a little more."""
    prompts = [list(range(1000, 1024)), list(range(5000, 5024))]
    results = []
    for num_ranks in (1, 3):
        settings: dict[str, Any] = {"cache_config": StaticKVCacheConfig(2, 64), "quantization": "none"}
        with InferEngine(smollm2, DistConfig(num_ranks), **settings) as engine:
            logits = engine(input_ids=prompts, return_logits=True).logits
            results.append((logits, engine.generate(prompts, 10, temperature=0).token_ids))
    (alone, answers), (shared, shared_answers) = results
    torch.testing.assert_close(shared, alone, atol=5e-4, rtol=0)
    assert shared_answers == answers
