"""Where the time of a decode step on a GPU goes, by kernel.

    python bench/gpu_profile.py MODEL [--rows 256] [--context 900] [--shared] [--steps 10]

`--shared`: the prompts have all but their last 16 tokens in common.
"""

import argparse
from random import Random
from time import perf_counter

import torch
from torch.profiler import ProfilerActivity, profile

from infinilm import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--context", type=int, default=900)
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()

    random = Random(0)
    common = [random.randint(3, 10000) for _ in range(arguments.context - 16)] if arguments.shared else []
    with LLM(arguments.model) as llm:
        for _ in range(arguments.rows):
            own = [random.randint(3, 10000) for _ in range(arguments.context - len(common))]
            llm.add_request(common + own, SamplingParams(temperature=0.6, max_tokens=1000, ignore_eos=True))
        while llm.scheduler.waiting or any(seq.num_output_tokens < 4 for seq in llm.scheduler.running):
            llm.step()
        torch.cuda.synchronize()
        start_time = perf_counter()
        for _ in range(arguments.steps):
            llm.step()
        torch.cuda.synchronize()
        seconds = (perf_counter() - start_time) / arguments.steps
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(arguments.steps):
                llm.step()
            torch.cuda.synchronize()

    rows = [event for event in profiler.key_averages() if event.device_time_total > 0]
    rows.sort(key=lambda event: -event.device_time_total)
    for event in rows[:20]:
        microseconds, count = event.device_time_total / arguments.steps, event.count / arguments.steps
        print(f"{microseconds:10.1f} us {count:7.1f} ×  {event.key[:80]}")
    total = sum(event.device_time_total for event in rows) / arguments.steps
    print(f"{total / 1e3:.2f} ms of kernels in a step of {seconds * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
