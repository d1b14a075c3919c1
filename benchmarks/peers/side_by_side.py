"""Runs this engine and another by turns on the same file, prompts and threads, each in its own process."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

from benchmarks.peers import LLAMA_CPP, OURS, PEERS, check_installed
from benchmarks.peers.engine_process import EngineProcess, describe_death, environment
from infinilm.bench.measure import Run, Summary, Workload, describe_machine
from infinilm.cli.display import format_rate, make_table, note
from infinilm.config import Config
from infinilm.errors import EngineError, InvalidValueError
from infinilm.loading.sources import resolve

if TYPE_CHECKING:
    from rich.table import Table

FIRST_PROMPT = "The capital of France is"
SETTLE_SECONDS = 0.05
"""The pause between turns, because idle threads spin for a moment before they sleep."""


@dataclass(frozen=True, slots=True)
class Works:
    """The workloads of both engines."""

    decode: Workload
    prefill: Workload
    streams: Workload
    memory: Workload
    """For the peak of resident memory: the process loads the model and runs only this workload."""


WORKS = Works(
    decode=Workload("decode", num_prompts=1, input_len=89, output_len=128),
    prefill=Workload("prefill", num_prompts=1, input_len=512, output_len=1),
    streams=Workload("streams", num_prompts=8, input_len=89, output_len=128),
    memory=Workload("memory", num_prompts=1, input_len=512, output_len=64),
)


@dataclass(frozen=True, slots=True)
class Setup:
    """How both engines are started: our `Config`'s settings, with the path of a .gguf file as `model`, and threads."""

    settings: Mapping[str, Any]
    num_threads: int
    peer: str = LLAMA_CPP

    @property
    def engines(self) -> tuple[str, str]:
        return OURS, self.peer

    def start(self, engine: str) -> EngineProcess:
        return EngineProcess(engine, self.settings, self.num_threads)

    def first_token_command(self, engine: str) -> list[str]:
        """A command that prints an engine's first token."""
        if engine != OURS:
            arguments = ["-c", PEERS[engine].start, str(self.settings["model"]), str(self.num_threads), FIRST_PROMPT]
        else:
            options = ((f"--{name.replace('_', '-')}", str(value)) for name, value in self.settings.items())
            flat = [part for option in options for part in option]
            arguments = ["-m", "infinilm", "generate", *flat, "--max-tokens", "1", FIRST_PROMPT]
        return [sys.executable, *arguments]


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of both engines, and which direction is better."""

    name: str
    unit: str
    ours: float
    theirs: float
    is_more_better: bool

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


@dataclass(slots=True)
class Comparison:
    """All measurements, by engine."""

    works: Works
    versions: dict[str, str] = field(default_factory=dict)
    runs: dict[str, dict[str, list[Run]]] = field(default_factory=dict)
    """By workload name and engine."""
    peak_bytes: dict[str, list[int]] = field(default_factory=dict)
    """Empty where the system does not report it."""
    start_seconds: dict[str, list[float]] = field(default_factory=dict)

    def summary(self, workload: Workload, engine: str) -> Summary:
        return Summary.of(self.runs[workload.name][engine])

    def figures(self) -> list[Figure]:
        """Medians of everything."""
        works = self.works
        decode, streams = (
            [self.summary(work, name).decode_per_second for name in self.versions]
            for work in (works.decode, works.streams)
        )
        prefill = [self.summary(works.prefill, name).prefill_per_second for name in self.versions]
        count = works.streams.num_prompts
        found: list[tuple[str, str, Sequence[float | None], bool]] = [
            ("decode, one stream", "tok/s", decode, True),
            (f"prefill, {works.prefill.input_len}-token prompt", "tok/s", prefill, True),
            (f"{count} streams, against its one", "tok/s", (streams[0], decode[1]), True),
            (f"{count} streams, against its {count}", "tok/s", streams, True),
            ("peak resident memory", "MiB", self._medians(self.peak_bytes, 2**20), False),
            ("start to first token", "s", self._medians(self.start_seconds), False),
        ]
        return [
            Figure(name, unit, ours, theirs, is_more_better)
            for name, unit, (ours, theirs), is_more_better in found
            if ours is not None and theirs is not None
        ]

    def _medians(self, values: Mapping[str, Sequence[float]], unit: float = 1.0) -> list[float | None]:
        return [median(values[name]) / unit if values.get(name) else None for name in self.versions]


def compare(setup: Setup, repeat: int, note: Callable[[str], None], works: Works = WORKS) -> Comparison:
    """Measure everything `repeat` times. `note` is called with progress messages."""
    found = Comparison(works)
    _measure_workloads(found, setup, repeat, note)
    note(f"Measuring the peak of resident memory · {repeat} times …")
    for number in range(repeat):
        for name in setup.engines:
            with setup.start(name) as engine:
                engine.run(found.works.memory, found.works.memory.prompts(engine.vocab_size, number))
                if engine.peak_bytes is not None:
                    found.peak_bytes.setdefault(name, []).append(engine.peak_bytes)
    note(f"Measuring the start to the first token · {repeat} times …")
    for number in range(repeat + 1):
        for name in setup.engines:
            seconds = time_to_output(name, setup)
            if number > 0:  # the first start reads the files from disk, later ones from memory
                found.start_seconds.setdefault(name, []).append(seconds)
    return found


def _measure_workloads(found: Comparison, setup: Setup, repeat: int, note: Callable[[str], None]) -> None:
    with ExitStack() as stack:
        engines = [stack.enter_context(setup.start(name)) for name in setup.engines]
        found.versions = {engine.name: engine.version for engine in engines}
        for workload in (found.works.decode, found.works.prefill, found.works.streams):
            note(f"Measuring {workload} · {repeat} times …")
            found.runs[workload.name] = run_by_turns(engines, workload, repeat)


def run_by_turns(
    engines: Sequence[EngineProcess], workload: Workload, repeat: int, *, warm_up: bool = True
) -> dict[str, list[Run]]:
    """Run a workload by turns, so that other load on the machine affects all engines alike. Returns runs by engine."""
    runs: dict[str, list[Run]] = {engine.name: [] for engine in engines}
    if warm_up:
        _run_each_once(engines, replace(workload, output_len=min(workload.output_len, 4)), repeat)
    for number in range(repeat):
        for name, run in _run_each_once(engines, workload, number).items():
            runs[name].append(run)
    return runs


def _run_each_once(engines: Sequence[EngineProcess], workload: Workload, number: int) -> dict[str, Run]:
    """Run each engine once, all with the prompts of this number."""
    prompts = workload.prompts(engines[0].vocab_size, number)
    runs = {}
    for engine in engines:
        sleep(SETTLE_SECONDS)
        runs[engine.name] = engine.run(workload, prompts)
    return runs


def time_to_output(engine: str, setup: Setup) -> float:
    """The seconds from starting an engine's command to its first output."""
    start_time = perf_counter()
    with subprocess.Popen(
        setup.first_token_command(engine),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(setup.num_threads),
        bufsize=0,
    ) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = perf_counter() - start_time
        _, errors = process.communicate()
    if process.returncode != 0 or not first:
        raise EngineError(describe_death(engine, process.returncode, errors.decode(errors="replace")))
    return seconds


def count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def report(config: Config, num_threads: int | None, repeat: int, peer: str) -> tuple[dict[str, Any], "Table"]:
    """Measure both engines. Returns the report, and its figures as a table."""
    check_installed(peer)
    setup = make_setup(config, num_threads, peer)
    found = compare(setup, repeat, note)
    content = {
        "model": Path(setup.settings["model"]).name,
        "device": "cpu",
        "machine": describe_machine() | {"num_threads": setup.num_threads},
        "versions": found.versions,
        "repeat": repeat,
        "settings": {name: value for name, value in setup.settings.items() if name not in ("model", "device")},
        "figures": [asdict(figure) | {"ratio": figure.ratio} for figure in found.figures()],
        "workloads": [
            {**asdict(work), "engines": {name: asdict(found.summary(work, name)) for name in found.versions}}
            for work in (found.works.decode, found.works.prefill, found.works.streams)
        ],
        "peak_bytes": found.peak_bytes,
        "start_seconds": found.start_seconds,
    }
    return content, make_comparison(found.figures(), peer)


def make_setup(config: Config, num_threads: int | None, peer: str = LLAMA_CPP) -> Setup:
    """How both engines are started. If `num_threads` is None, there is one thread per core."""
    path = resolve(config.model)
    if path.suffix != ".gguf":
        raise InvalidValueError(f"--peer {peer}: {path} is not a .gguf file, which both engines can read")
    if config.device == "cuda":
        raise InvalidValueError(f"--peer {peer} compares on the CPU; leave out --device cuda")
    config = config.replace(model=str(path), device="cpu")
    settings = {item.name: getattr(config, item.name) for item in fields(config)}
    changed = {item.name: settings[item.name] for item in fields(config) if settings[item.name] != item.default}
    return Setup(changed, num_threads or count_cores(), peer)


def make_comparison(figures: Sequence[Figure], peer: str = LLAMA_CPP) -> "Table":
    """A table with one line per figure."""
    table = make_table("", "", OURS, peer, "ratio", "better", left=2)
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
