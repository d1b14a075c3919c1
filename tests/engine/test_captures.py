"""When graphs are captured: while the device has more to do than a capture takes, and not for longer than that."""

from types import SimpleNamespace
from typing import Any

import pytest

from infinilm.executor.model_runner import LONG_STEP, ModelRunner

MISSING = 3


class Graphs:
    def __init__(self) -> None:
        self.captured: list[int] = []

    def capture_next(self, num_rows: int) -> bool:
        if len(self.captured) == MISSING:
            return False
        self.captured.append(num_rows)
        return True


@pytest.mark.parametrize(
    ("is_ready", "num_tokens", "num_ranks", "seconds", "num_captured"),
    [
        (False, LONG_STEP, 1, 60.0, MISSING),
        (False, LONG_STEP, 1, 0.0, 0),
        (True, LONG_STEP, 1, 60.0, 0),
        (False, LONG_STEP - 1, 1, 60.0, 0),
        (False, LONG_STEP, 2, 60.0, 0),
    ],
)
def test_captures_wait_for_a_busy_device(
    is_ready: bool, num_tokens: int, num_ranks: int, seconds: float, num_captured: int
) -> None:
    runner: Any = ModelRunner.__new__(ModelRunner)
    runner._graphs, runner._worker = Graphs(), SimpleNamespace(group=SimpleNamespace(size=num_ranks))
    step: Any = SimpleNamespace(num_chunk_tokens=num_tokens, num_expected_rows=200)
    runner._capture(SimpleNamespace(is_ready=is_ready), step, seconds)
    assert runner._graphs.captured == [200] * num_captured
