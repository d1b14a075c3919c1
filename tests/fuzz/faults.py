"""A step that breaks in the middle of a case."""

from collections import deque

import torch

from fuzz.compare import BREAK_MESSAGE
from fuzz.session import Record
from infinilm import LLM
from infinilm.debug import HookRegistry


class StepFault:
    """A hook that raises in one step, and knows whose step it was."""

    def __init__(self, engine: LLM, at_step: int, max_in_flight: int) -> None:
        self._registry = HookRegistry()
        self._registry.register_hook("final_norm", self._act)
        self._at_step = at_step
        self._num_steps = 0
        self._in_flight: deque[set[str]] = deque(maxlen=max_in_flight)
        self._broken_ids: set[str] = set()
        self.has_raised = False
        engine.set_hook_registry(self._registry)

    def _act(self, _name: str, _tensor: torch.Tensor, _layer: int) -> None:
        self._num_steps += 1
        self._in_flight.append({rows.request_id for rows in self._registry.requests})
        if self._num_steps == self._at_step:
            self.has_raised = True
            self._broken_ids = set().union(*self._in_flight)
            raise RuntimeError(BREAK_MESSAGE)

    def note(self, record: Record) -> None:
        """Tell the request whether it may have ended with the step."""
        is_known = record.request_id is not None
        record.outcome.may_break = record.request_id in self._broken_ids if is_known else self.has_raised
