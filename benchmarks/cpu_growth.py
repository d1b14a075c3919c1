"""How decoding slows down with a longer context, and what more streams bring: this engine next to llama.cpp.

    python benchmarks/cpu_growth.py [MODEL.gguf] [--threads N] [--repeat 2] [--quick] [--plot FILE] [--json FILE]

Each engine runs in its own process, by turns, on the same random token ids. A point is the median time between two
tokens over all streams and repeats, shown as tokens per second of all streams together. The time before the first token
does not count.

- *Context*: one stream, whose answer ends at the given context length.
- *Streams*: several streams at once, each with a prompt of 32 tokens. llama.cpp computes them in batches of its C
  interface.
"""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.peers import LLAMA_CPP, OURS
from benchmarks.peers.engine_process import EngineProcess
from benchmarks.peers.side_by_side import Setup, count_cores, run_by_turns
from infinilm.bench.measure import Workload, describe_machine
from infinilm.cli.bench import write_json
from infinilm.cli.display import console, format_rate, make_table
from infinilm.loading.sources import resolve

ENGINES = (OURS, LLAMA_CPP)
OUTPUT_LEN = 32
CONTEXT_LENS = (128, 256, 512, 1024, 2048, 4096, 8192)
STREAMS = (1, 2, 4, 8, 16, 32, 64)
COLORS = {OURS: "#2f6f9f", LLAMA_CPP: "#d9822b"}
GREY = "#8a8f98"

Series = dict[int, dict[str, float]]
"""Tokens per second by context length or number of streams, and engine."""


def measure_context(engines: Sequence[EngineProcess], lengths: Sequence[int], repeat: int) -> Series:
    """Measure one stream at each context length that the model supports."""
    longest = min(engine.max_len for engine in engines)
    works = {
        length: Workload(f"context {length}", num_prompts=1, input_len=length - OUTPUT_LEN, output_len=OUTPUT_LEN)
        for length in lengths
        if length <= longest
    }
    return {length: _measure(engines, work, repeat) for length, work in works.items()}


def measure_streams(engines: Sequence[EngineProcess], counts: Sequence[int], repeat: int) -> Series:
    """Measure each number of concurrent streams."""
    works = {
        count: Workload(f"streams {count}", num_prompts=count, input_len=32, output_len=OUTPUT_LEN) for count in counts
    }
    return {count: _measure(engines, work, repeat) for count, work in works.items()}


def _measure(engines: Sequence[EngineProcess], work: Workload, repeat: int) -> dict[str, float]:
    runs = run_by_turns(engines, work, repeat, warm_up=False)
    rates = {name: work.num_prompts / median(gap for run in own for gap in run.gaps) for name, own in runs.items()}
    print(f"{work}: " + ", ".join(f"{name} {rate:,.1f} tok/s" for name, rate in rates.items()), flush=True)
    return rates


def plot(report: dict[str, Any], file: Path) -> None:
    """Draw both series."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    first, second = figure.subplots(1, 2)
    _draw(first, report["context"], "one stream", "context, tokens")
    _draw(second, report["streams"], "many streams, together", "streams")
    machine = report["machine"]
    figure.suptitle(f"Decoding {report['model']} on {machine['num_threads']} threads, {machine['cpu']}", fontsize=11)
    figure.savefig(file, dpi=130)


def _draw(axes: Axes, series: Series, title: str, xlabel: str) -> None:
    places = list(series)
    for name in ENGINES:
        rates = [rates[name] for rates in series.values()]
        axes.plot(places, rates, "o-", color=COLORS[name], label=name, markersize=4, linewidth=1.8)
        for place, rate in zip(places, rates, strict=True):
            axes.annotate(f"{rate:,.0f}", (place, rate), (0, 6), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{place:,}" for place in places])
    axes.minorticks_off()
    axes.set(xlabel=xlabel, ylabel="tokens/s", title=title, ylim=(0, None))
    axes.margins(y=0.12)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(color=GREY, alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def show(name: str, series: Series) -> None:
    """Print one series as a table."""
    table = make_table(name, *ENGINES, "ratio", left=0)
    for place, rates in series.items():
        ours, theirs = (rates[engine] for engine in ENGINES)
        table.add_row(f"{place:,}", format_rate(ours), format_rate(theirs), f"{ours / theirs:.2f}×")
    console().print("", table)


def main(args: Sequence[str] | None = None) -> None:
    """Measure, print, draw, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", help="a .gguf file; the embedded model by default")
    parser.add_argument("--threads", type=int, default=count_cores())
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="few points, each once")
    parser.add_argument("--plot", metavar="FILE", type=Path)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(args)
    repeat = 1 if options.quick else options.repeat
    lengths, counts = (CONTEXT_LENS[:4:3], STREAMS[:4:3]) if options.quick else (CONTEXT_LENS, STREAMS)
    path = resolve(options.model)
    setup = Setup({"model": str(path), "device": "cpu"}, options.threads)
    with ExitStack() as stack:
        engines = [stack.enter_context(setup.start(name)) for name in ENGINES]
        report: dict[str, Any] = {
            "model": path.stem,
            "machine": describe_machine() | {"num_threads": options.threads},
            "versions": {engine.name: engine.version for engine in engines},
            "repeat": repeat,
            "context": measure_context(engines, lengths, repeat),
            "streams": measure_streams(engines, counts, repeat),
        }
    show("context", report["context"])
    show("streams", report["streams"])
    if options.plot is not None:
        plot(report, options.plot)
    if options.json is not None:
        write_json(report, options.json)


if __name__ == "__main__":
    main()
