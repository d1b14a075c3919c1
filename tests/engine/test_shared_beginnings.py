"""Sequences that come together and begin alike: the beginning is computed once, and its blocks are shared."""

from typing import Any

import pytest
from narrow import present

from infinilm.engine.block_manager import BlockManager
from infinilm.engine.scheduler import Scheduler
from infinilm.engine.sequence import Sequence
from infinilm.executor.step_io import StepInput, StepOutput
from infinilm.sampling_params import SamplingParams

COMMON = list(range(1000, 1320))


def make_scheduler(*, enable_prefix_caching: bool = True) -> Scheduler:
    blocks = BlockManager(200, 16, enable_prefix_caching=enable_prefix_caching)
    return Scheduler(blocks, max_num_seqs=8, max_num_batched_tokens=4096, max_model_len=1024)


def make_sequences(*prompts: list[int], **params: Any) -> list[Sequence]:
    return [Sequence(i, prompt, SamplingParams(max_tokens=4, **params)) for i, prompt in enumerate(prompts)]


def step(scheduler: Scheduler) -> list[int]:
    """Compute a step: how many tokens each of its rows had."""
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, StepOutput([7] * plan.input.num_rows))
    return lengths(plan.input)


def lengths(plan: StepInput) -> list[int]:
    return [1] * len(plan.decoding.rows) + [len(chunk.token_ids) for chunk in plan.chunks]


def test_the_second_waits_for_the_first_and_shares_its_blocks() -> None:
    scheduler = make_scheduler()
    first, second, third = make_sequences([*COMMON, 1, 2], [*COMMON, 3], [5] * 20)
    for seq in (first, second, third):
        scheduler.add(seq)
    assert step(scheduler) == [322, 20], "the third has nothing to wait for"
    assert step(scheduler) == [1, 1, 1], "all but the last token was found"
    assert second.num_cached_tokens == 320
    assert second.block_tables[0][:20] == first.block_tables[0][:20]


def test_with_steps_in_flight_it_waits_until_the_blocks_are_known() -> None:
    scheduler = make_scheduler()
    first, second = make_sequences([*COMMON, 1], [*COMMON, 3])
    scheduler.add(first)
    scheduler.add(second)
    plans = [present(scheduler.schedule()), present(scheduler.schedule())]
    assert [plan.seqs for plan in plans] == [[first], [first]]
    for plan in plans:
        scheduler.commit(plan, StepOutput([7]))
    assert step(scheduler) == [1, 1]


@pytest.mark.parametrize("common", [COMMON[:255], []])
def test_a_short_beginning_is_not_waited_for(common: list[int]) -> None:
    scheduler = make_scheduler()
    for seq in make_sequences([*common, *[1] * 300], [*common, *[2] * 300]):
        scheduler.add(seq)
    assert len(step(scheduler)) == 2


def test_nobody_waits_for_what_will_not_be_found() -> None:
    without_cache = make_scheduler(enable_prefix_caching=False)
    for seq in make_sequences([*COMMON, 1], [*COMMON, 3]):
        without_cache.add(seq)
    assert step(without_cache) == [321, 321]

    changed_by_hooks = make_scheduler()
    first, second = make_sequences([*COMMON, 1], [*COMMON, 3])
    first.is_patched = True
    changed_by_hooks.add(first)
    changed_by_hooks.add(second)
    assert step(changed_by_hooks) == [321, 321]


def test_when_the_first_is_aborted_the_second_goes_on() -> None:
    scheduler = make_scheduler()
    first, second = make_sequences([*COMMON, 1], [*COMMON, 3])
    scheduler.add(first)
    scheduler.add(second)
    assert scheduler.schedule() is not None
    scheduler.finish(first, "abort")
    plan = scheduler.schedule()
    assert plan is not None
    assert lengths(plan.input) == [321]
