"""`infinilm bench --peer llama.cpp`: what is measured of both engines, as a report and as a table."""

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinilm.cli.display import format_rate, make_table, note
from infinilm.config import Config
from infinilm.errors import InvalidValueError

if TYPE_CHECKING:
    from rich.table import Table

    from infinilm.bench.side_by_side import Comparison, Figure, Setup


def compare_with_llamacpp(config: Config, num_threads: int | None, repeat: int) -> tuple["Comparison", dict[str, Any]]:
    """Measure both engines: what was found, and the report of it."""
    from infinilm.bench.llamacpp_peer import check_installed
    from infinilm.bench.measure import describe_machine
    from infinilm.bench.side_by_side import compare

    check_installed()
    setup = make_setup(config, num_threads)
    found = compare(setup, repeat, note)
    report = {
        "model": Path(setup.settings["model"]).name,
        "device": "cpu",
        "machine": describe_machine() | {"num_threads": setup.num_threads},
        "versions": found.versions,
        "repeat": repeat,
        "figures": [asdict(figure) | {"ratio": figure.ratio} for figure in found.figures()],
        "workloads": [
            {**asdict(work), "engines": {name: asdict(found.summary(work, name)) for name in found.versions}}
            for work in (found.works.decode, found.works.prefill, found.works.streams)
        ],
        "peak_bytes": found.peak_bytes,
        "start_seconds": found.start_seconds,
    }
    return found, report


def make_setup(config: Config, num_threads: int | None) -> "Setup":
    """How both engines are to be started; None: with as many threads as cores."""
    from infinilm.bench.side_by_side import Setup, count_cores
    from infinilm.loading.sources import resolve

    path = resolve(config.model)
    if path.suffix != ".gguf":
        raise InvalidValueError(f"--peer llama.cpp: {path} is not a .gguf file, and llama.cpp reads nothing else")
    if config.device == "cuda":
        raise InvalidValueError("--peer llama.cpp compares on the CPU; leave out --device cuda")
    config = config.replace(model=str(path), device="cpu")
    settings = {item.name: getattr(config, item.name) for item in fields(config)}
    changed = {item.name: settings[item.name] for item in fields(config) if settings[item.name] != item.default}
    return Setup(changed, num_threads or count_cores())


def make_comparison(figures: Sequence["Figure"]) -> "Table":
    """A line for each figure, ours next to theirs."""
    table = make_table("", "", "infinilm", "llama.cpp", "ratio", "better", left=2)
    for figure in figures:
        values = [figure.ours, figure.theirs]
        table.add_row(
            figure.name,
            figure.unit,
            *(f"{value:.2f}" if figure.unit == "s" else format_rate(value) for value in values),
            f"{figure.ratio:.2f}×",
            "more" if figure.is_more_better else "less",
        )
    return table
