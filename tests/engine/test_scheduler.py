"""Single decisions of the scheduler. Whole histories are in test_scheduler_properties.py."""

from typing import Any

import pytest
from narrow import present

from infinilm.engine.block_manager import BlockManager
from infinilm.engine.scheduler import Scheduler
from infinilm.engine.sequence import Sequence, Status
from infinilm.executor.step_io import StepInput, StepOutput
from infinilm.sampling_params import SamplingParams


def make_scheduler(num_blocks: int = 1000, **limits: int) -> Scheduler:
    settings: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 800, "max_model_len": 4000, **limits}
    return Scheduler(BlockManager(num_blocks, 16), **settings)


def add(scheduler: Scheduler, *lengths: int, max_tokens: int = 50, stop_ids: tuple[int, ...] = ()) -> list[Sequence]:
    params = SamplingParams(max_tokens=max_tokens)
    seqs = [Sequence(index, [index + 1] * length, params, stop_ids=stop_ids) for index, length in enumerate(lengths)]
    for seq in seqs:
        scheduler.add(seq)
    return seqs


def step(scheduler: Scheduler, token_id: int = 7) -> StepInput:
    planned = scheduler.schedule()
    assert planned is not None
    scheduler.commit(planned, StepOutput.of([[token_id] * count for count in planned.input.sample_counts.tolist()]))
    return planned.input


def chunks(plan: StepInput) -> list[tuple[int, int]]:
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
    add(scheduler, *[1] * 60, 500)
    assert len(step(scheduler).chunks) == 60, "4 tokens are left for a prompt of 500"
    plan = step(scheduler)
    assert (len(plan.decoding.rows), chunks(plan)) == (60, [(60, 4)])


def test_a_short_prompt_is_computed_beside_a_long_one() -> None:
    scheduler = make_scheduler(max_model_len=8000)
    add(scheduler, 5000, 30, 700)
    assert chunks(step(scheduler)) == [(1, 30), (2, 370), (0, 400)]
    plan = step(scheduler)
    assert (plan.decoding.rows.tolist(), chunks(plan)) == ([1], [(2, 330), (0, 469)])
    assert chunks(step(scheduler)) == [(0, 798)]


def test_a_late_prompt_passes_all_long_ones_that_wait() -> None:
    scheduler = make_scheduler(max_model_len=8000, num_blocks=4000)
    seqs = add(scheduler, *[5000] * 9)
    step(scheduler)
    late = Sequence(len(seqs), [99] * 900, SamplingParams(max_tokens=5))
    scheduler.add(late)
    for _ in range(3):
        step(scheduler)
    assert late.num_output_tokens == 1
    assert seqs[0].num_computed == 800 + 3 * 400 + 300, "half of each step, and what the other left"


def test_half_of_a_step_is_for_the_oldest_prompt_whatever_comes() -> None:
    scheduler = make_scheduler(max_model_len=8000, num_blocks=4000)
    (long,) = add(scheduler, 5000)
    for number in range(1, 13):
        for each in range(20):
            scheduler.add(Sequence(number * 20 + each, [number, each] * 30, SamplingParams(max_tokens=1)))
        step(scheduler)
        assert long.num_computed >= 400 * number


def test_tenants_share_what_the_oldest_leaves() -> None:
    """Of two tenants with long prompts, the one with many gets about as much as the one with one."""
    scheduler = make_scheduler(max_model_len=8000, num_blocks=9000)
    params = SamplingParams(max_tokens=5)
    many = [Sequence(index, [index] * 4000, params, cache_salt=b"many") for index in range(8)]
    one = Sequence(8, [8] * 4500, params, cache_salt=b"one")
    for seq in (*many, one):
        scheduler.add(seq)
    while one.num_output_tokens == 0:
        step(scheduler)
    assert sum(seq.num_output_tokens > 0 for seq in many) == 1
    assert sum(seq.num_computed for seq in many) <= one.num_prompt_tokens + 2 * 800


def test_a_tenant_with_many_short_prompts_lets_others_in() -> None:
    scheduler = make_scheduler()
    params = SamplingParams(max_tokens=5)
    for index in range(50):
        scheduler.add(Sequence(index, [index] * 90, params, cache_salt=b"many"))
    other = Sequence(50, [50] * 90, params, cache_salt=b"other")
    scheduler.add(other)
    step(scheduler)
    step(scheduler)
    assert other.num_output_tokens > 0


def test_prompts_beside_answers_get_a_limited_part_of_a_step() -> None:
    scheduler = make_scheduler(max_model_len=8000)
    scheduler.max_mixed_tokens = 50
    add(scheduler, 30, 2000)
    assert chunks(step(scheduler)) == [(0, 30), (1, 770)], "nobody decodes yet"
    for _ in range(3):
        plan = step(scheduler)
        assert (plan.decoding.rows.tolist(), chunks(plan)) == ([0], [(1, 50)])
    scheduler.add(Sequence(2, [5] * 30, SamplingParams()))
    assert chunks(step(scheduler)) == [(2, 25), (1, 25)]
    assert chunks(step(scheduler)) == [(2, 5), (1, 45)]


def test_a_step_beside_answers_is_no_larger_than_a_graph() -> None:
    scheduler = make_scheduler(max_model_len=8000)
    scheduler.graph_tokens = 64
    add(scheduler, 30, 2000)
    assert chunks(step(scheduler)) == [(0, 30), (1, 770)], "nobody decodes yet"
    assert chunks(step(scheduler)) == [(1, 63)]
    scheduler.graph_tokens = 1
    assert chunks(step(scheduler)) == [(1, 799)], "a graph has no room for a prompt"


def test_the_end_of_a_long_prompt_holds_up_no_short_one() -> None:
    """What is left of it would fit into a step without answers, but not into one beside them."""
    scheduler = make_scheduler()
    scheduler.max_mixed_tokens = 50
    _, long = add(scheduler, 30, 1500)
    step(scheduler)
    while long.num_remaining > 300:
        step(scheduler)
    scheduler.add(Sequence(2, [5] * 20, SamplingParams()))
    assert chunks(step(scheduler)) == [(2, 20), (1, 30)]


def test_prompts_get_as_many_tokens_as_answers() -> None:
    scheduler = make_scheduler()
    scheduler.max_mixed_tokens = 5
    add(scheduler, *[10] * 20)
    step(scheduler)
    plan = step(scheduler)
    assert (len(plan.decoding.rows), chunks(plan)) == (20, [])
    scheduler.add(Sequence(21, [1] * 300, SamplingParams()))
    assert chunks(step(scheduler)) == [(20, 20)]


def test_a_short_prompt_passes_a_long_one_that_lacks_blocks() -> None:
    scheduler = make_scheduler(num_blocks=120, max_num_batched_tokens=200, max_model_len=1600)
    seqs = add(scheduler, 900, 1000, 30)
    for _ in range(6):
        step(scheduler)
    old, blocked, short = seqs
    assert old.num_output_tokens > 0
    assert blocked.num_computed == 0
    assert short.num_output_tokens > 0


def test_none_passes_that_would_keep_the_long_one_waiting() -> None:
    """The long one and those that passed it must fit together into the pool."""
    scheduler = make_scheduler(num_blocks=120, max_num_batched_tokens=200, max_model_len=1900)
    (old,) = add(scheduler, 900, max_tokens=90)
    while old.num_output_tokens == 0:
        step(scheduler)
    late = [Sequence(1 + index, [index] * length, old.params) for index, length in enumerate([1850, 100, 100])]
    for seq in late:
        scheduler.add(seq)
    for _ in range(8):
        step(scheduler)
    assert [seq.num_output_tokens > 0 for seq in late] == [False] * 3
    while not old.is_finished:
        step(scheduler)
    step(scheduler)
    assert late[0].num_computed > 0


def test_when_blocks_run_out_the_newest_gives_up_its_own() -> None:
    scheduler = make_scheduler(num_blocks=6, max_model_len=96)
    old, new = add(scheduler, 30, 30)
    for _ in range(4):
        step(scheduler)
    assert (len(old.block_tables[0]), len(new.block_tables[0])) == (3, 3)
    for _ in range(15):
        step(scheduler)
    assert (old.num_tokens, new.num_tokens) == (49, 49)
    plan = step(scheduler)
    assert plan.decoding.rows.tolist() == [old.row]
    assert (len(old.block_tables[0]), new.block_tables, new.num_preemptions) == (4, [], 1)
    assert plan.blocks.rows.tolist() == [old.row]
    assert plan.blocks.blocks.tolist() == old.block_tables[0][3:]


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
    for plan in plans[:3]:
        scheduler.commit(present(plan), StepOutput([9]))
    assert (seq.completion_token_ids, seq.finish_reason) == ([9, 9, 9], "length")


def test_prompts_that_fit_into_a_step_start_in_order_and_fill_every_step() -> None:
    """As in offline generation: no budget is lost, and at most one prompt is cut."""
    scheduler = make_scheduler(num_blocks=4000)
    lengths = [100 + 37 * index % 600 for index in range(100)]
    seqs = add(scheduler, *lengths, max_tokens=2)
    started: list[Sequence] = []
    while scheduler.waiting:
        plan = step(scheduler)
        started += [seq for seq in seqs if seq.status is not Status.WAITING and seq not in started]
        assert started == seqs[: len(started)]
        assert sum(seq.status is Status.RUNNING and not seq.is_decoding for seq in seqs) <= 1
        num_free = 800 - plan.num_chunk_tokens - len(plan.decoding.rows)
        assert not scheduler.waiting or num_free * 8 < scheduler.waiting[0].num_tokens
