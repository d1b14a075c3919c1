"""Prefill and decode next to ik_llama.cpp's `llama-bench`, by turns.

    python -m benchmarks.ik_llama LLAMA_BENCH MODEL.gguf [--repeat 5] [--threads 2] [--activation-bits 8]

LLAMA_BENCH is the program; docs/performance.md says how to build it. Each turn is a process of its own. Prefill is
512 tokens in and one out, decode one in and 128 out, greedy; ours are medians of three after one that is not counted.
"""

import argparse
import json
import subprocess
import sys
from statistics import median
from time import perf_counter

from benchmarks.gpu_common import print_table
from benchmarks.peers.engine_process import environment
from infinilm import LLM, SamplingParams

PROMPT_LEN, OUTPUT_LEN = 512, 128


def measure(model: str, activation_bits: int) -> tuple[float, float]:
    """InfiniLM's prefill and decode, in tokens per second."""
    prompt = list(range(1000, 1000 + PROMPT_LEN))
    settings = {"device": "cpu", "max_model_len": 2 * PROMPT_LEN, "enable_prefix_caching": False}
    with LLM(model, activation_bits=activation_bits, **settings) as llm:

        def seconds(prompt: list[int], num_tokens: int) -> float:
            params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
            times = []
            for _ in range(4):
                start = perf_counter()
                llm.generate([prompt], params, use_tqdm=False)
                times.append(perf_counter() - start)
            return median(times[1:])

        return PROMPT_LEN / seconds(prompt, 1), OUTPUT_LEN / seconds(prompt[:1], OUTPUT_LEN)


def measure_peer(program: str, model: str, threads: int) -> tuple[float, float]:
    """Prefill and decode of `llama-bench`, in tokens per second."""
    sizes = ["-p", str(PROMPT_LEN), "-n", str(OUTPUT_LEN), "-t", str(threads), "-o", "json"]
    run = subprocess.run([program, "-m", model, *sizes], capture_output=True, text=True, check=True)
    prefill, decode = json.loads(run.stdout[run.stdout.index("[") :])
    return prefill["avg_ts"], decode["avg_ts"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llama_bench")
    parser.add_argument("model")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--activation-bits", type=int, default=16)
    parser.add_argument("--ours", action="store_true", help=argparse.SUPPRESS)  # one of our turns
    given = parser.parse_args()
    if given.ours:
        print(json.dumps(measure(given.model, given.activation_bits)))
        return
    rows = []
    for turn in range(given.repeat):
        command = [sys.executable, "-m", "benchmarks.ik_llama", *sys.argv[1:], "--ours"]
        run = subprocess.run(command, env=environment(given.threads), stdout=subprocess.PIPE, text=True, check=True)
        ours = json.loads(run.stdout.splitlines()[-1])
        theirs = measure_peer(given.llama_bench, given.model, given.threads)
        for name, own, other in zip(("prefill", "decode"), ours, theirs, strict=True):
            rows.append((f"{name} {turn + 1}", f"{own:.1f}", f"{other:.1f}", f"{own / other:.2f}"))
    print_table(("tok/s", "infinilm", "ik_llama.cpp", "ratio"), sorted(rows))


if __name__ == "__main__":
    main()
