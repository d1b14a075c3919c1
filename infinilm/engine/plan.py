"""What crosses between scheduler and model runner: a plan down, a result up. Plain data, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from infinilm.outputs import TokenLogprobs
from infinilm.sampling_params import RowStart

PENDING_TOKEN = -1
"""Stands for the token that the row's previous step draws: the device knows it before the host does."""


@dataclass(frozen=True, slots=True)
class RowStep:
    """One row's share of a step: compute `token_ids`, which begin at position `start`."""

    row: int
    start: int
    token_ids: Sequence[int]
    new_blocks: Sequence[int]
    """Blocks to append to the row's table."""
    draws: bool
    """Whether these are the last tokens, so that the next one is drawn."""
    prompt_targets: Sequence[int] = ()
    """The prompt tokens at `start + 1` and following whose log-probabilities are wanted, …"""
    num_prompt_logprobs: int = 0
    """… and how many of the most likely tokens at each place."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Rows that ended are dropped first, then `starts` are set up, then `steps` computed."""

    ended_rows: Sequence[int]
    starts: Sequence[RowStart]
    steps: Sequence[RowStep]

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return sum(len(step.token_ids) for step in self.steps)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a plan; everything is keyed by the index into `plan.steps`."""

    token_ids: dict[int, int]
    """The tokens drawn."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)
    """What went wrong in single rows; the others are sound."""
