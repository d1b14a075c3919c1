"""Figures of a run, computed from its traces, and a plot of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from benchmarks.serve.client import Measured
from benchmarks.serve.events import INTERRUPTED, Trace
from benchmarks.serve.work import Limits
from infinilm.errors import InvalidValueError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = npt.NDArray[np.float64]
MAX_POINTS = 2000
"""The points of a plotted line. More would not be visible."""
BLUE, ORANGE, GREY = "#2f6f9f", "#d9822b", "#8a8f98"


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of times, in seconds."""

    p50: float
    p90: float
    p99: float
    max: float
    mean: float

    @classmethod
    def of(cls, values: Floats) -> "Spread | None":
        """None if there are no values."""
        if not len(values):
            return None
        p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
        return cls(p50, p90, p99, float(values.max()), float(values.mean()))


@dataclass(frozen=True, slots=True)
class Errors:
    kind: str
    count: int
    example: str
    """The message of the first of them."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Times are in seconds, and of answered requests only."""

    seconds: float
    """From the first request to the end of the last answer."""
    num_requests: int
    num_answered: int
    num_interrupted: int
    errors: list[Errors]
    num_prompt_tokens: int | None
    """Of answered requests, as the server reports."""
    num_output_tokens: int
    """Of answered and interrupted requests."""
    num_events: int
    """Events that brought these tokens. The numbers are equal if each event brings one token."""
    has_usage: bool
    """Whether the server reported the number of tokens. If not, events are counted."""
    requests_per_second: float
    output_per_second: float
    total_per_second: float | None
    """Tokens of prompts and answers."""
    good_per_second: float | None
    """Answers per second that were within the limits, if there are any."""
    ttft: Spread | None
    """From sending a request to its first token."""
    itl: Spread | None
    """Between two tokens of an answer. Tokens that arrive together share the gap before them equally."""
    gap: Spread | None
    """Between two arrivals of tokens."""
    packet_gap: Spread | None
    """Between two packets of tokens, as a reader notices. Arrivals within a millisecond of each other are one."""
    tpot: Spread | None
    """The mean time of a token after the first, for each answer."""
    latency: Spread | None
    """From sending a request to the end of its answer."""
    lateness: Spread | None
    """How much later than planned the client sent requests of an open loop."""
    cpu_share: float
    peak_cpu_share: float

    @classmethod
    def of(cls, measured: Measured, limits: Limits | None = None) -> "Figures":
        traces = measured.traces
        answered = [trace for trace in traces if trace.error is None]
        broken_off = [trace for trace in traces if trace.error == INTERRUPTED]
        begin = min((trace.start for trace in traces), default=0.0)
        seconds = max((trace.end for trace in traces), default=0.0) - begin
        counted = [*answered, *broken_off]
        num_output = sum(trace.num_tokens for trace in counted)
        prompts = [trace.num_prompt_tokens for trace in answered]
        num_prompt = None if None in prompts else sum(number or 0 for number in prompts)
        num_good = sum(_is_good(trace, limits) for trace in answered) if limits else None
        gaps, itls = find_gaps(answered)
        return cls(
            seconds=seconds,
            num_requests=len(traces),
            num_answered=len(answered),
            num_interrupted=len(broken_off),
            errors=count_errors(traces),
            num_prompt_tokens=num_prompt,
            num_output_tokens=num_output,
            num_events=sum(trace.num_events for trace in counted),
            has_usage=all(trace.num_output_tokens is not None for trace in answered),
            requests_per_second=_rate(len(answered), seconds),
            output_per_second=_rate(num_output, seconds),
            total_per_second=None if num_prompt is None else _rate(num_prompt + num_output, seconds),
            good_per_second=None if num_good is None else _rate(num_good, seconds),
            ttft=Spread.of(np.array([trace.ttft for trace in answered])),
            itl=Spread.of(itls),
            gap=Spread.of(gaps),
            packet_gap=Spread.of(find_packet_gaps(answered)),
            tpot=Spread.of(np.array([trace.tpot for trace in answered if trace.tpot is not None])),
            latency=Spread.of(np.array([trace.end - trace.start for trace in answered])),
            lateness=Spread.of(np.array([trace.lateness for trace in traces if trace.lateness])),
            cpu_share=measured.cpu_share,
            peak_cpu_share=measured.peak_cpu_share,
        )


def _rate(number: int, seconds: float) -> float:
    return number / seconds if seconds > 0 else 0.0


def _is_good(trace: Trace, limits: Limits) -> bool:
    pairs = ((trace.ttft, limits.ttft), (trace.tpot, limits.tpot))
    return all(time is None or limit is None or time <= limit for time, limit in pairs)


PACKET_S = 0.001


def find_packet_gaps(traces: Sequence[Trace]) -> Floats:
    """Times between packets of tokens."""
    gaps: list[Floats] = [np.empty(0)]
    for trace in traces:
        times = np.frombuffer(trace.times)
        gaps.append(np.diff(times[np.append(True, np.diff(times) > PACKET_S)[: len(times)]]))
    return np.concatenate(gaps)


def find_gaps(traces: Sequence[Trace]) -> tuple[Floats, Floats]:
    """Times between arrivals, and between tokens."""
    gaps = [np.diff(np.frombuffer(trace.times)) for trace in traces]
    counts = [np.array(trace.counts[1:], dtype=np.int64) for trace in traces]
    all_gaps = np.concatenate([np.empty(0), *gaps])
    all_counts = np.concatenate([np.empty(0, dtype=np.int64), *counts])
    return all_gaps, np.repeat(all_gaps / all_counts, all_counts)


def count_errors(traces: Sequence[Trace]) -> list[Errors]:
    """Errors by kind, the most frequent first."""
    kinds: dict[str, list[Trace]] = {}
    for trace in traces:
        if trace.error not in (None, INTERRUPTED):
            kinds.setdefault(str(trace.error), []).append(trace)
    found = [Errors(kind, len(failed), failed[0].message) for kind, failed in kinds.items()]
    return sorted(found, key=lambda errors: -errors.count)


def find_rates(traces: Sequence[Trace], width: float) -> tuple[Floats, Floats]:
    """Tokens per second over time: the middle of each interval of `width` seconds, and the rate in it."""
    times = np.concatenate([np.empty(0), *(np.frombuffer(trace.times) for trace in traces)])
    counts = np.concatenate([np.empty(0), *(np.array(trace.counts, dtype=np.float64) for trace in traces)])
    begin = min(trace.start for trace in traces)
    end = max(trace.end for trace in traces)
    num_intervals = max(1, int(np.ceil((end - begin) / width)))
    tokens, edges = np.histogram(times - begin, bins=num_intervals, range=(0.0, num_intervals * width), weights=counts)
    return (edges[:-1] + edges[1:]) / 2, tokens / width


def describe_requests(traces: Sequence[Trace]) -> list[dict[str, Any]]:
    """One entry per request, in order of sending; times count from the first request."""
    begin = min((trace.start for trace in traces), default=0.0)
    return [
        {
            "index": trace.index,
            "start": trace.start - begin,
            "ttft": trace.ttft,
            "latency": trace.end - trace.start,
            "num_prompt_tokens": trace.num_prompt_tokens,
            "num_output_tokens": trace.num_tokens,
            "num_events": trace.num_events,
            "error": trace.error,
        }
        for trace in sorted(traces, key=lambda trace: trace.start)
    ]


def check_plot(file: Path) -> None:
    """Check before measuring whether a plot can be written."""
    if find_spec("matplotlib") is None:
        raise InvalidValueError("--plot needs matplotlib; install it with: pip install 'infinilm[plot]'")
    if file.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InvalidValueError(f"--plot {file}: use a name that ends with .png, .svg or .pdf")
    if not file.parent.is_dir():
        raise InvalidValueError(f"--plot {file}: there is no directory {file.parent}")


def plot(measured: Measured, title: str, file: Path) -> None:
    """Plot a run with at least one answer into a file."""
    from matplotlib.figure import Figure

    answered = [trace for trace in measured.traces if trace.error is None]
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    first, second, third = figure.subplots(1, 3)
    _draw_shares(first, np.array([trace.ttft for trace in answered]), "time to first token", BLUE)
    _draw_shares(second, find_gaps(answered)[1], "time between tokens", ORANGE)
    seconds = max(trace.end for trace in measured.traces) - min(trace.start for trace in measured.traces)
    middles, rates = find_rates(measured.traces, width=max(seconds / 60, 0.05))
    third.fill_between(middles, rates, step="mid", color=BLUE, alpha=0.25, linewidth=0)
    third.step(middles, rates, where="mid", color=BLUE)
    third.set(xlabel="seconds", ylabel="output tokens/s", title="throughput", ylim=(0, None), xlim=(0, seconds))
    third.yaxis.set_major_formatter("{x:,.0f}")
    for axes in (first, second, third):
        axes.grid(color=GREY, alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    try:
        figure.savefig(file, dpi=130)
    except OSError as error:
        raise InvalidValueError(f"--plot {file}: can't be written: {error.strerror or error}") from error


def _draw_shares(axes: "Axes", seconds: Floats, name: str, color: str) -> None:
    """The cumulative distribution, with its percentiles."""
    values = np.sort(seconds) * 1000
    axes.set(xlabel="milliseconds", ylabel="share", title=name, ylim=(0, 1.02))
    if not len(values):
        axes.text(0.5, 0.5, "one token each", ha="center", transform=axes.transAxes, color=GREY)
        return
    shown = np.linspace(0, len(values) - 1, min(len(values), MAX_POINTS)).astype(np.int64)
    axes.step(values[shown], (shown + 1) / len(values), where="post", color=color, linewidth=1.8)
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    for share, value in ((0.5, p50), (0.9, p90), (0.99, p99)):
        axes.plot(value, share, "o", color=color, markersize=4)
    if values[-1] > 20 * max(p50, 1e-6):
        axes.set_xscale("log")
    summary = "\n".join(f"p{name}  {value:,.1f} ms" for name, value in (("50", p50), ("90", p90), ("99", p99)))
    box = {"facecolor": "white", "edgecolor": GREY, "alpha": 0.9, "boxstyle": "round,pad=0.4", "linewidth": 0.6}
    axes.text(0.97, 0.08, summary, ha="right", va="bottom", transform=axes.transAxes, fontsize=9, bbox=box)
