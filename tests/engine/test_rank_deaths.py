"""Ranks that die: every caller hears of it, with rank and exit code, and soon."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import Thread

import pytest
import torch
from processes import eventually, ranks, time_limit
from troubled_model import save_troubled, trouble

from infinilm import LLM, AsyncLLM, RequestOutput, SamplingParams
from infinilm.distributed import DistConfig
from infinilm.engine import InferEngine
from infinilm.errors import WorkerDiedError

PROMPT = [5, 6, 7, 8]
ENDLESS = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
REPORT_TIME_S = 5.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_troubled(tmp_path_factory.mktemp("troubled"))


@pytest.fixture(autouse=True)
def no_test_hangs() -> Iterator[None]:
    with time_limit():
        yield


@contextmanager
def dies(rank: int, exit_code: int, *, kill: signal.Signals | None = None, after_s: float = 0.4) -> Iterator[None]:
    """In the block a rank dies, or is killed after a while, and the block's last call reports it in time."""
    pid = ranks()[rank - 1]
    died_at = time.monotonic()

    def do_kill() -> None:
        nonlocal died_at
        time.sleep(after_s)
        died_at = time.monotonic()
        os.kill(pid, kill or signal.SIGKILL)

    killer = Thread(target=do_kill)
    if kill is not None:
        killer.start()
    message = rf"rank {rank} \(process {pid}\) died with exit code {exit_code}; .*make a new one"
    with pytest.raises(WorkerDiedError, match=message):
        yield
    if kill is not None:
        killer.join()
    assert time.monotonic() - died_at < REPORT_TIME_S


def assert_is_dead(engine: InferEngine, message: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: engine(input_ids=[PROMPT]),
        lambda: engine.generate([PROMPT], 2),
        engine.reset_cache,
        engine.state_dict,
        lambda: engine.load_param("model.norm.weight", torch.ones(96)),
    ]
    for call in [*calls, engine.close, *calls]:
        if call == engine.close:
            start = time.monotonic()
            engine.close()
            assert time.monotonic() - start < REPORT_TIME_S
            assert ranks() == []
            continue
        with pytest.raises(WorkerDiedError, match=message):
            call()


def test_a_rank_that_dies_while_nothing_is_done(checkpoint: Path) -> None:
    engine = InferEngine(checkpoint, DistConfig(2))
    (pid,) = ranks()
    os.kill(pid, signal.SIGKILL)
    assert_is_dead(engine, rf"rank 1 \(process {pid}\) died with exit code -9")


def test_nothing_is_left_of_an_engine_whose_rank_dies_between_calls(checkpoint: Path) -> None:
    with LLM(checkpoint, tensor_parallel_size=2, device="cpu", num_kvcache_blocks=16) as engine:
        (pid,) = ranks()
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: engine.executor._peers.failure is not None)  # type: ignore[attr-defined]
        for _ in range(2):
            with pytest.raises(WorkerDiedError, match=rf"rank 1 \(process {pid}\) died with exit code -9"):
                engine.generate([PROMPT], ENDLESS, use_tqdm=False)
            assert engine.executor._worker is None  # type: ignore[attr-defined]
            assert engine.executor._peers.all == []  # type: ignore[attr-defined]


def test_a_rank_that_dies_of_its_work(checkpoint: Path) -> None:
    engine = InferEngine(checkpoint, DistConfig(2))
    with dies(1, 3):
        engine(input_ids=[trouble("exit", 1)])
    assert_is_dead(engine, "rank 1 .* exit code 3")


@pytest.mark.parametrize(
    ("size", "rank", "sleeper"),
    [(2, 1, 1), (3, 2, 1), (3, 1, 2)],
    ids=["rank 1 of 2", "rank 2 of 3, while rank 1 is awaited", "rank 1 of 3, while rank 2 is awaited"],
)
def test_a_rank_that_is_killed_in_the_middle_of_a_pass(checkpoint: Path, size: int, rank: int, sleeper: int) -> None:
    engine = InferEngine(checkpoint, DistConfig(size))
    with dies(rank, -9, kill=signal.SIGKILL):
        engine(input_ids=[trouble("sleep", sleeper)])
    assert_is_dead(engine, f"rank {rank} .* exit code -9")


def test_a_rank_that_dies_when_all_meet_again(checkpoint: Path) -> None:
    engine = InferEngine(checkpoint, DistConfig(2))
    with dies(1, 4):
        engine(input_ids=[trouble("die joining", 1)])
    assert_is_dead(engine, "rank 1 .* exit code 4")


def test_a_rank_that_is_killed_during_generate(checkpoint: Path) -> None:
    llm = LLM(checkpoint, num_kvcache_blocks=64, tensor_parallel_size=2)
    waiting = llm.add_request(PROMPT, ENDLESS)
    with dies(1, -signal.SIGSEGV, kill=signal.SIGSEGV):
        for _ in count():
            llm.generate([PROMPT] * 4, ENDLESS, use_tqdm=False)
    for call in (llm.step, lambda: llm.generate(PROMPT), lambda: llm.stream(PROMPT), lambda: llm.add_request(PROMPT)):
        with pytest.raises(WorkerDiedError, match=r"rank 1 .* exit code -11"):
            call()
    assert not llm.abort(waiting)
    assert llm.is_finished()
    llm.exit()
    assert ranks() == []


def test_asynchronous_callers_hear_of_it(checkpoint: Path) -> None:
    engine = AsyncLLM(checkpoint, num_kvcache_blocks=64, max_num_seqs=2, tensor_parallel_size=2)

    async def collect(prompt: list[int]) -> RequestOutput:
        *_, last = [output async for output in engine.generate(prompt, ENDLESS)]
        return last

    async def fail() -> None:
        for action, error in [("own", "TroubleError: in trouble"), ("leave", "EngineError: SystemExit: 5")]:
            last = await collect(trouble(action, 1))
            assert (last.finish_reason, last.error) == ("abort", error)
        last = await collect(PROMPT)
        assert (last.finish_reason, last.error) == ("length", None)

    async def die() -> None:
        (pid,) = ranks()
        tasks = [asyncio.create_task(collect(PROMPT)) for _ in range(4)]  # two of them have to wait
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(REPORT_TIME_S):
            for error in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(error, WorkerDiedError)
                assert f"rank 1 (process {pid}) died with exit code -9" in str(error)
        with pytest.raises(WorkerDiedError, match=r"rank 1 .* exit code -9"):
            await collect(PROMPT)
        async with asyncio.timeout(REPORT_TIME_S):
            await engine.stop()

    asyncio.run(fail())
    asyncio.run(die())
    assert ranks() == []


@pytest.mark.parametrize("delay_s", [0.0, 0.3, 1.0])
def test_a_rank_that_is_killed_while_the_engine_starts(checkpoint: Path, delay_s: float) -> None:
    def kill() -> None:
        eventually(lambda: len(ranks()) == 2, 30)
        time.sleep(delay_s)
        os.kill(ranks()[1], signal.SIGKILL)

    def start_and_run() -> None:
        engine = InferEngine(checkpoint, DistConfig(3))
        killer.join()
        engine(input_ids=[PROMPT])  # if it was quicker than the killer

    killer = Thread(target=kill)
    killer.start()
    with pytest.raises(WorkerDiedError, match=r"rank 2 \(process \d+\) died with exit code -9"):
        start_and_run()
    assert eventually(lambda: ranks() == [])
