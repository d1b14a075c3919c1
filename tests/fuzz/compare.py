"""Holds what came of a request in company against what came of it alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Any

from fuzz.oracle import Oracle
from fuzz.specs import RequestSpec
from infinilm import RequestOutput
from infinilm.outputs import TokenLogprobs

BREAK_MESSAGE = "the hook failed"
UNKNOWN: Any = object()
"""For what an interface doesn't tell."""


@dataclass
class SeenAnswer:
    """One answer as its reader has it."""

    token_ids: Any = field(default_factory=list)
    text: Any = ""
    logprobs: Any = None
    finish_reason: Any = None
    stop_reason: Any = None


@dataclass
class Outcome:
    """One request as its reader has it, and what was done to it."""

    name: str
    spec: RequestSpec
    answers: list[SeenAnswer]
    prompt_logprobs: Any = None
    error: Any = None
    num_tokens: Any = UNKNOWN
    """Of all answers, as counted for the reader."""
    num_cached_tokens: Any = UNKNOWN
    was_left: bool = False
    """Its reader went away: it may be unfinished."""
    may_abort: set[int] = field(default_factory=set)
    """Answers that somebody aborted, perhaps too late."""
    must_abort: set[int] = field(default_factory=set)
    """Answers that `abort` said it had ended."""
    has_raised: bool = False
    """Its callback raised."""
    may_break: bool = False
    """It was part of a step that broke."""
    reply_error: str | None = None
    """What a server said instead of the rest."""

    def may_be_cut(self, index: int) -> bool:
        """Whether an answer may end before its time."""
        return index in self.may_abort or self.has_raised or self.may_break


def compare(outcome: Outcome, oracle: Oracle) -> tuple[list[str], int]:
    """What is wrong, and the number of answers that differ by a near tie only."""
    problems: list[str] = []
    num_ties = 0
    alone = []
    for index, seen in enumerate(outcome.answers):
        lone = oracle.answer(outcome.spec, index)
        found = _compare_answer(outcome, index, seen, lone, oracle)
        if found:
            for noisy in oracle.noisy_answers(outcome.spec, index):
                if not _compare_answer(outcome, index, seen, noisy, oracle):
                    found, lone = [], noisy
                    num_ties += 1
                    break
        alone.append(lone)
        problems += [f"{outcome.name}[{index}]: {problem}" for problem in found]
    others = _compare_error(outcome, alone) + _compare_prompt(outcome, alone[0], oracle.tolerance)
    num_tokens = sum(len(lone.token_ids) for lone in alone)
    if outcome.num_tokens is not UNKNOWN and outcome.num_tokens != num_tokens:
        others.append(f"{outcome.num_tokens} tokens are counted, alone {num_tokens}")
    return problems + [f"{outcome.name}: {problem}" for problem in others], num_ties


def _compare_answer(outcome: Outcome, index: int, seen: SeenAnswer, lone: RequestOutput, oracle: Oracle) -> list[str]:
    expected = lone.outputs[0]
    reason = seen.finish_reason
    if reason is None and not outcome.was_left:
        return [f"never ended; it has tokens {seen.token_ids}, alone {expected.token_ids}"]
    is_cut = reason is None or (reason == "abort" and expected.finish_reason != "abort")
    if reason == "abort" and is_cut and not outcome.may_be_cut(index):
        return [f"aborted by nobody ({outcome.error}) after {seen.token_ids}; alone {expected.token_ids}"]
    problems = []
    if index in outcome.must_abort and reason != "abort":
        problems.append(f"abort said that it ended the answer, but it ended by {reason!r}")
    if not is_cut and reason == "abort" and seen.token_ids != expected.token_ids:
        is_cut = outcome.may_be_cut(index)  # aborted before its own error came
    if not is_cut:
        for name in ("token_ids", "text", "finish_reason", "stop_reason"):
            value, other = getattr(seen, name), getattr(expected, name)
            if value is not UNKNOWN and value != other:
                problems.append(f"{name} is {value!r}, alone {other!r}")
        return problems + _compare_logprobs("logprobs", seen.logprobs, expected.logprobs, oracle.tolerance)
    return problems + _compare_cut(seen, expected, oracle)


def _compare_cut(seen: SeenAnswer, expected: Any, oracle: Oracle) -> list[str]:
    """An answer that did not come to its end must be a beginning of the lone one."""
    problems = []
    if seen.token_ids is UNKNOWN:
        if seen.text is not UNKNOWN and not expected.text.startswith(seen.text.rstrip("\ufffd")):
            problems.append(f"text {seen.text!r} is no beginning of {expected.text!r}")
        return problems
    num_tokens = len(seen.token_ids)
    if seen.token_ids != expected.token_ids[:num_tokens]:
        problems.append(f"tokens {seen.token_ids} are no beginning of {expected.token_ids}")
    elif seen.text is not UNKNOWN and seen.finish_reason is None:
        if not expected.text.startswith(seen.text):
            problems.append(f"text {seen.text!r} is no beginning of {expected.text!r}")
    elif seen.text is not UNKNOWN and seen.text != oracle.tokenizer.decode(seen.token_ids):
        problems.append(f"text is {seen.text!r}, its tokens say {oracle.tokenizer.decode(seen.token_ids)!r}")
    known = None if expected.logprobs is None else expected.logprobs[:num_tokens]
    return problems + _compare_logprobs("logprobs", seen.logprobs, known, oracle.tolerance)


def _compare_error(outcome: Outcome, alone: list[RequestOutput]) -> list[str]:
    error = outcome.error
    if outcome.reply_error is not None:
        is_known = any(lone.error for lone in alone)
        return [] if is_known else [f"the server replied {outcome.reply_error!r}, but alone there is no error"]
    if error is UNKNOWN or (outcome.may_break and error and BREAK_MESSAGE in error):
        return []
    if outcome.has_raised:
        return [] if error and "on_token" in error else [f"its callback raised, but the error is {error!r}"]
    errors = {
        lone.error
        for seen, lone in zip(outcome.answers, alone, strict=True)
        if lone.error and seen.finish_reason == "abort" and seen.token_ids in (UNKNOWN, lone.outputs[0].token_ids)
    }
    must_fail = any(
        lone.error and seen.finish_reason in ("abort", UNKNOWN) and not outcome.may_be_cut(index)
        for index, (seen, lone) in enumerate(zip(outcome.answers, alone, strict=True))
    )
    if error is None:
        return [f"no error, alone {sorted(errors)}"] if must_fail else []
    return [] if error in errors else [f"error {error!r}, alone {sorted(errors)}"]


def _compare_prompt(outcome: Outcome, lone: RequestOutput, tolerance: float) -> list[str]:
    """Prompt log-probabilities: all of them as soon as there is a token; before, each is right or missing."""
    seen, expected = outcome.prompt_logprobs, lone.prompt_logprobs
    if seen is UNKNOWN:
        return []
    has_tokens = any(answer.token_ids not in (UNKNOWN, []) for answer in outcome.answers)
    if seen is None or expected is None:
        is_missing = seen is None and expected is not None and not has_tokens
        return [] if seen is expected or is_missing else [f"prompt_logprobs is {seen}, alone {expected}"]
    if len(seen) != len(expected):
        return [f"{len(seen)} prompt_logprobs, alone {len(expected)}"]
    if has_tokens:
        return _compare_logprobs("prompt_logprobs", seen, expected, tolerance)
    known = [place for place, entry in enumerate(seen) if entry is not None]
    return _compare_logprobs("prompt_logprobs", [seen[i] for i in known], [expected[i] for i in known], tolerance)


def _compare_logprobs(
    name: str, seen: Any, expected: Sequence[TokenLogprobs | None] | None, tolerance: float
) -> list[str]:
    if seen is UNKNOWN:
        return []
    if seen is None or expected is None:
        return [] if seen is expected else [f"{name} is {seen}, alone {expected}"]
    if len(seen) != len(expected):
        return [f"{len(seen)} {name}, alone {len(expected)}"]
    for place, (one, other) in enumerate(zip(seen, expected, strict=True)):
        if not _is_same(one, other, tolerance):
            return [f"{name}[{place}] is {one}, alone {other}"]
    return []


def _is_same(one: TokenLogprobs | None, other: TokenLogprobs | None, tolerance: float) -> bool:
    if one is None or other is None:
        return one is other
    if one.token_id != other.token_id or not _is_close(one.logprob, other.logprob, tolerance):
        return False
    # Tokens that are as likely may change places.
    is_near = one.rank is UNKNOWN or abs(one.rank - other.rank) <= 1
    if one.top is UNKNOWN:
        return is_near
    pairs = zip(one.top.values(), other.top.values(), strict=False)
    return is_near and len(one.top) == len(other.top) and all(_is_close(*pair, tolerance) for pair in pairs)


def _is_close(one: float, other: float, tolerance: float) -> bool:
    return abs(one - other) <= tolerance or (isnan(one) and isnan(other)) or one == other
