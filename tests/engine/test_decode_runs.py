"""Several decode steps in one call of the native library: the answers are those of one step at a time."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import socketpair
from threading import Thread
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
from checkpoints import make_reference, save
from packing import needs_native
from tiny_tokenizer import save_tokenizer

from infinilm import LLM, AsyncLLM, RequestOutput, SamplingParams
from infinilm.executor import native_worker
from infinilm.executor.native_worker import MAX_RUN_STEPS, NativeWorker
from infinilm.framing import FrameSocket
from infinilm.outputs import AnswerDelta
from infinilm.sampling.sampler import Sampler
from infinilm.server import messages
from infinilm.server.engine_process import EngineLoop

pytestmark = needs_native

SETTINGS: dict[str, Any] = {"device": "cpu", "quantization": "q8", "num_kvcache_blocks": 64}
SIZES = {"intermediate_size": 128, "vocab_size": 300}
PROMPTS = [[3, 1, 4, 1, 5], list(range(2, 40)), [9, 2, 6]]
LENGTH = 40  # tokens, over several blocks
BLOCK_SIZE = 16
RANDOM: dict[str, Any] = {"temperature": 1.3, "seed": 2, "max_tokens": LENGTH, "ignore_eos": True}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True),
    SamplingParams(temperature=1.1, seed=7, max_tokens=LENGTH, ignore_eos=True, n=2),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, seed=5, max_tokens=LENGTH - 3, ignore_eos=True),
]


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs have all the steps that they may, however busy the machine is."""
    monkeypatch.setattr(native_worker, "RUN_SECONDS", 1000.0)
    monkeypatch.setattr(native_worker, "UNWATCHED_RUN_SECONDS", 1000.0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save(make_reference("llama-gqa", **SIZES, eos_token_id=1, bos_token_id=0), directory)
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(tiny, **SETTINGS) as engine:
        yield engine


def answers(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (own.text, own.token_ids, own.logprobs, own.finish_reason, own.stop_reason)
        for each in outputs
        for own in each.outputs
    ]


def generate(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], max_steps: int) -> list[Any]:
    llm.scheduler._max_run_steps = max_steps
    try:
        return answers(llm.generate(prompts, params, use_tqdm=False))
    finally:
        llm.scheduler._max_run_steps = MAX_RUN_STEPS


def without_generator(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have logits and tokens computed by the calls that serve other steps."""
    monkeypatch.setattr(Sampler, "plain_settings", lambda *_: None)


def run_lengths(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Noted from now on: the steps of each call of the executor that decodes alone."""
    lengths: list[int] = []
    submit = llm.executor.submit

    def note(step: Any) -> Any:
        handle = submit(step)
        if not step.chunks:
            lengths.append(handle.result().num_steps)
        return handle

    monkeypatch.setattr(llm.executor, "submit", note)
    return lengths


def test_tokens_are_those_of_single_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = run_lengths(llm, monkeypatch)
    num_steps = llm.stats().num_steps
    together = generate(llm, PROMPTS, PARAMS, MAX_RUN_STEPS)
    assert 1 < max(lengths) <= MAX_RUN_STEPS
    assert sum(lengths) <= llm.stats().num_steps - num_steps <= sum(lengths) + 3  # which have prompts
    lengths.clear()
    assert generate(llm, PROMPTS, PARAMS, 1) == together
    assert set(lengths) == {1}
    alone = [
        answer
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
        for answer in generate(llm, [prompt], [params], MAX_RUN_STEPS)
    ]
    assert alone == together
    without_generator(llm, monkeypatch)
    assert generate(llm, PROMPTS, PARAMS, MAX_RUN_STEPS) == together


@pytest.mark.parametrize("kind", ["gemma2-capped", "granite", "qwen2-window", "mixtral"])
def test_families_scale_and_cap_and_have_windows(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(make_reference(kind, **SIZES), tmp_path)
    with LLM(path, **SETTINGS | {"max_model_len": 128}) as llm:
        found = generate(llm, PROMPTS, PARAMS, MAX_RUN_STEPS)
        without_generator(llm, monkeypatch)
        assert generate(llm, PROMPTS, PARAMS, 1) == found


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 13},
        {"stop": ["<"]},
        {"logprobs": 2},
        {"repetition_penalty": 1.2},
        {"min_tokens": 20, "ignore_eos": False},
    ],
    ids=str,
)
def test_parameters_that_end_or_forbid_runs(llm: LLM, changes: dict[str, Any]) -> None:
    params = [SamplingParams(**RANDOM | changes), PARAMS[1]]
    assert generate(llm, PROMPTS[:2], params, MAX_RUN_STEPS) == generate(llm, PROMPTS[:2], params, 1)


def test_stop_strings_inside_of_a_run_end_the_answer(llm: LLM) -> None:
    (text, *_), *_ = generate(llm, PROMPTS[:1], [SamplingParams(**RANDOM)], 1)
    params = SamplingParams(**RANDOM, stop=[text[len(text) // 2 :][:3]])
    found = generate(llm, PROMPTS[:1], [params], MAX_RUN_STEPS)
    assert found == generate(llm, PROMPTS[:1], [params], 1)
    assert len(found[0][0]) < len(text)
    assert found[0][3:] == ("stop", params.stop[0])


def test_a_stop_token_ends_the_run_and_the_answer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (_, tokens, *_), *_ = generate(llm, PROMPTS[:1], [SamplingParams(**RANDOM)], 1)
    stop = next(token for index, token in enumerate(tokens) if index >= 20 and tokens.index(token) == index)
    params = SamplingParams(**RANDOM, stop_token_ids=[stop])
    lengths = run_lengths(llm, monkeypatch)
    ((_, found, _, *reasons),) = generate(llm, PROMPTS[:1], [params], MAX_RUN_STEPS)
    assert found == tokens[: tokens.index(stop) + 1]
    assert reasons == ["stop", stop]
    assert sum(lengths) == len(found) - 1  # nothing was computed beyond it
    assert max(lengths) > 1


def stream_all(llm: LLM) -> None:
    list(llm.stream(PROMPTS[0], PARAMS[0]))


def generate_beside_a_listener(llm: LLM) -> None:
    llm.add_request(PROMPTS[2], PARAMS[0], on_token=lambda _: None)
    llm.generate(PROMPTS[:1], PARAMS[:1], use_tqdm=False)


def generate_with_a_stop_string(llm: LLM) -> None:
    llm.generate(PROMPTS[:1], SamplingParams(**RANDOM, stop=["no such text"]), use_tqdm=False)


def step_by_deltas(llm: LLM) -> None:
    llm.add_request(PROMPTS[0], PARAMS[0])
    while llm.scheduler.has_work:
        llm.step_deltas()


@pytest.mark.parametrize(
    "watch",
    [stream_all, generate_beside_a_listener, generate_with_a_stop_string, step_by_deltas],
    ids=lambda each: each.__name__,
)
def test_runs_are_short_only_where_tokens_are_read_as_they_come(
    llm: LLM, watch: Callable[[LLM], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_worker, "RUN_SECONDS", 0.0)
    monkeypatch.setattr(native_worker, "UNWATCHED_RUN_SECONDS", 1000.0)
    lengths = run_lengths(llm, monkeypatch)
    llm.generate(PROMPTS[:1], PARAMS[:1], use_tqdm=False)
    assert max(lengths) == MAX_RUN_STEPS
    lengths.clear()
    watch(llm)
    assert set(lengths) == {1}


def test_runs_end_at_block_boundaries_and_under_preemption(tiny: Path) -> None:
    with LLM(tiny, **SETTINGS | {"num_kvcache_blocks": 5, "max_model_len": 64}) as llm:
        params = [SamplingParams(temperature=0.8, seed=seed, max_tokens=LENGTH, ignore_eos=True) for seed in range(3)]
        found = generate(llm, PROMPTS[:1] * 3, params, MAX_RUN_STEPS)
        assert llm.stats().num_preemptions > 0
        assert llm.stats().num_free_blocks == 5
        assert generate(llm, PROMPTS[:1] * 3, params, 1) == found


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = monotonic() + 20
    while not condition():
        assert monotonic() < deadline
        sleep(0.001)


def test_a_new_request_ends_the_run(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes from another thread, in the middle of a run, and starts with the next step."""
    alone = answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    lengths = run_lengths(llm, monkeypatch)
    others: list[RequestOutput] = []
    thread = Thread(target=lambda: others.extend(llm.generate(PROMPTS[1:], PARAMS[1:], use_tqdm=False)))

    def start_and_wait() -> bool:
        if thread.ident is None and len(lengths) == 2:
            thread.start()
            wait_until(llm._turns.is_awaited)
        return False

    llm.end_runs_if.insert(0, start_and_wait)
    try:
        first = llm.generate(PROMPTS[:1], PARAMS[:1], use_tqdm=False)
    finally:
        llm.end_runs_if.remove(start_and_wait)
    thread.join()
    assert lengths[2] == 1
    assert answers([*first, *others]) == alone


def test_an_abort_ends_the_run(llm: LLM) -> None:
    expected = generate(llm, PROMPTS[:1], PARAMS[:1], 1)[0][1]
    request_id = llm.add_request(PROMPTS[0], PARAMS[0])
    threads: list[Thread] = []

    def abort() -> bool:
        if not threads:
            threads.append(Thread(target=llm.abort, args=(request_id,)))
            threads[0].start()
            wait_until(llm._turns.is_awaited)
        return False

    llm.end_runs_if.insert(0, abort)
    deltas: list[AnswerDelta] = []
    try:
        while not llm.is_finished():
            deltas += llm.step_deltas()
    finally:
        llm.end_runs_if.remove(abort)
    assert deltas[-1].finish_reason == "abort"
    # The prompt's, and that of the run's first step.
    assert [token for delta in deltas for token in delta.token_ids] == expected[:2]
    assert answers(llm.generate(PROMPTS[:1], PARAMS[:1], use_tqdm=False))[0][1] == expected


def test_listeners_get_all_tokens_and_commands_end_runs(tiny: Path, llm: LLM) -> None:
    expected = generate(llm, PROMPTS, PARAMS, 1)

    async def stream(engine: AsyncLLM, index: int) -> tuple[list[int], RequestOutput]:
        tokens: list[int] = []
        async for output in engine.generate(PROMPTS[index], PARAMS[index]):
            tokens += output.outputs[0].new_token_ids
        return tokens, output

    async def run() -> list[tuple[list[int], RequestOutput]]:
        async with AsyncLLM(tiny, **SETTINGS) as engine:
            return await asyncio.gather(*(stream(engine, index) for index in range(len(PROMPTS))))

    found = asyncio.run(run())
    assert answers([output for _, output in found]) == expected
    assert all(tokens == output.outputs[0].token_ids for tokens, output in found)


def test_an_interrupt_between_steps_ends_the_call(llm: LLM) -> None:
    expected = generate(llm, PROMPTS[:1], PARAMS[:1], 1)

    def interrupt() -> bool:
        signal.raise_signal(signal.SIGINT)
        return False

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    llm.end_runs_if.append(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            generate(llm, PROMPTS[:1], PARAMS[:1], MAX_RUN_STEPS)
    finally:
        llm.end_runs_if.remove(interrupt)
        signal.signal(signal.SIGINT, before)
    assert generate(llm, PROMPTS[:1], PARAMS[:1], MAX_RUN_STEPS) == expected
    assert llm.is_finished()


def test_step_computes_one_step(llm: LLM) -> None:
    llm.add_request(PROMPTS[0], PARAMS[0])
    outputs: list[RequestOutput] = []
    while not llm.is_finished():
        outputs += llm.step()
    assert [len(output.outputs[0].new_token_ids) for output in outputs] == [1] * LENGTH


def ends_after(calls: int) -> Callable[[], bool]:
    counter = iter(range(calls))
    return lambda: next(counter, None) is None


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_a_run_ends_between_any_two_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    expected = generate(llm, PROMPTS[:1], PARAMS[:1], 1)
    lengths = run_lengths(llm, monkeypatch)
    monkeypatch.setattr(llm.scheduler, "_is_awaited", ends_after(calls))
    assert generate(llm, PROMPTS[:1], PARAMS[:1], MAX_RUN_STEPS) == expected
    assert lengths[0] == calls + 1


def test_time_ends_a_run(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generate(llm, PROMPTS[:1], PARAMS[:1], 1)
    lengths = run_lengths(llm, monkeypatch)
    monkeypatch.setattr(native_worker, "UNWATCHED_RUN_SECONDS", 0.0)
    assert generate(llm, PROMPTS[:1], PARAMS[:1], MAX_RUN_STEPS) == expected
    assert set(lengths) == {1}


def test_a_row_that_can_draw_nothing_keeps_what_it_drew_before(llm: LLM, tmp_path: Path) -> None:
    """The embedding of a token of the answer is not a number: the step that computes it fails, in that request only."""
    (_, tokens, *_), *_ = generate(llm, PROMPTS[:1], PARAMS[:1], 1)
    index = next(i for i, token in enumerate(tokens) if i % 4 == 1 and i > 8 and tokens.index(token) == i)
    reference = make_reference("llama-gqa", **SIZES, eos_token_id=1, bos_token_id=0)
    reference.get_input_embeddings().weight.data[tokens[index]] = float("nan")
    save(reference, tmp_path)
    with LLM(tmp_path, **SETTINGS) as broken:
        for max_steps in (1, MAX_RUN_STEPS):
            broken.scheduler._max_run_steps = max_steps
            (output,) = broken.generate(PROMPTS[:1], PARAMS[:1], use_tqdm=False)
            assert output.error is not None
            assert "no token can be drawn" in output.error
            assert output.outputs[0].token_ids == tokens[: index + 1]


def test_a_command_to_the_engines_process_ends_the_run(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop of that process, which reads commands between steps, in this one."""
    sender, receiver = map(FrameSocket, socketpair())
    with LLM(tiny, **SETTINGS) as engine:
        lengths = run_lengths(engine, monkeypatch)
        loop = EngineLoop(engine, receiver, messages.Timing(1.0, 1.0, 1.0))
        second = messages.Submit("second", PROMPTS[1], messages.params_to_wire(PARAMS[0]), "")
        commands = [messages.Stop(), messages.Abort("first"), second]

        def send_next() -> bool:
            if commands and len(lengths) > 0:
                sender.send_frame(messages.encode_message(commands.pop()))
            return False

        engine.end_runs_if.insert(0, send_next)
        first = messages.Submit("first", PROMPTS[0], messages.params_to_wire(PARAMS[0]), "")
        sender.send_frame(messages.encode_message(first))
        loop.run()
        assert lengths[0] == BLOCK_SIZE - len(PROMPTS[0])
        assert set(lengths[1:]) == {1}
        assert not commands


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tables": [np.array([[64]])]}, "a block lies outside of the cache"),
        ({"tables": []}, "has no block table"),
        ({"starts": np.array([12])}, "longer than its row of the block table"),
        ({"starts": np.array([-1])}, "needs a token to go on from"),
        (
            {"starts": np.array([10**6]), "tables": [np.zeros((1, 10**5), dtype=np.int64)]},
            "outside of the rotary table",
        ),
        ({"tokens": np.array([300])}, "outside of the matrix"),
        ({"rows": np.array([10**6])}, "a row has no settings"),
        ({"groups": [0]}, "a cache and a group for each"),
        ({"drawn": np.zeros((5, 2), dtype=np.int64)}, r"drawn \[steps, n\]"),
        ({"is_awaited": lambda: 1 / 0}, "division by zero"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(llm: LLM, change: dict[str, Any], message: str) -> None:
    worker: NativeWorker = getattr(llm.executor, "worker")  # noqa: B009 - not in the protocol
    cache = worker.cache
    assert cache is not None
    fitting: dict[str, Any] = {
        "groups": cache.group_of,
        "tables": [np.array([[63]])],
        "tokens": np.array([5]),
        "starts": np.array([3]),
        "settings": np.zeros((4, 5), dtype=np.int64),
        "rows": np.array([2]),
        "is_stop": np.zeros(1, dtype=np.bool_),
        "drawn": np.zeros((5, 1), dtype=np.int64),
        "are_finite": np.zeros(1, dtype=np.bool_),
        "seconds": 1.0,
        "is_awaited": lambda: False,
    }
    with pytest.raises((ValueError, ZeroDivisionError), match=message):
        worker.model.generator.run(cache.native, **fitting | change)
    assert worker.model.generator.run(cache.native, **fitting | {"seconds": 1000.0}) == 5
