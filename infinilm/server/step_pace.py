"""Keeps steps short: chooses how many prompt tokens a step may compute by the time that the last steps took."""

from infinilm.engine.scheduler import Scheduler
from infinilm.executor.step_io import StepInput

FIRST_TOKENS = 64
"""Where the search begins: a slow machine computes so many in time, and a fast one soon gets more."""
MIN_TOKENS = 16
"""With fewer tokens at a time, prompts would take much longer in total. Far into a long prompt even these take long."""


class Pace:
    """The number of prompt tokens with which a step takes about `target_s` seconds."""

    def __init__(self, target_s: float, max_tokens: int) -> None:
        self._target_s = target_s
        self._max_tokens = max_tokens
        self.num_tokens = min(FIRST_TOKENS, max_tokens)

    def note(self, num_tokens: int, seconds: float) -> None:
        """Adapt to a step. A quick step with fewer tokens than allowed says nothing about more of them."""
        if num_tokens >= self.num_tokens or seconds > self._target_s:
            factor = min(max(self._target_s / max(seconds, 1e-6), 0.5), 2.0)
            found = max(int(min(num_tokens, self.num_tokens) * factor), MIN_TOKENS)
            self.num_tokens = min(found, self._max_tokens)


class StepPace:
    """Sets a scheduler's limits of prompt tokens: one for steps in which answers go on, one for the others."""

    def __init__(self, scheduler: Scheduler, *, mixed_s: float, prefill_s: float) -> None:
        self._scheduler = scheduler
        self._mixed = Pace(mixed_s, scheduler.max_num_batched_tokens)
        self._prefill = Pace(prefill_s, scheduler.max_num_batched_tokens)
        self._apply()

    def note(self, step: StepInput | None, seconds: float) -> None:
        """Adapt to the time in which a step was computed."""
        if step is not None and step.chunks:
            pace = self._mixed if len(step.decoding.rows) else self._prefill
            pace.note(step.num_chunk_tokens, seconds)
            self._apply()

    def _apply(self) -> None:
        self._scheduler.max_mixed_tokens = self._mixed.num_tokens
        self._scheduler.max_prefill_tokens = self._prefill.num_tokens
