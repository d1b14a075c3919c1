"""`infinilm bench serve`: how a server answers under load."""

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.serve.client import LoadRun, Measured, Plan
from benchmarks.serve.figures import Figures, check_plot, describe_requests, plot
from benchmarks.serve.http_connection import Endpoint
from benchmarks.serve.options import takes_limits, takes_load, takes_work
from benchmarks.serve.probe import probe
from benchmarks.serve.processes import measure
from benchmarks.serve.work import Limits, Load, Work
from infinilm import __version__
from infinilm.cli.bench import write_json
from infinilm.cli.display import console, format_rate, format_seconds, head, make_facts, make_table, note, print_error
from infinilm.cli.help import HelpCommand, help_of, make_app
from infinilm.cli.serve import KEY_VARIABLE
from infinilm.errors import EngineError

if TYPE_CHECKING:
    from rich.console import RenderableType

EXIT_UNANSWERED = 1
BUSY_SHARE = 0.8
"""A client that uses more of a core may limit the figures itself."""

app = make_app()


@takes_limits()
@takes_work()
@takes_load()
def bench_serve(
    *,
    base_url: Annotated[
        str, typer.Option(metavar="URL", help="The server, with or without /v1.")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help=f"The server's key. Another way: {KEY_VARIABLE}.", show_default=False),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.01, metavar="X", help="Seconds that a request may take.")] = 600.0,
    warmup: Annotated[
        int, typer.Option(min=0, metavar="N", help="Requests to send, all at once, before measuring.")
    ] = 0,
    processes: Annotated[int, typer.Option(min=1, metavar="N", help="Processes that this client runs in.")] = 1,
    json_file: Annotated[
        str | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Write figures and requests as JSON; - is stdout.",
            rich_help_panel="Report",
            show_default=False,
        ),
    ] = None,
    plot_file: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE.png", help="Draw the figures.", rich_help_panel="Report", show_default=False
        ),
    ] = None,
    load: Load,
    work: Work,
    limits: Limits | None,
) -> None:
    """Measure how a server answers under load: ours, or any other with OpenAI's API.

    Requests are sent by --streams, --rate or --burst, and the streamed answers timed. Prompts are new in each run: none
    is in the server's prefix cache. Ctrl-C shows what was measured so far.
    """
    if plot_file is not None:
        check_plot(plot_file)
    key = api_key or next(iter(os.environ.get(KEY_VARIABLE, "").split()), None)
    plan = Plan(Endpoint.parse(base_url, key), work, load, timeout)
    try:
        plan, measured = asyncio.run(_measure(plan, warmup, processes))
    except EngineError as error:
        print_error(str(error))
        raise typer.Exit(EXIT_UNANSWERED) from None
    figures = Figures.of(measured, limits)
    if json_file is not None:
        write_json(_report(plan, measured, figures, processes), json_file)
    if json_file != "-":
        console().print(*_show(plan, figures), sep="\n")
    if plot_file is not None and figures.num_answered:
        plot(measured, _title(plan), plot_file)
    if measured.is_interrupted:
        raise typer.Abort
    if not figures.num_answered:
        print_error("no request was answered")
        raise typer.Exit(EXIT_UNANSWERED)


app.command(cls=HelpCommand, help=help_of(bench_serve))(bench_serve)


async def _measure(plan: Plan, warmup: int, processes: int) -> tuple[Plan, Measured]:
    plan, remarks = await probe(plan, warmup)
    for remark in remarks:
        note(remark)
    note(f"Measuring {plan.load} …")
    with _progress() as show:
        return plan, await measure(plan, processes, show)


@contextmanager
def _progress() -> Iterator[Callable[[LoadRun], None] | None]:
    """A temporary line on the terminal that shows the progress."""
    if not sys.stderr.isatty():
        yield None
        return

    def show(run: LoadRun) -> None:
        sys.stderr.write(
            f"\r\x1b[K{run.seconds:.0f} s · {run.num_done:,} done, {run.num_open:,} at work · {run.num_errors:,} errors"
        )
        sys.stderr.flush()

    try:
        yield show
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def _title(plan: Plan) -> str:
    return f"{plan.work.model} · {plan.load} · {plan.work}"


def _report(plan: Plan, measured: Measured, figures: Figures, processes: int) -> dict[str, Any]:
    work = asdict(plan.work)
    texts = work.pop("texts")
    return {
        "version": __version__,
        "server": str(plan.endpoint),
        "path": plan.work.path,
        "load": asdict(plan.load),
        "work": work | {"num_texts": None if texts is None else len(texts)},
        "processes": processes,
        "is_interrupted": measured.is_interrupted,
        "figures": asdict(figures),
        "requests": describe_requests(measured.traces),
    }


def _show(plan: Plan, figures: Figures) -> "Iterator[RenderableType]":
    """The title, rates and times, and warnings about their validity."""
    from rich.text import Text

    yield Text(_title(plan), style="bold")
    yield Text(f"{plan.endpoint}{plan.work.path} · seed {plan.work.seed}", style="dim")
    yield ""
    yield make_facts(_facts(figures))
    yield ""
    table = make_table("", "p50", "p90", "p99", "max", "mean")
    rows = {
        "first token (TTFT)": figures.ttft,
        "between tokens (ITL)": figures.itl,
        "between arrivals": figures.gap,
        "between packets": figures.packet_gap,
        "per token (TPOT)": figures.tpot,
        "whole answer": figures.latency,
    }
    for name, spread in rows.items():
        times = [None] * 5 if spread is None else [spread.p50, spread.p90, spread.p99, spread.max, spread.mean]
        table.add_row(name, *map(format_seconds, times))
    yield table
    if figures.errors:
        yield ""
        errors = make_table("error", "what the first one said", "requests", left=2)
        for each in figures.errors:
            errors.add_row(each.kind, head(each.example, 100), f"{each.count:,}", style="red")
        yield errors
    for doubt in _doubts(plan, figures):
        yield Text(f"! {doubt}", style="yellow")


def _facts(figures: Figures) -> dict[str, str]:
    interrupted = f", {figures.num_interrupted:,} interrupted" if figures.num_interrupted else ""
    good = figures.good_per_second
    late = f"; requests were at most {format_seconds(figures.lateness.max)} late" if figures.lateness else ""
    answered = f"{figures.num_answered:,} of {figures.num_requests:,} answered"
    return {
        "requests": f"{answered}{interrupted} in {figures.seconds:.1f} s",
        "requests/s": format_rate(figures.requests_per_second)
        + ("" if good is None else f", {format_rate(good)} within the limits"),
        "output tokens/s": f"{format_rate(figures.output_per_second)}   ({figures.num_output_tokens:,} tokens)",
        "total tokens/s": format_rate(figures.total_per_second),
        "client": f"{figures.cpu_share:.0%} of a core, {figures.peak_cpu_share:.0%} at most{late}",
    }


def _doubts(plan: Plan, figures: Figures) -> Iterator[str]:
    if figures.peak_cpu_share > BUSY_SHARE:
        yield "the client was busy itself, so times are too long; use --processes"
    if not figures.num_answered:
        return
    if not figures.has_usage:
        yield "the server sent no usage: tokens are counted by events"
    elif figures.num_events < 0.99 * figures.num_output_tokens:
        per_event = figures.num_output_tokens / max(1, figures.num_events)
        yield f"an event brings {per_event:.2f} tokens on average: they are closer together than ITL shows"
    asked = figures.num_answered * plan.work.output_len
    if "ignore_eos" in plan.work.fields and figures.num_output_tokens < 0.99 * asked:
        yield f"answers have {figures.num_output_tokens / figures.num_answered:.1f} tokens, not {plan.work.output_len}"
