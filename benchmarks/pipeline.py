"""Tokens per second of a pipeline with steps in flight and without, by turns, on this machine.

    python -m benchmarks.pipeline [MODEL] [--stages 2] [--rows 16] [--tokens 48] [--rounds 5] [--token-ms MS]

Without: one step at a time, with all rows in it; one stage computes while the others wait. With: each stage computes a
step of its share of the rows. Ranks share the machine's cores, so there should be a core for each stage. With
--token-ms, a tiny model sleeps so long for each token of a step in each stage, as if every stage had a device of its
own.
"""

import argparse
import os
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

from benchmarks.sleeping_model import TOKEN_MS, save_sleeping
from infinilm import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    for name, default in (("stages", 2), ("rows", 16), ("tokens", 48), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--token-ms", type=float)
    given = parser.parse_args()
    with TemporaryDirectory() as directory:
        model = given.model
        if given.token_ms is not None:
            os.environ[TOKEN_MS] = str(given.token_ms)
            model = directory
            save_sleeping(Path(directory), given.stages)
        rates = measure(model, given)
    for mode, found in rates.items():
        print(f"{mode}: {median(found):.1f} tokens/s (median of {given.rounds}), best {max(found):.1f}")


def measure(model: str | None, given: argparse.Namespace) -> dict[str, list[float]]:
    """Tokens per second in each round, by mode."""
    params = SamplingParams(temperature=0, max_tokens=given.tokens, ignore_eos=True)
    prompts = [[10 + row, 20, 30] for row in range(given.rows)]
    rates: dict[str, list[float]] = {"one step at a time": [], "steps in flight": []}
    with LLM(model, pipeline_parallel_size=given.stages, max_num_seqs=given.rows, dtype="float32") as llm:
        modes = {"one step at a time": (1, 1), "steps in flight": (llm.executor.info.max_in_flight, given.stages)}
        for _ in range(given.rounds):
            for mode, (depth, num_shares) in modes.items():
                llm._max_in_flight, llm.scheduler.num_shares = depth, num_shares
                start_time = perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                rates[mode].append(given.rows * given.tokens / (perf_counter() - start_time))
    return rates


if __name__ == "__main__":
    main()
