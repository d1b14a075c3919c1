"""The engine's counters, and the progress bar that shows them."""

from dataclasses import dataclass, replace
from time import perf_counter
from types import TracebackType
from typing import Self


@dataclass(slots=True)
class EngineStats:
    """Counters since the start, and the current state. `LLM.stats()` returns a copy."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    """Prompt tokens computed, and tokens recomputed after preemption."""
    num_decode_tokens: int = 0
    """Tokens added to answers."""
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
    guarantee: str = ""
    """Whether results depend on the request alone: "yes", or "no, because …"."""
    system_fingerprint: str = ""
    """The model, hashes of its weights and of the kernels, and whether the guarantee holds."""


class ProgressBar:
    """Shows finished requests and tokens so far. The rate is all generated tokens over the time since the start."""

    def __init__(self, stats: EngineStats, num_requests: int, *, is_shown: bool) -> None:
        self._stats = stats
        self._before = replace(stats)
        self._num_requests = num_requests
        self._start_time = perf_counter()
        from tqdm import tqdm

        self._bar = tqdm(
            total=num_requests,
            desc="Generating",
            bar_format="{desc}: {n_fmt} of {total_fmt} prompts done |{bar:20}| {elapsed}{postfix}",
            disable=not is_shown,
            dynamic_ncols=True,
            mininterval=0.3,
        )

    def update(self) -> None:
        """Show the state after a step."""
        stats, before = self._stats, self._before
        num_read = stats.num_prefill_tokens - before.num_prefill_tokens
        num_written = stats.num_decode_tokens - before.num_decode_tokens
        rate = num_written / (perf_counter() - self._start_time)
        self._bar.set_postfix_str(f"read {num_read:,} tokens, wrote {num_written:,} ({rate:,.1f}/s)", refresh=False)
        num_done = min(stats.num_finished - before.num_finished, self._num_requests)  # there may be other requests
        self._bar.update(num_done - self._bar.n)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
