"""Prompt tokens may be found in the prefix cache only if an earlier request with the same salt computed them."""

from fuzz.cases import Case
from fuzz.compare import UNKNOWN, Outcome
from fuzz.oracle import Oracle

BLOCK_SIZE = 16


def check_caching(case: Case, outcomes: list[Outcome], oracle: Oracle) -> list[str]:
    """What was found that can't have been there."""
    problems = []
    has_salts = case.path != "async"  # which has no way to give one
    salts = {arrival.name: arrival.cache_salt or "" if has_salts else "" for arrival in case.arrivals}
    for outcome in outcomes:
        if outcome.num_cached_tokens in (UNKNOWN, 0):
            continue
        others = [
            text
            for other in outcomes
            if other is not outcome and salts[other.name] == salts[outcome.name]
            for text in _texts(other, oracle)
        ]
        prompt = oracle.answer(outcome.spec, 0).prompt_token_ids
        longest = max((_num_common(prompt[:-1], text) for text in others), default=0)
        allowed = longest // BLOCK_SIZE * BLOCK_SIZE if case.engine.enable_prefix_caching else 0
        if outcome.num_cached_tokens > allowed:
            problems.append(f"{outcome.name}: {outcome.num_cached_tokens} tokens were cached; {allowed} can have been")
    return problems


def _texts(outcome: Outcome, oracle: Oracle) -> list[list[int]]:
    """The prompt with each answer, as token ids."""
    answers = [oracle.answer(outcome.spec, index) for index in range(len(outcome.answers))]
    return [answer.prompt_token_ids + answer.token_ids for answer in answers]


def _num_common(one: list[int], other: list[int]) -> int:
    differing = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))
