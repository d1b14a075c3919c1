"""Workloads, and the measurement of this engine on them.

This module does not import torch, so that a peer's process can use it without our libraries in its memory.
"""

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from infinilm.checks import check_integer
from infinilm.errors import EngineError, InvalidValueError
from infinilm.garbage import gc_paused
from infinilm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from infinilm.engine.llm_engine import LLMEngine


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of one length, each answered with the same number of tokens."""

    name: str
    num_prompts: int
    input_len: int
    output_len: int
    shared_prefix_len: int = 0  # leading tokens that all prompts share
    concurrency: int = 0  # requests at a time. 0: all at once.

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len"):
            check_integer(name, getattr(self, name), low=1)
        check_integer("concurrency", self.concurrency, low=0)
        check_integer("shared_prefix_len", self.shared_prefix_len, low=0)
        if self.shared_prefix_len >= self.input_len:
            raise InvalidValueError(
                f"shared_prefix_len={self.shared_prefix_len} must be less than input_len={self.input_len}"
            )

    @property
    def batch_size(self) -> int:
        return min(self.concurrency or self.num_prompts, self.num_prompts)

    def prompts(self, vocab_size: int, repeat: int) -> list[list[int]]:
        """Pseudo-random token ids, the same on every machine. They differ in each repeat, so that none is cached."""
        random = Random(f"{self.name}/{repeat}")
        prefix = random.choices(range(vocab_size), k=self.shared_prefix_len)
        own_len = self.input_len - self.shared_prefix_len
        return [prefix + random.choices(range(vocab_size), k=own_len) for _ in range(self.num_prompts)]

    def __str__(self) -> str:
        shared = f" ({self.shared_prefix_len} shared)" if self.shared_prefix_len else ""
        few = f", {self.batch_size} at a time" if self.batch_size < self.num_prompts else ""
        return f"{self.name}: {self.num_prompts} × {self.input_len} in{shared}, {self.output_len} out{few}"


WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        workload.name: workload
        for workload in (
            Workload("single", num_prompts=1, input_len=128, output_len=64),
            Workload("batch", num_prompts=8, input_len=128, output_len=64),
            Workload("prefill", num_prompts=1, input_len=512, output_len=1),
            Workload("prefix", num_prompts=8, input_len=288, output_len=16, shared_prefix_len=256),
            Workload("custom", num_prompts=4, input_len=64, output_len=64),
        )
    }
)


@dataclass(slots=True)
class Run:
    """One run of a workload. Times are in seconds."""

    seconds: float = 0.0
    num_prefill_tokens: int = 0
    prefill_seconds: float = 0.0  # of the steps that computed prompt tokens
    num_decode_tokens: int = 0
    decode_seconds: float = 0.0  # of all other steps
    ttfts: list[float] = field(default_factory=list)  # from `add_request` to the first token
    gaps: list[float] = field(default_factory=list)  # between two tokens of a request; the mean if a step drew several
    token_ids: list[list[int]] = field(default_factory=list)  # the answer to each prompt, in order

    def add_step(self, seconds: float, num_prefill_tokens: int, num_drawn: int) -> None:
        if num_prefill_tokens:
            self.num_prefill_tokens += num_prefill_tokens
            self.prefill_seconds += seconds
        else:
            self.num_decode_tokens += num_drawn
            self.decode_seconds += seconds


@dataclass(frozen=True, slots=True)
class Summary:
    """Several runs of one workload: medians of rates, percentiles over all tokens. None: not measured."""

    prefill_per_second: float | None
    decode_per_second: float | None  # over all requests, in steps without prompt tokens
    output_per_second: float  # of the whole run
    ttft_p50: float
    ttft_p99: float
    itl_p50: float | None
    itl_p99: float | None

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "Summary":
        ttfts = [ttft for run in runs for ttft in run.ttfts]
        gaps = [gap for run in runs for gap in run.gaps]
        return cls(
            prefill_per_second=_median_rate([(run.num_prefill_tokens, run.prefill_seconds) for run in runs]),
            decode_per_second=_median_rate([(run.num_decode_tokens, run.decode_seconds) for run in runs]),
            output_per_second=median(sum(map(len, run.token_ids)) / run.seconds for run in runs),
            ttft_p50=float(np.percentile(ttfts, 50)),
            ttft_p99=float(np.percentile(ttfts, 99)),
            itl_p50=float(np.percentile(gaps, 50)) if gaps else None,
            itl_p99=float(np.percentile(gaps, 99)) if gaps else None,
        )


def _median_rate(counts: Sequence[tuple[int, float]]) -> float | None:
    """The median of counts per second, without counts of 0."""
    rates = [count / seconds for count, seconds in counts if count]
    return median(rates) if rates else None


@gc_paused()
def run_engine(engine: "LLMEngine", workload: Workload, prompts: Sequence[Sequence[int]]) -> Run:
    """Time this engine: greedy, every answer of full length, `workload.batch_size` requests at a time.

    Garbage collection is paused meanwhile, as in `LLM.generate` and in the service.
    """
    params = SamplingParams(temperature=0.0, max_tokens=workload.output_len, ignore_eos=True)
    run = Run(token_ids=[[] for _ in prompts])
    waiting = deque(enumerate(prompts))
    last_times: dict[int, float] = {}
    start_time = now = perf_counter()
    num_prefill_tokens = engine.stats().num_prefill_tokens
    arrivals: dict[str, int] = {}
    while waiting or arrivals:
        while waiting and len(arrivals) < workload.batch_size:
            index, prompt = waiting.popleft()
            arrivals[engine.add_request(prompt, params)] = index
            last_times[index] = perf_counter()
        deltas = engine.step_deltas()
        step_start, now = now, perf_counter()
        num_drawn = 0
        for delta in deltas:
            index, num_new = arrivals[delta.request_id], len(delta.token_ids)
            num_drawn += num_new
            gaps = run.gaps if run.token_ids[index] else run.ttfts
            gaps += [(now - last_times[index]) / max(num_new, 1)] * num_new
            last_times[index] = now
            run.token_ids[index] += delta.token_ids
            if delta.finish_reason is not None:
                if delta.error:
                    raise EngineError(f"a request of the workload {workload.name!r} failed: {delta.error}")
                del arrivals[delta.request_id]
        known = engine.stats().num_prefill_tokens
        run.add_step(now - step_start, known - num_prefill_tokens, num_drawn)
        num_prefill_tokens = known
    run.seconds = now - start_time
    return run


def describe_machine() -> dict[str, Any]:
    import os
    import platform
    from pathlib import Path

    from infinilm.platforms import count_cores, may_have_gpu

    torch: Any = sys.modules.get("torch")  # a quantised model on a CPU does not need it
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads() if torch else count_cores(),
        "gpu": torch.cuda.get_device_name() if torch and may_have_gpu() else None,
        "torch": torch.__version__ if torch else None,
        "python": platform.python_version(),
    }
