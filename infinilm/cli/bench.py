"""`infinilm bench`: how fast a workload is, here and in another engine.

`bench --peer llama.cpp`, `--peer openvino` and `bench serve` are in `benchmarks/`, which is not part of the wheel.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infinilm.cli.answering import open_engine
from infinilm.cli.display import NONE, console, format_rate, format_seconds, make_table, note
from infinilm.cli.options import takes_config, takes_sizes
from infinilm.config import Config
from infinilm.errors import InvalidValueError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from infinilm import LLM
    from infinilm.bench.measure import Run, Summary, Workload
    from infinilm.bench.transformers_peer import TransformersPeer

DEFAULT_WORKLOADS = ("single", "batch", "prefill")
PEERS = ("transformers", "llama.cpp", "openvino")
OURS = "infinilm"
RATES = ("prefill_per_second", "decode_per_second")  # fields of `Summary`, in the order of the table's columns
TIMES = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")


Workloads = Annotated[
    list[str] | None,
    typer.Option(
        "--workload",
        "-w",
        metavar="NAME",
        help="single, batch, prefill, prefix or custom; can be given several times. "
        f"Default: {', '.join(DEFAULT_WORKLOADS)}. Not with --peer llama.cpp or openvino.",
        rich_help_panel="Workload",
        show_default=False,
    ),
]
Peer = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"Run the same work in another engine, in turns: {', '.join(PEERS)}.",
        show_default=False,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="Threads of each engine on a CPU. Default: as many as cores.", show_default=False
    ),
]
JsonFile = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Write the figures as JSON; - is stdout.", show_default=False),
]


@takes_sizes()
@takes_config()
def bench(
    *,
    context: typer.Context,
    workloads: Workloads = None,
    repeat: Annotated[int, typer.Option(min=1, metavar="N", help="Measured runs of each workload.")] = 5,
    peer: Peer = None,
    threads: Threads = None,
    json_file: JsonFile = None,
    config: Config,
    sizes: dict[str, Any],
) -> None:
    """Measure how fast a model runs here.

    Prompts are random token ids, the same everywhere; answers are greedy and of full length. With --peer, both
    engines do the same work in turns: transformers in this process; llama.cpp or OpenVINO and this engine each in its
    own process, so that memory and start time are measured as well. To measure a server, use bench serve.
    """
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return
    if peer not in (None, *PEERS):
        raise InvalidValueError(f"peer={peer!r} is unknown; use one of {', '.join(PEERS)}")
    if peer not in (None, "transformers"):
        if workloads or sizes:
            raise InvalidValueError(f"--peer {peer} has work of its own; leave out --workload and sizes of workloads")
        report, table = import_benchmark("peers.side_by_side", f"--peer {peer}").report(config, threads, repeat, peer)
        _write(report, json_file, [table, ""])
        return
    chosen = _choose(workloads or list(DEFAULT_WORKLOADS), sizes)
    if peer is not None:
        import_module("infinilm.bench.transformers_peer").check_installed()
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # before torch is imported, if it is
    if peer is not None and config.quantization is None:
        config = config.replace(quantization="none")  # like the weights in transformers
    with open_engine(config) as engine:
        other = load_peer(engine) if peer else None
        results = [_measure(engine, other, workload, repeat) for workload in chosen]
        report = _report(engine, other, results, repeat)
    _write(report, json_file, [part for result in results for part in _show(result)])


def bench_serve(context: typer.Context) -> None:
    """Measure how a server answers under load: ours, or any other with OpenAI's API."""
    command = import_benchmark("serve.command", "bench serve")
    raise typer.Exit(command.app(args=context.args, prog_name=context.command_path, standalone_mode=False) or 0)


def import_benchmark(name: str, command: str) -> Any:
    try:
        return import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("benchmarks"):
            raise
        raise InvalidValueError(
            f"{command} is part of the source checkout, not of the wheel; clone InfiniLM's repository and "
            "install it there with: pip install -e ."
        ) from None


def _write(report: dict[str, Any], json_file: str | None, tables: Sequence["RenderableType"]) -> None:
    if json_file is not None:
        write_json(report, json_file)
    if json_file != "-":
        screen = console()
        screen.print(_title(report), soft_wrap=True)
        screen.print()
        screen.print(*tables, sep="\n")


def _refuse_options(context: typer.Context) -> None:
    """Refuse options before a subcommand: they would be ignored."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            command = f"{context.command_path} {context.invoked_subcommand}"
            raise InvalidValueError(f"{parameter.opts[0]} is of no use before a subcommand; see '{command} --help'")


@dataclass
class Result:
    workload: "Workload"
    runs: dict[str, list["Run"]] = field(default_factory=dict)

    def summaries(self) -> "dict[str, Summary]":
        from infinilm.bench.measure import Summary

        return {engine: Summary.of(runs) for engine, runs in self.runs.items()}

    def num_equal(self) -> tuple[int, int]:
        """The number of answers that are equal in both engines, and the number of all answers."""
        first, second = ([ids for run in runs for ids in run.token_ids] for runs in self.runs.values())
        return sum(a == b for a, b in zip(first, second, strict=True)), len(first)


def _choose(names: list[str], sizes: dict[str, Any]) -> list["Workload"]:
    from infinilm.bench.measure import WORKLOADS

    if unknown := [name for name in names if name not in WORKLOADS]:
        raise InvalidValueError(f"workload={unknown[0]!r} is unknown; use one of {', '.join(WORKLOADS)}")
    return [replace(WORKLOADS[name], **sizes) for name in names]


def load_peer(engine: "LLM") -> "TransformersPeer":
    from infinilm.bench.transformers_peer import TransformersPeer

    note("Loading the same weights with transformers …")
    info = engine.executor.info
    return TransformersPeer(Path(str(engine.config.model)), dtype=info.dtype, device=info.device)


def _measure(engine: "LLM", other: "TransformersPeer | None", workload: "Workload", repeat: int) -> Result:
    """Warm up, then run both engines in turns, so that other load on the machine affects both equally."""
    from infinilm.bench.measure import run_engine

    result = Result(workload)
    vocab_size = engine.model_config.vocab_size
    note(f"Measuring {workload} · {repeat} times …")
    for number in range(repeat + 1):
        is_warm_up = number == 0
        work = replace(workload, output_len=min(workload.output_len, 4)) if is_warm_up else workload
        prompts = work.prompts(vocab_size, number)
        runs = {OURS: run_engine(engine, work, prompts)} | ({other.name: other.run(work, prompts)} if other else {})
        if not is_warm_up:
            for name, run in runs.items():
                result.runs.setdefault(name, []).append(run)
    return result


def _report(engine: "LLM", other: "TransformersPeer | None", results: list[Result], repeat: int) -> dict[str, Any]:
    from infinilm import __version__
    from infinilm.bench.measure import describe_machine

    versions = {OURS: __version__} | ({other.name: other.version} if other else {})
    return {
        "model": Path(str(engine.config.model)).name,
        "dtype": engine.executor.info.dtype,
        "device": engine.executor.info.device,
        "machine": describe_machine(),
        "versions": versions,
        "repeat": repeat,
        "workloads": [
            {
                **asdict(result.workload),
                "engines": {name: asdict(summary) for name, summary in result.summaries().items()},
                **({"num_equal_answers": result.num_equal()[0]} if other else {}),
            }
            for result in results
        ],
    }


def write_json(report: dict[str, Any], file: str) -> None:
    text = json.dumps(report, indent=2) + "\n"
    if file == "-":
        sys.stdout.write(text)
        return
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidValueError(f"--json {file}: can't be written: {error.strerror or error}") from error


def _title(report: dict[str, Any]) -> str:
    machine = report["machine"]
    versions = " · ".join(f"{name} {version}" for name, version in report["versions"].items())
    threads = "1 thread" if machine["num_threads"] == 1 else f"{machine['num_threads']} threads"
    where = machine["gpu"] if report["device"] != "cpu" else machine["cpu"]
    given = [f"{name}={value}" for name, value in report.get("settings", {}).items()]
    what = " · ".join([*(report[name] for name in ("model", "dtype") if name in report), *given])
    return (
        f"{what} · {where}, {threads}\n"
        f"{versions} · torch {machine['torch']} · Python {machine['python']} · median of {report['repeat']}"
    )


def _show(result: Result) -> list["RenderableType"]:
    from rich.text import Text

    summaries = result.summaries()
    has_peer = len(summaries) > 1
    title = Text(str(result.workload), style="bold")
    if has_peer:
        title.append("   same answers: {} of {}".format(*result.num_equal()), style="dim")
    table = make_table("\nengine", "prefill\ntok/s", "decode\ntok/s", "TTFT\np50", "\np99", "ITL\np50", "\np99")
    # Equal widths align the columns of consecutive tables.
    for column, width in zip(table.columns, (12, 8, 8, 8, 8, 8, 8), strict=True):
        column.min_width = width
    for engine, summary in summaries.items():
        rates = [format_rate(getattr(summary, name)) for name in RATES]
        table.add_row(engine, *rates, *(format_seconds(getattr(summary, name)) for name in TIMES))
    if has_peer:
        # The speedup of this engine: rates as ours over theirs, times as theirs over ours.
        ours, theirs = summaries.values()
        pairs = [(getattr(ours, name), getattr(theirs, name)) for name in RATES]
        pairs += [(getattr(theirs, name), getattr(ours, name)) for name in TIMES]
        ratios = [f"{a / b:.2f}×" if a is not None and b is not None else NONE for a, b in pairs]
        table.add_row("ratio", *ratios, style="bold")
    return [title, table, ""]
