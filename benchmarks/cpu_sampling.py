"""How long drawing tokens takes on a CPU, by the native library and by torch on one thread, by turns.

    python benchmarks/cpu_sampling.py [--vocab-size 49152] [--repeat 20]

Logits are random and as spread as a model's. A figure is the median time for all rows of a step, in milliseconds.
"""

import argparse
from statistics import median
from time import perf_counter

import torch

from benchmarks.gpu_common import print_table
from infinilm import SamplingParams
from infinilm.sampling import Sampler
from infinilm.sampling.draw import draw_torch, find_draw
from infinilm.sampling_params import RowStart

CPU = torch.device("cpu")
KINDS = {
    "greedy": SamplingParams(temperature=0),
    "temperature 0.7": SamplingParams(temperature=0.7),
    "and top_p 0.9": SamplingParams(temperature=0.7, top_p=0.9),
    "and top_k 50": SamplingParams(temperature=0.7, top_k=50),
}


def time_draws(params: SamplingParams, num_rows: int, vocab_size: int, repeats: int) -> list[float]:
    """Milliseconds for the native library, if there is one, and for torch."""
    sampler = Sampler(vocab_size, CPU, num_rows)
    for row in range(num_rows):
        sampler.start_row(RowStart(row, params, row, (), ()))
    logits, rows = torch.randn(num_rows, vocab_size) * 4, torch.arange(num_rows)
    times: list[list[float]] = [[], []]
    for repeat in range(repeats):
        for draw, found in zip((find_draw(CPU), draw_torch), times, strict=True):
            start_time = perf_counter()
            draw(logits, sampler._device_settings, rows, torch.full((num_rows,), repeat))
            found.append(1000 * (perf_counter() - start_time))
    return [median(found) for found in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--repeat", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)  # as in an engine whose weights are quantised
    torch.manual_seed(0)
    table = []
    for num_rows in (1, 8, 64):
        for name, params in KINDS.items():
            ours, twin = time_draws(params, num_rows, options.vocab_size, options.repeat)
            table.append([name, str(num_rows), f"{ours:.3f}", f"{twin:.3f}"])
    print_table(["", "rows", "native ms", "torch ms"], table)


if __name__ == "__main__":
    main()
