"""The ranks of a pipeline: that stages compute at the same time, and what happens when one of them fails or dies."""

import asyncio
import json
import os
import signal
from collections import deque
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest
import torch
import watchful_model
from checkpoints import make_reference, save
from processes import eventually, ranks
from ranks import run_ranks
from troubled_model import save_troubled, trouble

from infinilm import LLM, AsyncLLM, SamplingParams
from infinilm.distributed import CommunicationGroup
from infinilm.engine.block_manager import BlockManager
from infinilm.engine.scheduler import Scheduler
from infinilm.engine.sequence import Sequence
from infinilm.engine.step import Step
from infinilm.errors import WorkerDiedError
from infinilm.executor.step_io import StepOutput
from infinilm.models.stages import _cut

PROMPT = [5, 6, 7, 8]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=240, ignore_eos=True)


# --- layers and costs ---


@pytest.mark.parametrize(
    ("costs", "num_parts", "starts"),
    [
        ([1, 1, 1, 1], 2, [0, 2]),
        ([1, 1, 1, 1, 1], 1, [0]),
        ([1, 1, 1, 1, 1, 4], 2, [0, 5]),  # the head costs as much as three layers
        ([4, 1, 1, 1, 1, 4], 3, [0, 1, 5]),
        ([3, 1, 1, 1, 1, 1, 1, 3], 4, [0, 1, 4, 7]),
        ([1, 1, 1], 3, [0, 1, 2]),
    ],
)
def test_parts_cost_about_the_same(costs: list[int], num_parts: int, starts: list[int]) -> None:
    assert _cut(costs, num_parts) == starts


def test_a_cut_is_the_best_of_all() -> None:
    costs = [7, 2, 3, 9, 1, 4, 4, 8, 2]

    def worst(starts: list[int]) -> int:
        return max(sum(costs[a:b]) for a, b in zip(starts, [*starts[1:], len(costs)], strict=True))

    for num_parts in range(1, 6):
        every = [[0, *more] for more in combinations(range(1, len(costs)), num_parts - 1)]
        assert worst(_cut(costs, num_parts)) == min(map(worst, every))


# --- what stages send each other ---


def test_sends_wait_for_nobody_and_arrive_in_order() -> None:
    def talk(group: CommunicationGroup) -> list[torch.Tensor]:
        if group.rank == 0:
            for number in range(group.size + 1):  # nobody receives before all are sent
                group.send(torch.full((number + 1, 2), float(number)).t(), 1)
            group.barrier()
            for number in range(20):
                group.send(torch.tensor([number]), 1)
            return []
        group.barrier()
        parts = [group.receive(torch.empty(2, number + 1), 0) for number in range(group.size + 1)]
        return [*parts, *(group.receive(torch.empty(1, dtype=torch.int64), 0) for _ in range(20))]

    _, heard = run_ranks(2, talk)
    assert [part[0, 0].item() for part in heard[:3]] == [0, 1, 2]
    assert [part.item() for part in heard[3:]] == list(range(20))


# --- overlap ---


def test_stages_compute_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps in flight, the first stage begins a step while the second is at work on the one before."""
    path = save(make_reference("llama-gqa"), tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    own = {"model_type": "watchful", "architectures": ["WatchfulForCausalLM"]}
    (path / "config.json").write_text(json.dumps(config | own))
    log = tmp_path / "log"
    log.touch()
    monkeypatch.setenv(watchful_model.LOG, str(log))
    prompts = [[3 + i, 4, 5] for i in range(4)]
    counts, answers = [], []
    with LLM(path, pipeline_parallel_size=2, device="cpu", num_kvcache_blocks=16) as llm:
        for depth, patience_s in ((1, 0.01), (llm.executor.info.max_in_flight, 1.0)):
            monkeypatch.setattr(watchful_model.WatchfulModel, "patience_s", patience_s)
            llm._max_in_flight = depth
            answers.append([output.token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)])
            counts.append(log.read_text().count("overlapped"))
        num_steps = llm.stats().num_steps // 2
    assert answers[0] == answers[1]
    assert counts[0] == 0
    assert num_steps - 4 <= counts[1] <= num_steps  # all but those at the beginning and the end


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_what_steps_in_flight_save(num_stages: int) -> None:
    """Where a stage takes longer for more tokens, all stages are busy. Where it does not, one step of all rows is as
    quick as several of some."""
    for per_token, gain in ((True, num_stages), (False, 1)):
        alone = simulated_rate(num_stages, depth=1, num_shares=1, per_token=per_token)
        shared = simulated_rate(num_stages, depth=num_stages + 1, num_shares=num_stages, per_token=per_token)
        assert shared / alone == pytest.approx(gain, rel=0.1)


def simulated_rate(num_stages: int, *, depth: int, num_shares: int, per_token: bool) -> float:
    """Tokens per unit of time with so many steps in flight, while 12 sequences decode. A stage takes one unit for a
    step, or one for each of its tokens."""
    blocks = BlockManager(200, 16)
    scheduler = Scheduler(blocks, max_num_seqs=12, max_num_batched_tokens=64, max_model_len=500, num_stages=num_stages)
    scheduler.num_shares = num_shares
    for index in range(12):
        scheduler.add(Sequence(index, [1, 2, 3], SamplingParams(max_tokens=100)))
    free_at = [0] * num_stages  # by stage: when it is done with the steps it was given
    in_flight: deque[tuple[Step, int]] = deque()
    now = num_tokens = 0
    while scheduler.has_work:
        while len(in_flight) < depth and (step := scheduler.schedule()):
            done_at = now
            for stage in range(num_stages):
                size = step.input.decoding.num_tokens + step.input.num_chunk_tokens
                done_at = free_at[stage] = max(done_at, free_at[stage]) + (size if per_token else 1)
            in_flight.append((step, done_at))
        step, now = in_flight.popleft()
        scheduler.commit(step, StepOutput.of([[7] * count for count in step.input.sample_counts]))
        num_tokens += step.input.num_samples
    return num_tokens / now


# --- errors ---


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_troubled(tmp_path_factory.mktemp("troubled"))


@pytest.fixture(scope="module")
def staged(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, num_kvcache_blocks=64, pipeline_parallel_size=2) as llm:
        yield llm


@pytest.mark.parametrize("place", ["before", "between"])
@pytest.mark.parametrize("rank", [0, 1, 9])
def test_a_step_that_fails_ends_the_requests_in_flight(
    staged: LLM, rank: int, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = staged.generate(PROMPT, GREEDY, use_tqdm=False)[0].token_ids
    outputs = staged.generate([PROMPT, trouble("own", rank, place)], GREEDY, use_tqdm=False)
    assert [output.error for output in outputs] == ["TroubleError: in trouble"] * 2
    assert caplog.records[-1].exc_info
    notes = getattr(caplog.records[-1].exc_info[1], "__notes__", ())
    assert f"on rank {rank % 9} in stage {rank % 9}" in "\n".join(notes)
    assert staged.generate(PROMPT, GREEDY, use_tqdm=False)[0].token_ids == expected
    assert staged.stats().num_free_blocks == 64


def test_a_dead_stage_ends_all_requests(checkpoint: Path) -> None:
    before = set(ranks())
    engine = AsyncLLM(checkpoint, num_kvcache_blocks=64, max_num_seqs=2, pipeline_parallel_size=2)

    async def collect() -> None:
        async for _ in engine.generate(PROMPT, ENDLESS):
            pass

    async def die() -> None:
        (pid,) = set(ranks()) - before
        tasks = [asyncio.create_task(collect()) for _ in range(4)]  # two of them have to wait
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            for error in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(error, WorkerDiedError)
                assert f"rank 0 in stage 0 (process {pid}) died with exit code -9" in str(error)
            await engine.stop()

    asyncio.run(die())
    assert eventually(lambda: set(ranks()) == before)
