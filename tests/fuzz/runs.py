"""Runs cases and says what was wrong."""

from collections import Counter
from dataclasses import dataclass, field

from fuzz.asynchronous import run_async
from fuzz.cases import Case
from fuzz.compare import Outcome, compare
from fuzz.offline import OfflineRun
from fuzz.oracle import Oracle
from fuzz.served import Servers, run_served
from infinilm import LLM


@dataclass
class Report:
    """Of one case."""

    case: Case
    problems: list[str]
    facts: Counter[str] = field(default_factory=Counter)
    """How often something happened that a case can only make likely."""


def run_case(case: Case, oracle: Oracle, servers: Servers) -> Report:
    """Run a case in a new engine and compare each of its requests with its lone run."""
    settings = {**case.engine.kwargs(), **oracle.settings}
    if settings["device"] != "cpu":
        settings["attention_backend"] = "auto"
    facts = Counter[str]()
    if case.path == "server":
        outcomes, problems = run_served(case, servers)
    elif case.path == "async":
        outcomes, problems = run_async(case, oracle.model, settings, facts)
    else:
        with LLM(oracle.model, **settings) as engine:
            prepare(engine, case)
            try:
                outcomes, problems = OfflineRun(case, engine).run()
            except AssertionError as error:
                outcomes, problems = [], [f"broken on the way: {error}"]
            problems += check_empty(engine)
            count_engine(facts, engine)
    return judge(case, outcomes, problems, oracle, facts)


def prepare(engine: LLM, case: Case) -> None:
    """What has no setting: steps ahead as on a GPU, and shared beginnings that are worth waiting for."""
    engine._max_in_flight = case.engine.max_in_flight
    assert engine.scheduler.min_awaited_tokens > 0
    engine.scheduler.min_awaited_tokens = case.engine.min_awaited_tokens


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
    for name in ("_requests", "_owners", "_news", "_handles"):
        if left := getattr(engine, name):
            problems.append(f"the engine keeps {len(left)} entries in {name}")
    if engine.scheduler.has_work:
        problems.append("the scheduler still has work")
    return problems


def count_engine(facts: Counter[str], engine: LLM) -> None:
    stats = engine.stats()
    facts["steps"] += stats.num_steps
    facts["preemptions"] += stats.num_preemptions
    facts["cached prompt tokens"] += stats.num_cached_tokens


def judge(case: Case, outcomes: list[Outcome], problems: list[str], oracle: Oracle, facts: Counter[str]) -> Report:
    """Compare what came with what must come."""
    problems = list(problems)
    if not problems:
        missing = {arrival.name for arrival in case.arrivals} - {outcome.name for outcome in outcomes}
        problems += [f"{name}: there is nothing of it" for name in sorted(missing)]
    for outcome in outcomes:
        found, num_ties = compare(outcome, oracle)
        problems += found
        facts["near ties"] += num_ties
        facts["requests"] += 1
        facts["answers"] += len(outcome.answers)
        facts["callbacks that raised"] += outcome.has_raised
        facts["answers aborted"] += sum(answer.finish_reason == "abort" for answer in outcome.answers)
        facts["readers gone"] += outcome.was_left
    return Report(case, problems, facts)
