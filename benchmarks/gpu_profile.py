"""Where the time goes on a GPU: of one decode step, or of a whole workload.

    python benchmarks/gpu_profile.py MODEL [--rows 256] [--context 900] [--shared] [--steps 20] [--json FILE]
    python benchmarks/gpu_profile.py MODEL --workload nano [--scale 0.1] [--json FILE]
    … [--deterministic | --no-deterministic] [--kv-cache-dtype fp8]

MODEL is a checkpoint's directory. The first form decodes so many rows of that context and tells the time by kernel, for
one step; with `--shared` the prompts have all but their last 16 tokens in common. The second form runs one of the
workloads of `gpu_workloads.py` three times: as it is, which captures graphs; with other prompts, to have its time; and
with others again while the profiler notes every kernel, which makes the host slower.

A kernel's time is what it adds to the time that the device is at work. Kernels may start while the one before is still
running; counted like this they sum up to the time that the device was busy, and with its gaps to the wall time. The
host either works or waits for the device. Without a GPU, torch's operators take the place of kernels, to try it.
"""

import argparse
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_common import WORKLOADS, Work, print_table, timed_generate, tokens, write_json
from infinilm import LLM
from infinilm.bench.measure import describe_machine

KINDS = {
    "copies": r"^mem(cpy|set)",
    "attention, decode": r"decode_kernel|shared_kernel",
    "attention, prefill": r"prefill|sdpa|flash|fprop|^_gather_kernel|^_merge_kernel",
    "matrices": r"gemm|gemv|nvjet|cutlass|cublas|splitk",
    "sampling": r"^_scan|^_settle|topk|sort|softmax|argmax",
    "norm, rope, activation": r"norm|rope|silu|^_store_kernel",
}
"""The kinds of kernels, with patterns of their names. The first match counts."""
OTHER = "other"
NUM_OWN = 16
"""Tokens at the end of a prompt that are not shared, if the others are."""
LONG_GAP_NS = 100_000
"""A longer gap is not a kernel's launch: the host was late."""
MAX_KERNELS = 20


@dataclass(frozen=True, slots=True)
class Event:
    """An event of the profiler: a kernel or a copy on the device, or a call on the host."""

    name: str
    start_ns: int
    duration_ns: int

    @property
    def end_ns(self) -> int:
        """When the event ended."""
        return self.start_ns + self.duration_ns


@dataclass(slots=True)
class Kernel:
    """All runs of one kernel."""

    count: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Timeline:
    """A device's time between its first event and its last."""

    kernels: dict[str, Kernel] = field(default_factory=lambda: defaultdict(Kernel))
    gap_seconds: float = 0.0
    long_gap_seconds: float = 0.0
    """The seconds in gaps longer than `LONG_GAP_NS`."""

    @classmethod
    def of(cls, events: Iterable[Event]) -> "Timeline":
        """Go through the events by time, and count for each the time that no earlier event covers."""
        found = cls()
        end_ns = None
        for event in sorted(events, key=lambda event: event.start_ns):
            gap_ns = max(0, event.start_ns - end_ns) if end_ns is not None else 0
            found.gap_seconds += gap_ns / 1e9
            if gap_ns > LONG_GAP_NS:
                found.long_gap_seconds += gap_ns / 1e9
            begin_ns = event.start_ns if end_ns is None else max(event.start_ns, end_ns)
            end_ns = max(begin_ns, event.end_ns)
            kernel = found.kernels[event.name]
            kernel.count += 1
            kernel.seconds += (end_ns - begin_ns) / 1e9
        return found

    @property
    def busy_seconds(self) -> float:
        """How long the device was busy."""
        return sum(kernel.seconds for kernel in self.kernels.values())

    def by_kind(self) -> dict[str, float]:
        """Seconds of each kind of kernel, the longest first."""
        kinds: dict[str, float] = dict.fromkeys((*KINDS, OTHER), 0.0)
        for name, kernel in self.kernels.items():
            kinds[kind_of(name)] += kernel.seconds
        return dict(sorted(kinds.items(), key=lambda item: -item[1]))

    def by_kernel(self, steps: int = 1) -> list[dict[str, Any]]:
        """All kernels of the whole run, or of the mean step, longest first."""
        kernels = sorted(self.kernels.items(), key=lambda item: -item[1].seconds)
        return [{"name": name, "seconds": k.seconds / steps, "count": k.count / steps} for name, k in kernels]


def kind_of(name: str) -> str:
    """The kind of a kernel."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), OTHER)


def is_wait(name: str) -> bool:
    """Whether the host waits for the device in an event, by the runtime's or the driver's name for it."""
    return re.search(r"Synchronize|(Event|Stream|Context) Sync", name) is not None


@dataclass(frozen=True, slots=True)
class Profile:
    """The events while a function ran."""

    seconds: float
    device: Timeline
    wait_seconds: float
    """How long the host waited for the device."""

    @classmethod
    def of(cls, function: Callable[[], object]) -> "Profile":
        """Run a function while the profiler records the device."""
        activity = ProfilerActivity.CPU
        if torch.cuda.is_available():
            activity = ProfilerActivity.CUDA
            torch.cuda.synchronize()  # so that earlier work is not recorded
        with profile(activities=[activity]) as profiler:
            start_time = perf_counter()
            function()
            seconds = perf_counter() - start_time
        # Use the raw events: the profiler's own tables take minutes for some hundred thousand kernels.
        events, waits = [], []
        for raw in profiler.profiler.kineto_results.events():
            event = Event(raw.name(), raw.start_ns(), raw.duration_ns())
            if is_wait(event.name):
                waits.append(event)
            elif raw.device_type().name == activity.name and event.duration_ns > 0 and "Stream Wait" not in event.name:
                events.append(event)
        return cls(seconds, Timeline.of(events), Timeline.of(waits).busy_seconds)

    def parts(self) -> dict[str, float]:
        """The parts of the wall time, in seconds."""
        device = self.device
        return {
            **device.by_kind(),
            "gaps up to 100 us": device.gap_seconds - device.long_gap_seconds,
            "longer gaps": device.long_gap_seconds,
            "before the first kernel and after the last": self.seconds - device.busy_seconds - device.gap_seconds,
        }


def profile_step(llm: LLM, *, rows: int, context: int, is_shared: bool, steps: int) -> dict[str, Any]:
    """Measure one decode step by kernel. Times are in seconds."""
    random = Random(0)
    common = tokens(random, context - NUM_OWN) if is_shared else []
    prompts = [common + tokens(random, context - len(common)) for _ in range(rows)]
    work = Work(prompts, [steps + 4] * rows).within(llm.model_config.vocab_size)
    timed_generate(llm, work)  # captures the graph, and leaves the prompts in the prefix cache
    # The request that started last took part in decode steps only.
    gaps = [output.metrics.itl for output in timed_generate(llm, work)[1]]
    seconds = min(gap for gap in gaps if gap is not None)

    requests = start_all(llm, Work(work.prompts, [steps + 1000] * rows))
    device = Profile.of(lambda: [llm.step_deltas() for _ in range(steps)]).device
    for request in requests:
        llm.abort(request)
    while not llm.is_finished():
        llm.step_deltas()

    busy = device.busy_seconds / steps
    kinds = {kind: total / steps for kind, total in device.by_kind().items()}
    print(f"a step of {rows} rows with {context} tokens each: {seconds * 1e3:.3f} ms, {busy * 1e3:.3f} ms in kernels")
    print_table(("part", "us"), ((kind, f"{time * 1e6:.1f}") for kind, time in kinds.items()))
    kernels = device.by_kernel(steps)
    print_kernels(kernels)
    times = {"seconds": seconds, "busy_seconds": busy, "parts": kinds, "kernels": kernels}
    return {"rows": rows, "context": context, "shared": is_shared, **times}


def start_all(llm: LLM, work: Work) -> list[str]:
    """Queue requests and compute steps until all of them are being decoded. Returns their ids."""
    requests = [llm.add_request(*pair) for pair in zip(work.prompts, work.params, strict=True)]
    lengths = dict.fromkeys(requests, 0)
    while min(lengths.values()) < 2:
        for delta in llm.step_deltas():
            if delta.finish_reason is not None:
                reason = delta.error or "one has ended before another began"
                raise RuntimeError(f"{len(requests)} requests can't be decoded at once: {reason}")
            lengths[delta.request_id] += len(delta.token_ids)
    return requests


def profile_workload(llm: LLM, name: str, scale: float) -> dict[str, Any]:
    """Measure the parts of a workload's time, in seconds."""
    seeds: list[dict[str, int]] = [{}, {"seed": 11}, {"seed": 12}]
    works = [WORKLOADS[name](scale, **seed).within(llm.model_config.vocab_size) for seed in seeds]
    first, seconds = (timed_generate(llm, work)[0] for work in works[:2])
    num_steps = llm.stats().num_steps
    seen = Profile.of(lambda: timed_generate(llm, works[2]))
    num_steps = llm.stats().num_steps - num_steps
    wall, wait, parts = seen.seconds, seen.wait_seconds, seen.parts()

    print(f"{name}: {first:.3f} s the first time, {seconds:.3f} s with other prompts, {wall:.3f} s profiled")
    rows = [(part, f"{time:.3f}", f"{time / wall:.1%}") for part, time in {**parts, "wall time": wall}.items()]
    print_table(("part", "seconds", "share"), rows)
    print(
        f"the host waited for the device {wait:.3f} s, {wait / wall:.1%} of the time, "
        f"and worked {(wall - wait) / num_steps * 1e3:.3f} ms for each of {num_steps} steps"
    )
    kernels = seen.device.by_kernel()
    print_kernels(kernels)
    times = {"first_seconds": first, "seconds": seconds, "profiled_seconds": wall, "host_wait_seconds": wait}
    return {"workload": name, "scale": scale, "steps": num_steps, **times, "parts": parts, "kernels": kernels}


def print_kernels(kernels: list[dict[str, Any]]) -> None:
    """Print a table of the kernels that take longest."""
    rows = [(k["name"][:90], k["seconds"] * 1e6, k["count"]) for k in kernels[:MAX_KERNELS]]
    print()
    print_table(
        ("kernel", "us", "count", "us each"),
        ((name, f"{us:,.1f}", f"{count:,.1f}", f"{us / count:.1f}") for name, us, count in rows),
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--context", type=int, default=900)
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--workload", choices=list(WORKLOADS))
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--deterministic", action=argparse.BooleanOptionalAction)
    parser.add_argument("--kv-cache-dtype", default="auto")
    arguments = parser.parse_args(argv)
    if arguments.context <= NUM_OWN or arguments.rows < 1 or arguments.steps < 1:
        parser.error(f"rows and steps must be at least 1, and context more than {NUM_OWN}")
    settings = {"deterministic": arguments.deterministic, "kv_cache_dtype": arguments.kv_cache_dtype}
    with LLM(arguments.model, **settings) as llm:
        if arguments.workload:
            report = profile_workload(llm, arguments.workload, arguments.scale)
        else:
            report = profile_step(
                llm, rows=arguments.rows, context=arguments.context, is_shared=arguments.shared, steps=arguments.steps
            )
    write_json(arguments.json, {"model": arguments.model, "machine": describe_machine(), **settings, **report})


if __name__ == "__main__":
    main()
