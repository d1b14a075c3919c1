"""What the engine counts, and the progress bar that shows it."""

from dataclasses import dataclass, replace
from time import perf_counter
from types import TracebackType
from typing import Self

from tqdm import tqdm


@dataclass(slots=True)
class EngineStats:
    """Counters since the start, and the state at this moment. `LLM.stats()` hands out a copy."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    """Prompt tokens computed, and those computed again after preemption."""
    num_decode_tokens: int = 0
    """Tokens drawn."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    num_finished: int = 0
    num_preemptions: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    """Blocks whose content can be found again, in use or free."""


class ProgressBar:
    """Requests done, with the prefill and decode tokens per second since the bar was made."""

    def __init__(self, stats: EngineStats, num_requests: int, *, is_shown: bool) -> None:
        self._stats = stats
        self._before = replace(stats)
        self._start_time = perf_counter()
        self._bar = tqdm(
            total=num_requests, desc="Generating", unit="req", disable=not is_shown, dynamic_ncols=True, mininterval=0.3
        )

    def update(self, num_done: int) -> None:
        """Show the state after a step."""
        elapsed = perf_counter() - self._start_time
        prefill = (self._stats.num_prefill_tokens - self._before.num_prefill_tokens) / elapsed
        decode = (self._stats.num_decode_tokens - self._before.num_decode_tokens) / elapsed
        self._bar.set_postfix_str(f"prefill {prefill:.0f} tok/s, decode {decode:.0f} tok/s", refresh=False)
        self._bar.update(num_done)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
