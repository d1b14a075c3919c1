"""How many prompt tokens a step gets, by the time that steps took."""

import numpy as np

from infinilm.engine.block_manager import BlockManager
from infinilm.engine.scheduler import Scheduler
from infinilm.executor.step_io import BlockUpdates, DecodeRows, RowChunk, StepInput
from infinilm.server.engine_process import (
    FIRST_TOKENS,
    MIN_TOKENS,
    Pace,
    StepPace,
)


def settle(pace: Pace, seconds_per_token: float, num_steps: int = 30) -> int:
    for _ in range(num_steps):
        pace.note(pace.num_tokens, 0.01 + pace.num_tokens * seconds_per_token)
    return pace.num_tokens


def test_a_pace_settles_where_steps_take_their_time() -> None:
    pace = Pace(0.1, 4096)
    assert abs(settle(pace, 0.001) - 90) <= 2
    assert abs(settle(pace, 0.0001) - 900) <= 10
    assert settle(pace, 0.000001) == 4096
    assert settle(pace, 0.1) == MIN_TOKENS


def test_one_slow_step_costs_no_more_than_half() -> None:
    pace = Pace(0.1, 4096)
    before = settle(pace, 0.0001)
    pace.note(before, 60.0)
    assert pace.num_tokens == before // 2


def test_a_quick_step_with_few_tokens_changes_nothing() -> None:
    pace = Pace(0.1, 4096)
    pace.note(3, 0.001)
    assert pace.num_tokens == FIRST_TOKENS
    pace.note(FIRST_TOKENS, 0.05)
    assert pace.num_tokens == 2 * FIRST_TOKENS


def test_no_limit_exceeds_the_engines_own() -> None:
    pace = Pace(0.1, 10)
    assert settle(pace, 0.1) == 10


def test_steps_with_and_without_answers_have_a_pace_each() -> None:
    scheduler = Scheduler(BlockManager(64, 16), max_num_seqs=4, max_num_batched_tokens=512, max_model_len=512)
    pace = StepPace(scheduler, mixed_s=0.1, prefill_s=0.5)
    assert (scheduler.max_mixed_tokens, scheduler.max_prefill_tokens) == (FIRST_TOKENS, FIRST_TOKENS)
    chunks = [RowChunk(0, 0, [1] * FIRST_TOKENS, samples=False)]
    one = np.array([1])
    none = BlockUpdates(one[:0], one[:0], one[:0], one[:0])
    pace.note(StepInput([], [], none, DecodeRows.none(), chunks), 0.25)
    assert (scheduler.max_mixed_tokens, scheduler.max_prefill_tokens) == (FIRST_TOKENS, 2 * FIRST_TOKENS)
    pace.note(StepInput([], [], none, DecodeRows(one, one, one.reshape(1, 1)), chunks), 0.2)
    assert (scheduler.max_mixed_tokens, scheduler.max_prefill_tokens) == (FIRST_TOKENS // 2, 2 * FIRST_TOKENS)
    pace.note(StepInput([], [], none, DecodeRows(one, one, one.reshape(1, 1)), []), 9.0)
    pace.note(None, 9.0)
    assert (scheduler.max_mixed_tokens, scheduler.max_prefill_tokens) == (FIRST_TOKENS // 2, 2 * FIRST_TOKENS)


def test_steps_beside_answers_take_at_most_a_multiple_of_those_without_prompts() -> None:
    """A large model's decode step alone takes longer than the time that a small one's may."""
    scheduler = Scheduler(BlockManager(64, 16), max_num_seqs=4, max_num_batched_tokens=512, max_model_len=512)
    pace = StepPace(scheduler, mixed_s=0.01, prefill_s=0.1, mixed_ratio=2.0)
    one = np.array([1])
    none = BlockUpdates(one[:0], one[:0], one[:0], one[:0])
    rows = DecodeRows(one, one, one.reshape(1, 1))
    for _ in range(200):
        pace.note(StepInput([], [], none, rows, []), 0.02)
        num_tokens = scheduler.max_mixed_tokens
        chunks = [RowChunk(0, 0, [1] * num_tokens, samples=False)]
        pace.note(StepInput([], [], none, rows, chunks), 0.02 + num_tokens * 1e-4)
    assert abs(scheduler.max_mixed_tokens - 200) <= 4


def test_a_slow_step_with_few_tokens_costs_no_more_than_half() -> None:
    """It may have been slow because of another process."""
    pace = Pace(0.02, 4096)
    before = settle(pace, 0.00001)
    pace.note(20, 0.05)
    assert pace.num_tokens == before // 2


def test_gaps_stay_near_the_time_of_a_step() -> None:
    """A clock that is simulated: 256 rows take 5 ms, a prompt token 10 us; a step in a hundred has a hiccup of 3 ms."""
    pace = Pace(0.015, 16384)
    gaps = []
    for index in range(1000):
        seconds = 0.005 + pace.num_tokens * 10e-6 + (0.003 if index % 100 == 0 else 0)
        pace.note(pace.num_tokens, seconds)
        gaps.append(seconds)
    assert sorted(gaps)[990] < 0.02
    assert pace.num_tokens > 900
