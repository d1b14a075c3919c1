"""Single decisions of the scheduler. Whole histories are in test_scheduler_properties.py."""

import pytest

from infinilm.engine.block_manager import BlockManager
from infinilm.engine.plan import StepPlan, StepResult
from infinilm.engine.scheduler import Scheduler
from infinilm.engine.sequence import Sequence
from infinilm.sampling_params import SamplingParams


def make_scheduler(num_blocks: int = 1000, **limits: int) -> Scheduler:
    settings = {"max_num_seqs": 64, "max_num_batched_tokens": 800, "max_model_len": 4000, **limits}
    return Scheduler(BlockManager(num_blocks, 16), **settings)


def add(scheduler: Scheduler, *lengths: int, max_tokens: int = 50, stop_ids: tuple[int, ...] = ()) -> list[Sequence]:
    params = SamplingParams(max_tokens=max_tokens)
    seqs = [Sequence(index, [index + 1] * length, params, stop_ids=stop_ids) for index, length in enumerate(lengths)]
    for seq in seqs:
        scheduler.add(seq)
    return seqs


def step(scheduler: Scheduler, token_id: int = 7) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    draws = set(plan.draws)
    scheduler.commit(StepResult([token_id if index in draws else -1 for index in range(plan.num_rows)]))
    return plan


def chunks(plan: StepPlan) -> list[tuple[int, int]]:
    return [(chunk.row, len(chunk.token_ids)) for chunk in plan.chunks]


def test_a_prompt_is_not_begun_with_a_crumb() -> None:
    scheduler = make_scheduler()
    add(scheduler, 750, 401, 30)
    assert chunks(step(scheduler)) == [(0, 750)], "50 tokens are left, less than an eighth of 401"
    plan = step(scheduler)
    assert (plan.decoding.rows.tolist(), chunks(plan)) == ([0], [(1, 401), (2, 30)])


def test_an_eighth_is_no_crumb() -> None:
    scheduler = make_scheduler()
    add(scheduler, 750, 400)
    assert chunks(step(scheduler)) == [(0, 750), (1, 50)]


def test_where_no_other_prompt_is_computed_a_crumb_is_better_than_nothing() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64, max_num_seqs=63)
    add(scheduler, *[1] * 60, 500, 2)
    assert len(step(scheduler).chunks) == 60, "4 tokens are left for a prompt of 500"
    plan = step(scheduler)
    assert (len(plan.decoding.rows), chunks(plan)) == (60, [(60, 4)])


def test_when_blocks_run_out_the_newest_gives_up_its_own() -> None:
    scheduler = make_scheduler(num_blocks=6, max_model_len=96)
    old, new = add(scheduler, 30, 30)
    for _ in range(4):
        step(scheduler)
    assert (len(old.block_table), len(new.block_table)) == (3, 3)
    for _ in range(15):
        step(scheduler)
    assert (old.num_tokens, new.num_tokens) == (49, 49)
    plan = step(scheduler)
    assert plan.decoding.rows.tolist() == [old.row]
    assert (len(old.block_table), new.block_table, new.num_preemptions) == (4, [], 1)
    assert plan.decoding.grown_rows.tolist() == [old.row]
    assert plan.decoding.new_blocks.tolist() == old.block_table[3:]


@pytest.mark.parametrize("stop_ids", [(7,), (3, 7), (7, 50_000)])
def test_a_stop_id_ends_its_own_sequences_only(stop_ids: tuple[int, ...]) -> None:
    scheduler = make_scheduler()
    (stops,) = add(scheduler, 5, stop_ids=stop_ids)
    goes_on = Sequence(1, [1] * 5, SamplingParams(max_tokens=50), stop_ids=(3,))
    scheduler.add(goes_on)
    step(scheduler, token_id=49_999)
    assert not stops.is_finished
    step(scheduler)
    assert stops.finish_reason == "stop"
    assert not goes_on.is_finished
    step(scheduler, token_id=3)
    assert goes_on.finish_reason == "stop"


def test_an_answer_never_outgrows_its_limit_with_steps_in_flight() -> None:
    scheduler = make_scheduler()
    (seq,) = add(scheduler, 5, max_tokens=3)
    plans = [scheduler.schedule() for _ in range(4)]
    assert [plan is not None for plan in plans] == [True, True, True, False]
    assert scheduler.num_pending(seq) == 3
    for _ in range(3):
        scheduler.commit(StepResult([9]))
    assert (seq.output_token_ids, seq.finish_reason) == ([9, 9, 9], "length")
