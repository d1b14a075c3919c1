"""Rows of several tokens: with draft tokens in its steps an engine gives the same answers, in fewer steps."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from drafts import essence, guesses
from fake_runner import VOCAB_SIZE, FakeRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import build_tokenizer

from infinilm import LLM, RequestOutput, SamplingParams
from infinilm.executor import loader
from infinilm.executor.executor import ExecutorInfo
from infinilm.executor.loader import LoadedModel
from infinilm.executor.memory import GroupMemory, MemoryLedger, Workspace
from infinilm.executor.step_io import StepInput, StepOutput
from infinilm.models import LlamaConfig
from infinilm.text.tokenizer import Tokenizer

MAX_MODEL_LEN = 64
BLOCK_SIZE = 4


class FakeHandle:
    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def result(self) -> StepOutput:
        return self._output


class FakeExecutor:
    """Steps computed by a `FakeRunner`."""

    info = ExecutorInfo(1, "cpu", "float32", "none", max_in_flight=1)

    def __init__(self, num_blocks: int) -> None:
        self._runner = FakeRunner(num_blocks, BLOCK_SIZE)

    def submit(self, step: StepInput) -> FakeHandle:
        return FakeHandle(self._runner.submit(step))

    def check_health(self) -> None: ...

    def shutdown(self) -> None: ...


TOKENIZER = Tokenizer(build_tokenizer())
CONFIG = LlamaConfig(
    vocab_size=300, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, head_dim=8
)


def start(monkeypatch: pytest.MonkeyPatch, num_blocks: int, **config: int) -> LLM:
    ledger = MemoryLedger(
        device="cpu",
        num_ranks=1,
        free_bytes=0,
        utilization=1.0,
        weight_bytes=0,
        workspace=Workspace(0),
        groups=(GroupMemory(None, 0, None, None),),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        limited_by="the test",
    )
    executor: Any = FakeExecutor(num_blocks)
    loaded = LoadedModel(executor, CONFIG, TOKENIZER, (0,), MAX_MODEL_LEN, ledger)
    monkeypatch.setattr(loader, "load_model", lambda config: loaded)
    return LLM("fake", **config)


def answer_all(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
    with llm:
        return llm.generate(prompts, params, use_tqdm=False)


@dataclass
class World:
    prompts: list[list[int]]
    params: list[SamplingParams]
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    depth: int
    num_drafts: int


@st.composite
def worlds(draw: st.DrawFn) -> World:
    num_requests = draw(st.integers(1, 5))
    text = st.text("".join(TOKENIZER.decode([i]) for i in range(2, VOCAB_SIZE)), min_size=1, max_size=2)
    params = st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 24),
        min_tokens=st.sampled_from([0, 0, 1]),
        n=st.sampled_from([1, 1, 2]),
        stop=st.lists(text, max_size=3),
        stop_token_ids=st.lists(st.integers(2, VOCAB_SIZE - 1), max_size=2),
        ignore_eos=st.booleans(),
        seed=st.integers(0, 3),
    )
    return World(
        # Each prompt is another one, so that its answers are found by it.
        prompts=[
            [i + 2, *draw(st.lists(st.integers(2, VOCAB_SIZE - 1), min_size=1, max_size=12))]
            for i in range(num_requests)
        ],
        params=draw(st.lists(params, min_size=num_requests, max_size=num_requests)),
        num_blocks=draw(st.integers(16, 40)),
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.integers(8, 40)),
        depth=draw(st.integers(1, 3)),
        num_drafts=draw(st.integers(1, 4)),
    )


@settings(max_examples=150, deadline=None)
@given(worlds())
def test_drafts_change_no_answer(world: World) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        alone = [
            answer_all(start(monkeypatch, 1000), [prompt], [params])[0]
            for prompt, params in zip(world.prompts, world.params, strict=True)
        ]
        llm = start(
            monkeypatch,
            world.num_blocks,
            max_num_seqs=world.max_num_seqs,
            max_num_batched_tokens=world.max_num_batched_tokens,
        )
        llm._max_in_flight = world.depth
        llm.scheduler.draft_source = guesses(alone, world.num_drafts)
        together = answer_all(llm, world.prompts, world.params)
    assert [essence(output) for output in together] == [essence(output) for output in alone]
    assert llm.scheduler.blocks.num_free == world.num_blocks


PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0.8, top_k=20, max_tokens=24, seed=7, n=2, logprobs=0),
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, repetition_penalty=1.3),  # gets no drafts
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, min_tokens=4, logit_bias={5: 2.0}),
]
PROMPTS = [[11 + i, *range(40 + i, 60 + 3 * i)] for i in range(len(PARAMS))]


@pytest.fixture(scope="module")
def plain(tiny_dir) -> Iterator[tuple[list[RequestOutput], int]]:
    """The answers without drafts, and the number of steps that they took."""
    with LLM(tiny_dir, num_kvcache_blocks=64, enable_prefix_caching=False) as llm:
        yield llm.generate(PROMPTS, PARAMS, use_tqdm=False), llm.stats().num_steps


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_a_model_computes_several_tokens_of_a_row(tiny_dir, plain, depth: int, backend: str) -> None:
    outputs, num_steps = plain
    with LLM(tiny_dir, num_kvcache_blocks=64, enable_prefix_caching=False, attention_backend=backend) as llm:
        llm._max_in_flight = depth
        llm.scheduler.draft_source = guesses(outputs, 4)
        drafted = llm.generate(PROMPTS[:1], PARAMS[:1], use_tqdm=False)
        assert llm.stats().num_steps < num_steps * 3 // 4
        drafted += llm.generate(PROMPTS[1:], PARAMS[1:], use_tqdm=False)
    assert [essence(output) for output in drafted] == [essence(output) for output in outputs]
    for ours, theirs in zip(drafted, outputs, strict=True):
        for answer, expected in zip(ours.outputs, theirs.outputs, strict=True):
            assert (answer.logprobs is None) == (expected.logprobs is None)
            for found, wanted in zip(answer.logprobs or (), expected.logprobs or (), strict=True):
                assert found.token_id == wanted.token_id
                assert found.logprob == pytest.approx(wanted.logprob, abs=1e-4)
