"""Runs cases and says what was wrong."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Self

from fuzz.asynchronous import run_async
from fuzz.caching import check_caching
from fuzz.cases import Case
from fuzz.compare import UNKNOWN, Outcome, compare
from fuzz.engines import check_empty, count_engine, prepare
from fuzz.offline import OfflineRun
from fuzz.oracle import Oracle
from infinilm import LLM


@dataclass
class Report:
    """Of one case."""

    case: Case
    problems: list[str]
    facts: Counter[str] = field(default_factory=Counter)
    """How often something happened that a case can only make likely."""


def reproduce(case: Case) -> str:
    """The command that runs a case, and looks for a smaller one."""
    return f"PYTHONPATH=tests python -m fuzz --paths {case.path} --seed {case.seed} --cases 1 --shrink"


class Lab:
    """Runs cases, and compares each of their requests with its lone run."""

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self._servers: Any = None
        """Made when first needed: only the server's path needs the server's packages."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._servers is not None:
            self._servers.close()
        self.oracle.close()

    def run(self, case: Case) -> Report:
        """Run a case in a new engine, or a server."""
        facts = Counter[str]()
        if case.path == "server":
            outcomes, problems = self._run_served(case)
        elif case.path == "async":
            outcomes, problems = run_async(case, self.oracle.model, self._settings(case), facts)
        else:
            outcomes, problems = self._run_offline(case, facts)
        return judge(case, outcomes, problems, self.oracle, facts)

    def _run_served(self, case: Case) -> tuple[list[Outcome], list[str]]:
        from fuzz.served import Servers, run_served

        if self._servers is None:
            self._servers = Servers(self.oracle.model, self.oracle.tokenizer, self.oracle.settings)
        return run_served(case, self._servers)

    def _settings(self, case: Case) -> dict[str, Any]:
        settings = {**case.engine.kwargs(), **self.oracle.settings}
        if settings["device"] != "cpu":
            settings |= {"attention_backend": "auto", "enforce_eager": case.seed % 2 == 0}
        return settings

    def _run_offline(self, case: Case, facts: Counter[str]) -> tuple[list[Outcome], list[str]]:
        with LLM(self.oracle.model, **self._settings(case)) as engine:
            fault = prepare(engine, case)
            try:
                outcomes, problems = OfflineRun(case, engine, fault).run()
            except AssertionError as error:
                return [], [f"broken on the way: {error}"]
            problems += check_empty(engine)
            count_engine(facts, engine)
        return outcomes, problems


def judge(case: Case, outcomes: list[Outcome], problems: list[str], oracle: Oracle, facts: Counter[str]) -> Report:
    """Compare what came with what must come."""
    problems = list(problems)
    if not problems:
        missing = {arrival.name for arrival in case.arrivals} - {outcome.name for outcome in outcomes}
        problems += [f"{name}: there is nothing of it" for name in sorted(missing)]
    if case.path != "server":  # whose cache knows earlier cases
        problems += check_caching(case, outcomes, oracle)
    for outcome in outcomes:
        found, num_ties = compare(outcome, oracle)
        problems += found
        facts["near ties"] += num_ties
        facts["requests"] += 1
        facts["answers"] += len(outcome.answers)
        facts["callbacks that raised"] += outcome.has_raised
        facts["answers aborted"] += sum(answer.finish_reason == "abort" for answer in outcome.answers)
        facts["requests that failed"] += bool(outcome.error not in (None, UNKNOWN) or outcome.reply_error)
        facts["readers gone"] += outcome.was_left
    return Report(case, problems, facts)
