"""What the cluster costs: one replica through Ray Serve against `infinilm serve` alone, same load, by turns.

    python -m benchmarks.cluster_serve [MODEL] [--turns 3] [--json FILE]

Each server runs alone on the machine while it is measured, and is started anew for each turn. `infinilm bench serve`
sends the load: one stream for the time to the first token, 32 for the throughput. The medians over the turns count.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

COMMANDS = {"alone": ("serve",), "cluster": ("cluster", "serve")}
LOADS = {"1 stream": 1, "32 streams": 32}


def start(command: tuple[str, ...], options: argparse.Namespace) -> tuple["subprocess.Popen[str]", str]:
    """A server, and its address."""
    arguments = [*([options.model] if options.model else []), "--port", "0"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    process = subprocess.Popen(
        [sys.executable, "-m", "infinilm", *command, *arguments], stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"http://[\w.:\[\]]+", line):
            return process, found[0]
    raise SystemExit(f"infinilm {' '.join(command)} has not started")


def measure(address: str, streams: int, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "run.json"
        load = ["--streams", str(streams), "--warmup", str(streams), "--seconds", str(options.seconds)]
        work = ["--input-len", str(options.input_len), "--output-len", str(options.output_len), "--temperature", "0"]
        subprocess.run(
            [
                sys.executable,
                "-m",
                "infinilm",
                "bench",
                "serve",
                "--base-url",
                address,
                *load,
                *work,
                "--json",
                str(report),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        found: dict[str, Any] = json.loads(report.read_text())["figures"]
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {load: {name: [] for name in COMMANDS} for load in LOADS}
    for turn in range(options.turns):
        for name, command in COMMANDS.items():
            process, address = start(command, options)
            try:
                for load, streams in LOADS.items():
                    runs[load][name].append(measure(address, streams, options))
                    found = runs[load][name][-1]
                    print(f"turn {turn + 1}, {name}, {load}: TTFT p50 {ttft(found):.2f} ms, {rate(found):.1f} tokens/s")
            finally:
                process.send_signal(signal.SIGINT)
                process.communicate()
    first = {name: median(map(ttft, found)) for name, found in runs["1 stream"].items()}
    many = {name: median(map(rate, found)) for name, found in runs["32 streams"].items()}
    print(f"TTFT p50 at one stream: alone {first['alone']:.2f} ms, cluster {first['cluster']:.2f} ms")
    print(f"tokens/s at 32 streams: alone {many['alone']:.1f}, cluster {many['cluster'] / many['alone']:.1%} of it")
    if options.json:
        options.json.write_text(json.dumps(runs, indent=2) + "\n")


def ttft(report: dict[str, Any]) -> float:
    """Milliseconds."""
    return float(report["ttft"]["p50"]) * 1000


def rate(report: dict[str, Any]) -> float:
    return float(report["output_per_second"])


if __name__ == "__main__":
    main()
