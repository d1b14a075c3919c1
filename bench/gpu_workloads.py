"""Four workloads that engines are compared on, run with the engine's defaults.

    python bench/gpu_workloads.py MODEL [nano single prefix long] [--scale 0.1] [--json FILE]

Each workload is run once, in the order given; answers are drawn at temperature 0.6 and have their full length.
`--scale` shrinks the numbers of prompts and tokens, to try it on a smaller machine.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import mean, median
from time import perf_counter
from typing import Any

from infinilm import LLM, SamplingParams

Work = tuple[list[list[int]], list[int]]
"""Prompts of token ids, and how many tokens to answer each with."""


def nano(scale: float) -> Work:
    """256 prompts of 100 to 1,024 tokens, answers of 100 to 1,024."""
    random, low, high = Random(0), scaled(100, scale), scaled(1024, scale)
    prompts = []
    for _ in range(scaled(256, scale)):
        length = random.randint(low, high)
        prompts.append([random.randint(0, 10000) for _ in range(length)])
    return prompts, [random.randint(low, high) for _ in prompts]


def single(scale: float) -> Work:
    """One stream: 128 tokens in, 256 out."""
    return [tokens(Random(1), scaled(128, scale))], [scaled(256, scale)]


def prefix(scale: float) -> Work:
    """256 prompts of 64 tokens behind 1,024 that all have in common, 64 out."""
    random = Random(2)
    common = tokens(random, scaled(1024, scale))
    prompts = [common + tokens(random, scaled(64, scale)) for _ in range(scaled(256, scale))]
    return prompts, [scaled(64, scale)] * len(prompts)


def long(scale: float) -> Work:
    """Eight prompts of 16,000 tokens, 32 out."""
    random = Random(3)
    prompts = [tokens(random, scaled(16000, scale)) for _ in range(8)]
    return prompts, [scaled(32, scale)] * len(prompts)


WORKLOADS: dict[str, Callable[[float], Work]] = {"single": single, "nano": nano, "prefix": prefix, "long": long}


def scaled(number: int, scale: float) -> int:
    """A share of a number, at least 2: one token is drawn by the prompt's own step."""
    return max(2, round(number * scale))


def tokens(random: Random, count: int) -> list[int]:
    """Token ids of no meaning."""
    return [random.randint(3, 10000) for _ in range(count)]


def run(llm: LLM, work: Work) -> dict[str, Any]:
    """What came of a workload, times in seconds."""
    prompts, output_lens = work
    vocab_size = llm.model_config.vocab_size
    prompts = [[token % vocab_size for token in prompt] for prompt in prompts]
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length) for length in output_lens]
    num_steps, start_time = llm.stats().num_steps, perf_counter()
    metrics = [output.metrics for output in llm.generate(prompts, params, use_tqdm=False)]
    seconds = perf_counter() - start_time
    return {
        "seconds": seconds,
        "output_tokens": sum(output_lens),
        "output_tokens_per_second": sum(output_lens) / seconds,
        "steps": llm.stats().num_steps - num_steps,
        "ttft_median": median(metric.ttft for metric in metrics),
        "ttft_max": max(metric.ttft for metric in metrics),
        "itl_mean": mean(metric.itl for metric in metrics),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS), metavar="WORKLOAD")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    if unknown := set(arguments.workloads) - set(WORKLOADS):
        parser.error(f"no workload is called {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}")

    start_time = perf_counter()
    with LLM(arguments.model) as llm:
        ready = perf_counter() - start_time
        llm.generate([1, 2, 3], SamplingParams(max_tokens=1), use_tqdm=False)
        first_token = perf_counter() - start_time
        print(f"ready after {ready:.1f} s, first token after {first_token:.1f} s")
        print(f"{'workload':10}{'tokens/s':>10}{'seconds':>9}{'steps':>7}{'TTFT p50':>10}{'max':>8}{'ITL':>10}")
        results = {}
        for name in arguments.workloads:
            result = results[name] = run(llm, WORKLOADS[name](arguments.scale))
            half, most, gap = (result[key] * 1e3 for key in ("ttft_median", "ttft_max", "itl_mean"))
            rate, seconds = result["output_tokens_per_second"], result["seconds"]
            print(
                f"{name:10}{rate:10.0f}{seconds:9.3f}{result['steps']:7}{half:7.0f} ms{most:5.0f} ms{gap:7.2f} ms",
                flush=True,
            )
    if arguments.json:
        report = {"model": arguments.model, "scale": arguments.scale, "ready": ready, "first_token": first_token}
        Path(arguments.json).write_text(json.dumps({**report, "workloads": results}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
