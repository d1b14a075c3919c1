"""A run as a picture: how times are distributed, and the throughput over time."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from infinilm.bench.serve_client import Measured
from infinilm.bench.serve_figures import Floats, find_gaps, find_rates
from infinilm.errors import InvalidValueError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_POINTS = 2000
"""Of a line: more could not be seen."""
BLUE, ORANGE, GREY = "#2f6f9f", "#d9822b", "#8a8f98"


def check_plot(file: Path) -> None:
    """See, before anything is measured, whether a picture can be made at all."""
    if find_spec("matplotlib") is None:
        raise InvalidValueError("--plot needs matplotlib; install it with: pip install 'infinilm[plot]'")
    if file.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InvalidValueError(f"--plot {file}: use a name that ends with .png, .svg or .pdf")
    if not file.parent.is_dir():
        raise InvalidValueError(f"--plot {file}: there is no directory {file.parent}")


def plot(measured: Measured, title: str, file: Path) -> None:
    """Draw the run, in which something was answered, into a file."""
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
    """The share of values up to each one, with the percentiles that matter written beside the line."""
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
