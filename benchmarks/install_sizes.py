"""What an installation takes: bytes, seconds, and the time and memory of an import and of a start.

    python benchmarks/install_sizes.py [lean] [serve] [torch] [--wheel dist/…whl] [--repeat 5] [--json FILE]

prints a table in Markdown.
For each set-up, `infinilm`, `infinilm[serve]` and `infinilm[torch]`, there is a fresh environment, into which pip
installs the wheel, or the checkout, which it compiles, from the index that is set up here. Bytes are those of files
without pip, and without compiled `.pyc` files before the first import. Seconds depend on the index and on pip's cache.
A start is `infinilm generate --max-tokens 1` with the embedded model, from the shell to its first output.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from infinilm.cli.bench import write_json

ROOT = Path(__file__).parents[1]
SETUPS = {"lean": "", "serve": "[serve]", "torch": "[torch]"}
START = ["generate", "--max-tokens", "1", "--temperature", "0", "The capital of France is"]


_UNWANTED = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")  # the first start writes Python's bytecode cache
HEADS = ("", "packages", "installed", "`pip install`", "`import infinilm`", "start to first token")


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one set-up: medians of seconds, and peaks of resident memory in bytes."""

    num_bytes: int
    num_packages: int
    install_seconds: float
    import_seconds: float
    import_bytes: int
    start_seconds: float
    start_bytes: int


def measure(extra: str, source: str, venv: Path, repeat: int) -> Figures:
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    python = str(venv / "bin" / "python")
    packages = next(venv.glob("lib/python*/site-packages"))
    before = _num_bytes(packages)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    start_time = perf_counter()
    subprocess.run([*pip, f"infinilm{extra} @ {source}"], check=True, cwd=venv)
    install_seconds = perf_counter() - start_time
    num_bytes = _num_bytes(packages) - before
    imports = [_time([python, "-c", "import infinilm"], venv) for _ in range(repeat + 1)][1:]
    starts = [_time([str(venv / "bin" / "infinilm"), *START], venv) for _ in range(repeat + 1)][1:]
    return Figures(
        num_bytes,
        len(list(packages.glob("*.dist-info"))) - 1,  # without pip
        install_seconds,
        *_summary(imports),
        *_summary(starts),
    )


def _num_bytes(folder: Path) -> int:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink() and path.suffix != ".pyc")
    return sum(path.stat().st_size for path in files)


def _time(command: Sequence[str], folder: Path) -> tuple[float, int]:
    """Seconds until the command's first output, or its end, and its peak of resident memory."""
    environment = {key: value for key, value in os.environ.items() if key not in _UNWANTED}
    start_time = perf_counter()
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as done:
        assert done.stdout is not None
        assert done.stderr is not None
        done.stdout.read(1)
        seconds = perf_counter() - start_time
        done.stdout.read()
        errors = done.stderr.read().decode(errors="replace")
        _, status, usage = os.wait4(done.pid, 0)
        done.returncode = os.waitstatus_to_exitcode(status)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with exit code {done.returncode}:\n{errors}")
    return seconds, usage.ru_maxrss * (1024 if sys.platform == "linux" else 1)


def _summary(runs: Sequence[tuple[float, int]]) -> tuple[float, int]:
    return median(seconds for seconds, _ in runs), int(median(peak for _, peak in runs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setups", nargs="*", choices=[*SETUPS, []], metavar="SETUP", help=", ".join(SETUPS))
    parser.add_argument("--wheel", type=Path, help="which is installed; the checkout if there is none")
    parser.add_argument("--repeat", type=int, default=5, help="of imports and starts")
    parser.add_argument("--json", metavar="FILE", help="- is stdout")
    options = parser.parse_args()
    source = (options.wheel or ROOT).resolve().as_uri()
    rows: list[Sequence[str]] = [HEADS, ["---"] * len(HEADS)]
    found: dict[str, Any] = {}
    for setup in options.setups or SETUPS:
        with TemporaryDirectory(prefix="infinilm-") as folder:
            figures = measure(SETUPS[setup], source, Path(folder) / "venv", options.repeat)
        found[setup] = asdict(figures)
        rows.append(
            (
                f"`infinilm{SETUPS[setup]}`",
                str(figures.num_packages),
                f"{figures.num_bytes / 1e6:,.0f} MB",
                f"{figures.install_seconds:.0f} s",
                f"{figures.import_seconds:.2f} s, {figures.import_bytes / 2**20:.0f} MiB",
                f"{figures.start_seconds:.2f} s, {figures.start_bytes / 2**20:.0f} MiB",
            )
        )
    if options.json:
        write_json(found, options.json)
    if options.json != "-":
        print("\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows))


if __name__ == "__main__":
    main()
