"""Four workloads that engines are compared on, run with the engine's defaults and held against the device's limits.

    python benchmarks/gpu_workloads.py MODEL [single nano prefix long] [--scale 0.1] [--json FILE]
        [--deterministic | --no-deterministic] [--kv-cache-dtype fp8]

MODEL is a checkpoint's directory. Each workload is run once, in the order given, `single` twice, of which the better
counts. The columns:

- `out tok/s`, `seconds`, `steps`: tokens generated over the time of the whole run, and the engine's steps.
- `TTFT`: from handing over all requests until one's first token. `ITL`: between two tokens of a request, over all such
  gaps; `generate` does not tell them, so they are of one more run, on other prompts and driven by `step_deltas`.
- `GB/s`, `TFLOP/s`: what no engine can avoid reading and computing for this workload, over the time it took.
- `of floor`: the least time that the device would need for that, as a share of the time it took. Decoding reads the
  weights once per step and every request's keys and values once per token; an engine that reads a common beginning
  once for many requests can do better than this floor.

The device's bandwidth and matrix rate are measured when all workloads are done: before, it would make the engine's
start look shorter, and during, take memory from it. `--scale` shrinks the numbers of prompts and tokens, to try it on
a smaller machine.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_common import WORKLOADS, Work, print_table, timed_generate, write_json
from infinilm import LLM, SamplingParams
from infinilm.bench.measure import describe_machine
from infinilm.models import ModelConfig

OTHER_SEED = 100
"""The seed of prompts that no timed run has left in the prefix cache."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The rates that a device reaches."""

    bytes_per_second: float
    operations_per_second: float

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype) -> "Limits":
        """Measure a large copy, which reads and writes each byte, and a large product of matrices."""
        is_gpu = device.type == "cuda"
        num_bytes, side = (2 << 30, 8192) if is_gpu else (1 << 27, 512)
        source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        matrix = torch.randn(side, side, device=device).to(dtype)
        product = torch.empty_like(matrix)
        copy_seconds = _seconds(lambda: target.copy_(source), device)
        product_seconds = _seconds(lambda: torch.mm(matrix, matrix, out=product), device)
        return cls(2 * num_bytes / copy_seconds, 2 * side**3 / product_seconds)


def _seconds(function: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """The shortest mean of three series, in seconds."""

    def series() -> float:
        wait(device)
        start_time = perf_counter()
        for _ in range(repeats):
            function()
        wait(device)
        return (perf_counter() - start_time) / repeats

    series()
    return min(series() for _ in range(3))


def wait(device: torch.device) -> None:
    """Wait until a device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True)
class Needs:
    """The reads and operations that no engine can avoid for a workload."""

    decode_bytes: int
    decode_operations: int
    prefill_operations: int

    @classmethod
    def of(cls, work: Work, config: ModelConfig, itemsize: int) -> "Needs":
        """Count weights, keys and values of `itemsize` bytes, and two operations for each weight and token.

        Decoding takes at least as many steps as the longest answer has tokens. If all prompts share a beginning, the
        first prompt computes its keys and values for all.
        """
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        layer = config.hidden_size * (2 * q_size + 2 * kv_size + 3 * config.intermediate_size)
        layers = config.num_hidden_layers * layer
        weights = layers + config.vocab_size * config.hidden_size
        kv_reads = sum(  # one for each earlier token, for each new token
            new * len(prompt) + new * (new - 1) // 2 for prompt, new in zip(work.prompts, work.output_lens, strict=True)
        )
        kv_values = 2 * config.num_hidden_layers * kv_size
        own_lens = [len(prompt) - work.shared_len * (index > 0) for index, prompt in enumerate(work.prompts)]
        # On average a query is multiplied with half of its prompt's keys, and then values: 4 operations each.
        attention = sum(4 * q_size * config.num_hidden_layers * length**2 // 2 for length in own_lens)
        return cls(
            decode_bytes=itemsize * (max(work.output_lens) * weights + kv_reads * kv_values),
            decode_operations=2 * weights * sum(work.output_lens),
            prefill_operations=2 * layers * sum(own_lens) + attention,
        )

    def floor(self, limits: Limits) -> float:
        """The minimum of seconds that a device needs."""
        decode = max(self.decode_bytes / limits.bytes_per_second, self.decode_operations / limits.operations_per_second)
        return decode + self.prefill_operations / limits.operations_per_second


def run(llm: LLM, work: Work) -> dict[str, Any]:
    """Run a workload. Returns its results, with times in seconds."""
    num_steps = llm.stats().num_steps
    seconds, outputs = timed_generate(llm, work)
    ttfts = [output.metrics.ttft for output in outputs if output.metrics.ttft is not None]
    num_tokens = sum(len(output.token_ids) for output in outputs)
    return {
        "seconds": seconds,
        "output_tokens": num_tokens,
        "output_tokens_per_second": num_tokens / seconds,
        "steps": llm.stats().num_steps - num_steps,
        "ttft_p50": median(ttfts),
        "ttft_max": max(ttfts),
    }


def run_by_steps(llm: LLM, work: Work) -> dict[str, float]:
    """The median and the 99th percentile of the times between two tokens of a request, in seconds."""
    gaps: list[float] = []
    last_times: dict[str, float] = {}
    for prompt, params in zip(work.prompts, work.params, strict=True):
        llm.add_request(prompt, params)
    while not llm.is_finished():
        deltas = llm.step_deltas()
        now = perf_counter()
        for delta in deltas:
            if delta.error:
                raise RuntimeError(f"request {delta.request_id} failed: {delta.error}")
            if delta.request_id in last_times:
                gaps.append(now - last_times[delta.request_id])
            last_times[delta.request_id] = now
    p50, p99 = np.percentile(gaps, [50, 99])
    return {"itl_p50": float(p50), "itl_p99": float(p99)}


def run_all(llm: LLM, works: dict[str, Work], others: dict[str, Work]) -> dict[str, dict[str, Any]]:
    """Run all workloads, then the `others`, which measure the times between tokens. Returns the results."""
    results = {}
    for name, work in works.items():
        runs = [run(llm, work) for _ in range(2 if name == "single" else 1)]
        results[name] = min(runs, key=lambda each: each["seconds"])
        for each in runs:
            rate, seconds = each["output_tokens_per_second"], each["seconds"]
            print(f"{name}: {seconds:.3f} s, {rate:,.0f} tokens/s", file=sys.stderr, flush=True)
    for name, work in others.items():
        results[name] |= run_by_steps(llm, work)
    return results


def compare(seconds: float, needs: Needs, limits: Limits) -> dict[str, float]:
    """The rates that were reached, compared with the device's limits."""
    operations = needs.decode_operations + needs.prefill_operations
    floor = needs.floor(limits)
    return {
        "gigabytes_per_second": needs.decode_bytes / seconds / 1e9,
        "teraflops_per_second": operations / seconds / 1e12,
        "floor_seconds": floor,
        "floor_share": floor / seconds,
    }


def process_age() -> float | None:
    """Seconds since this process was started, if the system reports it."""
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return None
    start_ticks = int(stat.read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")


def cells(name: str, result: dict[str, Any]) -> list[str]:
    """A workload's line of the table."""
    return [
        name,
        f"{result['output_tokens_per_second']:,.0f}",
        f"{result['seconds']:.3f}",
        f"{result['steps']:,}",
        *(f"{result[key] * 1e3:.1f}" for key in ("ttft_p50", "ttft_max")),
        *(f"{result[key] * 1e3:.2f}" for key in ("itl_p50", "itl_p99")),
        f"{result['gigabytes_per_second']:,.0f}",
        f"{result['teraflops_per_second']:,.1f}",
        f"{result['floor_share']:.0%}",
    ]


HEADER = (
    *("workload", "out tok/s", "seconds", "steps", "TTFT p50 ms", "max", "ITL p50 ms", "p99"),
    *("GB/s", "TFLOP/s", "of floor"),
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS), metavar="WORKLOAD")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--deterministic", action=argparse.BooleanOptionalAction)
    parser.add_argument("--kv-cache-dtype", default="auto")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.workloads) - set(WORKLOADS):
        parser.error(f"no workload is called {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}")

    start_time = perf_counter()
    settings = {"deterministic": arguments.deterministic, "kv_cache_dtype": arguments.kv_cache_dtype}
    with LLM(arguments.model, **settings) as llm:
        ready = perf_counter() - start_time
        llm.generate([1, 2, 3], SamplingParams(max_tokens=1), use_tqdm=False)
        first_token, age = perf_counter() - start_time, process_age()
        config, info = llm.model_config, llm.executor.info
        device, dtype = torch.device(info.device), getattr(torch, info.dtype)
        works, others = (
            {name: WORKLOADS[name](arguments.scale, **seed).within(config.vocab_size) for name in arguments.workloads}
            for seed in ({}, {"seed": OTHER_SEED})
        )
        results = run_all(llm, works, others)

    limits = Limits.of(device, dtype)
    for name, work in works.items():
        results[name] |= compare(results[name]["seconds"], Needs.of(work, config, dtype.itemsize), limits)

    print(f"from LLM(path): ready after {ready:.2f} s, first token after {first_token:.2f} s", end="")
    print(f"; {age:.2f} s after the process was started" if age is not None else "")
    rates = limits.bytes_per_second / 1e9, limits.operations_per_second / 1e12
    print(f"the device copies {rates[0]:,.0f} GB/s and multiplies {rates[1]:,.1f} TFLOP/s")
    print_table(HEADER, (cells(name, result) for name, result in results.items()))
    report = {"model": arguments.model, "scale": arguments.scale, "machine": describe_machine()}
    report |= settings
    report |= {"ready": ready, "first_token": first_token, "process_to_first_token": age, "limits": asdict(limits)}
    write_json(arguments.json, {**report, "workloads": results})


if __name__ == "__main__":
    main()
