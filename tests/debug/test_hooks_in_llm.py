"""Hooks where many requests share a step: whose rows are whose, and that what is done to one is not done to another."""

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from debug.hook_reference import Watched
from torch import Tensor

from infinilm import LLM, AsyncLLM, RequestOutput, SamplingParams
from infinilm.debug import POINTS, HookRegistry
from infinilm.engine import InferEngine
from infinilm.errors import EngineError, InvalidTypeError

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = {"a": [(11 * i * i + i + 5) % 290 for i in range(40)], "b": [9, 8, 7, 30, 201], "c": list(range(100, 119))}
VECTOR = 4 * torch.randn(64, generator=torch.Generator().manual_seed(3))
Outputs = dict[str, RequestOutput]


@pytest.fixture(autouse=True)
def detached(llm) -> Iterator[None]:
    """A registry of one test is not for the next."""
    yield
    llm.set_hook_registry(None)


@pytest.fixture(scope="module")
def alone(tiny_dir) -> Iterator[InferEngine]:
    """Computes one text at a time, all of it in one pass."""
    with InferEngine(tiny_dir, device_type="cpu") as engine:
        yield engine


def finish(llm: LLM, params: SamplingParams | dict[str, SamplingParams] = GREEDY, prompts=PROMPTS) -> Outputs:
    """Have all prompts answered at the same time: what came of each."""
    for name, prompt in prompts.items():
        llm.add_request(prompt, params[name] if isinstance(params, dict) else params, request_id=name)
    done: Outputs = {}
    while not llm.is_finished():
        done |= {output.request_id: output for output in llm.step() if output.finished}
    return done


def tokens_of(outputs: Outputs) -> dict[str, list[int]]:
    return {name: output.token_ids for name, output in outputs.items()}


WATCHED = ["embed_tokens", "layer0_output", "layer1_attention_k_after_rope", "final_norm", "logits"]


class Rows:
    """What hooks saw, sorted by request, answer, point and position."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, int, str], dict[int, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
        self.names: list[str] = []
        self.registry = HookRegistry()
        for point in WATCHED:
            self.registry.register_hook(point, self._take)

    def _take(self, name: str, x: Tensor, _layer: int) -> None:
        self.names.append(name)
        for r in self.registry.requests:
            found = self.found[r.request_id, r.answer, name]
            if name != "logits":
                for i, row in enumerate(x[r.rows]):
                    found[r.start + i].append(row)
            elif r.logits_row is not None:
                found[r.start + r.rows.stop - r.rows.start - 1].append(x[r.logits_row])
        if name == "logits":
            assert len(x) == sum(r.logits_row is not None for r in self.registry.requests)
        else:
            assert len(x) == max(r.rows.stop for r in self.registry.requests)


SETTINGS = {
    "all at once": {},
    "in chunks": {"max_num_batched_tokens": 12},
    "with preemption": {"num_kvcache_blocks": 6},
    "on two ranks": {"tensor_parallel_size": 2},
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_rows_of_a_step_are_told_apart(tiny_dir, alone, settings) -> None:
    """Put together again by request, answer and position they are what each text gives alone."""
    rows = Rows()
    drawn = SamplingParams(temperature=1.5, seed=4, max_tokens=30, ignore_eos=True, n=2)
    params = {"a": GREEDY, "b": SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), "c": drawn}
    with LLM(tiny_dir, **{"num_kvcache_blocks": 32, **SETTINGS[settings]}) as llm:
        llm.set_hook_registry(rows.registry)
        outputs = finish(llm, params)
        stats = llm.stats()
    assert (stats.num_preemptions > 0) == (settings == "with preemption")
    assert rows.names.count("layer0_output") == rows.names.count("final_norm") == stats.num_steps
    assert outputs["c"].outputs[0].token_ids != outputs["c"].outputs[1].token_ids
    for request, output in outputs.items():
        for answer in output.outputs:
            text = [*output.prompt_token_ids, *answer.token_ids][:-1]
            expected = Watched(alone)
            expected.run(text)
            for name in WATCHED:
                x = expected.seen[name]
                found = rows.found[request, answer.index, name]
                first = min(found)
                if name == "logits":
                    assert first == len(output.prompt_token_ids) - 1
                elif settings != "with preemption":  # after which it may have to be computed again
                    assert first == 16 * answer.index  # the second answer shares the first block of the prompt
                assert sorted(found) == list(range(first, len(text)))
                positions = [position for position, each in found.items() for _ in each]
                assert len(positions) == len(found) or settings == "with preemption"
                ours = torch.stack([row for each in found.values() for row in each])
                torch.testing.assert_close(ours, x[positions], atol=1e-4, rtol=0)
            if request != "c":
                drawn_from = rows.found[request, 0, "logits"]
                assert [int(drawn_from[p][-1].argmax()) for p in sorted(drawn_from)] == answer.token_ids


def test_every_point_is_seen_once_a_step(llm) -> None:
    registry, seen = HookRegistry(), []
    registry.register_hook("*", lambda name, _x, layer: seen.append((name, layer)))
    llm.set_hook_registry(registry)
    before = llm.stats().num_steps
    finish(llm)
    num_steps = llm.stats().num_steps - before
    points = [(point.replace("{i}", str(i)), i) for i in (0, 1) for point in POINTS if "{i}" in point]
    step = [("embed_tokens", -1), *points, ("final_norm", -1), ("logits", -1)]
    assert num_steps == 8
    assert seen == step * num_steps


def test_a_step_in_which_nobody_draws_has_no_logits(tiny_dir) -> None:
    registry = HookRegistry()
    calls: list[Any] = []
    registry.register_hook("embed_tokens", lambda *_: calls.append(registry.requests))
    registry.register_hook("logits", lambda *_: calls.append("logits"))
    with LLM(tiny_dir, num_kvcache_blocks=16, max_num_batched_tokens=16) as llm:
        llm.set_hook_registry(registry)
        llm.add_request(PROMPTS["a"], GREEDY, request_id="a")
        for _ in range(3):
            llm.step()
    seen = [(r.start, r.rows, r.logits_row) for requests in calls[:3] for r in requests]
    assert seen == [(0, slice(0, 16), None), (16, slice(0, 16), None), (32, slice(0, 8), 0)]
    assert calls[3:] == ["logits"]


def test_what_the_prefix_cache_has_is_not_seen(tiny_dir, alone) -> None:
    rows = Rows()
    with LLM(tiny_dir, num_kvcache_blocks=32) as llm:
        (plain,) = llm.generate([PROMPTS["a"]], GREEDY, use_tqdm=False)
        llm.set_hook_registry(rows.registry)
        again = finish(llm)["a"]
        assert again.metrics.num_cached_tokens == 32
        assert again.token_ids == plain.token_ids
        # Looking on is no reason to keep what was computed from others.
        assert finish(llm, prompts={"c": PROMPTS["c"]})["c"].metrics.num_cached_tokens == 16
    expected = Watched(alone)
    expected.run([*PROMPTS["a"], *plain.token_ids][:-1])
    found = rows.found["a", 0, "layer0_output"]
    assert sorted(found) == list(range(32, 47))
    for position, (row,) in found.items():
        torch.testing.assert_close(row, expected.seen["layer0_output"][position], atol=1e-4, rtol=0)


def test_logits_for_prompt_log_probabilities_are_not_those_drawn_from(llm) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1, ignore_eos=True)
    plain = finish(llm, params)
    registry, shapes = HookRegistry(), []

    def force(_name, x, _layer):
        shapes.append(list(x.shape))
        return x.index_fill(1, torch.tensor([42]), 1e4)

    registry.register_hook("logits", force)
    llm.set_hook_registry(registry)
    forced = finish(llm, params)
    assert shapes == [[3, 300]] * 3
    for name, output in forced.items():
        assert output.token_ids == [42] * 3
        assert output.prompt_logprobs == plain[name].prompt_logprobs


# --- patching ---------------------------------------------------------------------------------------------


def patching(request: str, points: str = "layer0_output") -> Rows:
    """Sees everything, and adds a vector to one request's rows."""
    rows = Rows()

    def patch(_name, x, _layer):
        for r in rows.registry.requests:
            if r.request_id == request:
                x[r.rows] += VECTOR
        return x

    rows.registry.register_hook(points, patch)
    return rows


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 12}, {"tensor_parallel_size": 2}])
def test_a_patch_of_one_request_changes_that_one_alone(tiny_dir, alone, settings) -> None:
    plain, patched = patching("nobody"), patching("b")
    with LLM(tiny_dir, num_kvcache_blocks=32, enable_prefix_caching=False, **settings) as llm:
        llm.set_hook_registry(plain.registry)
        before = finish(llm)
        llm.set_hook_registry(patched.registry)
        after = finish(llm)
    for name in ("a", "c"):
        assert after[name].token_ids == before[name].token_ids
    assert after["b"].token_ids != before["b"].token_ids
    for point, found in plain.found.items():
        if point[0] != "b":
            again = patched.found[point]
            assert all(torch.equal(again[position][0], row) for position, (row,) in found.items())
    # And it changes it as it does where it is alone.
    text = [*PROMPTS["b"], *after["b"].token_ids][:-1]
    logits = Watched(alone).run(text, {"layer0_output": lambda x, _: x + VECTOR})
    assert logits.argmax(1)[len(PROMPTS["b"]) - 1 :].tolist() == after["b"].token_ids


def test_patches_are_not_for_those_who_come_later(tiny_dir, llm) -> None:
    """Blocks of a patched text must not be found by the next one with the same beginning."""
    expected = finish(llm)
    with LLM(tiny_dir, num_kvcache_blocks=64) as new:
        new.set_hook_registry(patching("a").registry)
        patched = finish(new)
        assert patched["a"].token_ids != expected["a"].token_ids
        new.set_hook_registry(None)
        for num_cached in (0, 32):
            plain = finish(new)
            assert tokens_of(plain) == tokens_of(expected)
            assert plain["a"].metrics.num_cached_tokens == num_cached


def test_what_goes_on_from_a_patched_beginning_is_not_for_others_either(tiny_dir) -> None:
    """Hooks are gone after the prompt, but the answers, of which one shares the other's prompt, still come from it."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, n=2)
    prompt = PROMPTS["c"]
    with LLM(tiny_dir, num_kvcache_blocks=64) as llm:
        llm.set_hook_registry(patching("patched").registry)
        llm.add_request(prompt, params, request_id="patched")
        llm.step()
        llm.set_hook_registry(None)
        (patched,) = [output for _ in range(45) for output in llm.step() if output.finished]
        # The beginning computed anew, and with it the way to what was cached after it.
        llm.generate([prompt], GREEDY, use_tqdm=False)
        for answer in patched.outputs:
            (output,) = llm.generate([[*prompt, *answer.token_ids]], GREEDY, use_tqdm=False)
            assert output.metrics.num_cached_tokens == 16


# --- what goes wrong --------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["layer1_k_proj", "logits"])
def test_a_hook_that_raises_ends_the_requests_of_its_step(tiny_dir, point) -> None:
    registry, steps = HookRegistry(), []

    def fail(*_):
        steps.append([r.request_id for r in registry.requests])
        if len(steps) == 3:
            raise ValueError("mine")

    registry.register_hook(point, fail)
    with LLM(tiny_dir, num_kvcache_blocks=32, max_num_seqs=2) as llm:
        expected = finish(llm)
        llm.set_hook_registry(registry)
        outputs = finish(llm)
        assert steps[:4] == [["a", "b"], ["a", "b"], ["a", "b"], ["c"]]
        for name in ("a", "b"):
            assert outputs[name].error == "ValueError: mine"
            assert outputs[name].finish_reason == "abort"
            assert outputs[name].token_ids == expected[name].token_ids[:2]
        assert outputs["c"].error is None
        assert outputs["c"].token_ids == expected["c"].token_ids
        again = finish(llm)
        assert tokens_of(again) == tokens_of(expected)
        assert llm.stats().num_free_blocks == 32


def test_a_hook_may_not_step(llm) -> None:
    """It is told so; if it takes that calmly, the step goes on."""
    expected = finish(llm)
    registry, errors = HookRegistry(), []
    calls = {
        "layer0_output": llm.step,
        "layer1_output": lambda: llm.generate(PROMPTS["b"], GREEDY, use_tqdm=False),
        "final_norm": lambda: list(llm.stream(PROMPTS["b"], GREEDY)),
    }

    def call(name, _x, _layer):
        try:
            calls[name]()
        except EngineError as error:
            errors.append(str(error))

    for name in calls:
        registry.register_hook(name, call)
    llm.set_hook_registry(registry)
    outputs = finish(llm)
    assert tokens_of(outputs) == tokens_of(expected)
    assert len(errors) == 3 * 8
    assert set(errors) == {"the engine is in the middle of a step; don't call it from a hook or from on_token"}
    registry.clear()
    registry.register_hook("logits", lambda *_: llm.step())
    outputs = finish(llm)
    assert {out.error for out in outputs.values()} == {f"EngineError: {errors[0]}"}
    llm.set_hook_registry(None)
    assert finish(llm)["a"].token_ids == expected["a"].token_ids


def test_a_hook_may_queue_and_abort(llm) -> None:
    expected = finish(llm)
    registry = HookRegistry()

    def once(*_):
        registry.clear()
        llm.add_request(PROMPTS["b"], GREEDY, request_id="new")
        llm.abort("a")

    registry.register_hook("layer1_output", once)
    llm.set_hook_registry(registry)
    outputs = finish(llm)
    assert outputs["a"].finish_reason == "abort"
    assert outputs["a"].token_ids == []
    assert outputs["new"].token_ids == outputs["b"].token_ids == expected["b"].token_ids


def test_only_a_registry_can_be_attached(llm) -> None:
    with pytest.raises(InvalidTypeError, match="must be a HookRegistry, or None"):
        llm.set_hook_registry(print)


# --- AsyncLLM ---------------------------------------------------------------------------------------------


def test_hooks_of_an_async_engine(tiny_dir, llm) -> None:
    expected = finish(llm, prompts={"b": PROMPTS["b"]})["b"].token_ids
    rows = patching("b")

    async def ask(engine: AsyncLLM) -> RequestOutput:
        outputs = [output async for output in engine.generate(PROMPTS["b"], GREEDY, request_id="b")]
        return outputs[-1]

    async def run() -> None:
        async with AsyncLLM(tiny_dir, num_kvcache_blocks=32) as engine:
            assert (await ask(engine)).token_ids == expected
            await engine.set_hook_registry(rows.registry)
            assert (await ask(engine)).token_ids != expected
            await engine.set_hook_registry(None)
            assert (await ask(engine)).token_ids == expected
            with pytest.raises(InvalidTypeError, match="must be a HookRegistry, or None"):
                await engine.set_hook_registry("rows")  # type: ignore[arg-type]
            rows.registry.clear()
            rows.registry.register_hook("layer0_output", lambda *_: 1 / 0)  # type: ignore[arg-type]
            await engine.set_hook_registry(rows.registry)
            assert (await ask(engine)).error == "ZeroDivisionError: division by zero"
            rows.registry.clear()
            assert (await ask(engine)).token_ids == expected
        with pytest.raises(EngineError, match="was stopped"):
            await engine.set_hook_registry(None)

    asyncio.run(run())
    assert sorted(rows.found["b", 0, "final_norm"]) == list(range(12))
