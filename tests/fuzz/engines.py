"""What every engine of a case is prepared with, and must be like when the case is over."""

from collections import Counter

from fuzz.cases import Case
from fuzz.faults import StepFault
from infinilm import LLM


def prepare(engine: LLM, case: Case) -> StepFault | None:
    """What has no setting: steps ahead as on a GPU, and shared beginnings that are worth waiting for."""
    engine._max_in_flight = case.engine.max_in_flight
    assert engine.scheduler.min_awaited_tokens > 0
    engine.scheduler.min_awaited_tokens = case.engine.min_awaited_tokens
    return StepFault(engine, case.fault_at, case.engine.max_in_flight) if case.fault_at else None


def check_empty(engine: LLM) -> list[str]:
    """Nothing may be left of a case."""
    stats = engine.stats()
    problems = []
    try:
        engine.scheduler.blocks.check_integrity([])
    except AssertionError as error:
        problems.append(f"blocks: {error}")
    if stats.num_free_blocks != stats.num_blocks:
        problems.append(f"{stats.num_blocks - stats.num_free_blocks} blocks are lost")
    if engine._requests:
        problems.append(f"the engine keeps {sorted(engine._requests)}")
    if not engine.is_finished():
        problems.append("the engine still has work, or something to report")
    return problems


def count_engine(facts: Counter[str], engine: LLM) -> None:
    stats = engine.stats()
    facts["steps"] += stats.num_steps
    facts["preemptions"] += stats.num_preemptions
    facts["cached prompt tokens"] += stats.num_cached_tokens
