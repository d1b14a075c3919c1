"""AsyncLLM: many callers at once, early leavers, and the end."""

import asyncio
from collections.abc import Iterator
from contextlib import aclosing

import pytest

from infinilm import LLM, AsyncLLM, RequestOutput, SamplingParams
from infinilm.errors import EngineError, InvalidValueError

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
PROMPTS = [f"The {word} of another nation" for word in ("north", "ocean", "moon", "ion", "rain", "tin")]


@pytest.fixture
def engine(tiny_dir) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(tiny_dir, num_kvcache_blocks=64)
    yield engine
    asyncio.run(engine.stop())
    assert not engine._thread.is_alive()


async def collect(engine: AsyncLLM, prompt: str, params: SamplingParams = PARAMS) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params)]


async def until_idle(engine: AsyncLLM) -> None:
    async with asyncio.timeout(20):
        while (await engine.stats()).num_free_blocks < 64:
            await asyncio.sleep(0.01)


def test_concurrent_callers_get_what_each_would_get_alone(engine, tiny_dir) -> None:
    async def run() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(collect(engine, prompt) for prompt in PROMPTS))

    results = asyncio.run(run())
    with LLM(tiny_dir, num_kvcache_blocks=64) as llm:
        expected = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    for outputs, alone in zip(results, expected, strict=True):
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert "".join(output.outputs[0].new_text for output in outputs) == alone.text
        assert outputs[-1].token_ids == alone.token_ids


def test_leaving_early_aborts_and_frees(engine) -> None:
    async def run() -> None:
        async with aclosing(engine.generate(PROMPTS[0], ENDLESS)) as outputs:
            async for _ in outputs:
                break
        task = asyncio.create_task(collect(engine, PROMPTS[1], ENDLESS))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_idle(engine)
        assert len(await collect(engine, PROMPTS[2])) == 20

    asyncio.run(run())


def test_abort_ends_the_iterator(engine) -> None:
    async def run() -> None:
        outputs = []
        async for output in engine.generate(PROMPTS[0], ENDLESS, request_id="x"):
            outputs.append(output)
            if len(outputs) == 2:
                assert await engine.abort("x")
        assert outputs[-1].finish_reason == "abort"
        assert not await engine.abort("x")
        await until_idle(engine)

    asyncio.run(run())


def test_bad_requests_raise_in_their_caller_only(engine) -> None:
    async def run() -> None:
        good = asyncio.create_task(collect(engine, PROMPTS[0]))
        with pytest.raises(InvalidValueError, match="the prompt is empty"):
            await collect(engine, "")
        assert (await good)[-1].finish_reason == "length"

    asyncio.run(run())


def test_stop_ends_what_runs_and_refuses_what_comes(tiny_dir) -> None:
    async def run() -> None:
        engine = AsyncLLM(tiny_dir, num_kvcache_blocks=64)
        running = asyncio.create_task(collect(engine, PROMPTS[0], ENDLESS))
        await asyncio.sleep(0.05)
        await engine.stop()
        await engine.stop()
        assert (await running)[-1].finish_reason == "abort"
        with pytest.raises(EngineError, match="stopped"):
            await collect(engine, PROMPTS[0])

    asyncio.run(run())
