"""Kills `infinilm batch` at random moments until it has been killed often enough, and checks what it wrote.

    python -m benchmarks.batch_kills --rows 2000 --kills 20            # on this machine alone
    python -m benchmarks.batch_kills --rows 2000 --kills 20 --cluster  # on Ray, with two engines

Each job is killed with SIGKILL and started again, until it ends. Only the command itself is killed; the engine and Ray
have to notice. A third of the kills happen while the job starts, the others after it has answered some more rows. The
output is compared with that of an uninterrupted job: it has every row once, in order, with equal greedy answers. With
`--cluster`, one cluster of this machine runs all the time, and jobs connect to it.

The script needs a checkout: the model is one of the tiny random checkpoints of the tests.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EMPTY_S = 20.0
"""The time for processes to end after the last job."""


def make_model(directory: Path) -> Path:
    sys.path.insert(0, str(ROOT / "tests"))
    from checkpoints import make_reference, save
    from tiny_tokenizer import save_tokenizer

    save(make_reference("llama-gqa", vocab_size=300, eos_token_id=1, bos_token_id=0), directory)
    save_tokenizer(directory)
    return directory


def write_rows(path: Path, num_rows: int) -> Path:
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_rows):
            row: Any = {"custom_id": f"id-{number}", "prompt": f"row {number} says", "max_tokens": 8 + number % 32}
            if number % 3 == 1:
                row = {"messages": [{"role": "user", "content": f"what is {number}?"}], "max_tokens": 8 + number % 32}
            file.write("this line is no request\n" if number % 97 == 96 else json.dumps(row) + "\n")
    return path


class Jobs:
    def __init__(self, folder: Path, rows: int, is_cluster: bool) -> None:
        self.folder = folder
        self.is_cluster = is_cluster
        self.model = make_model(folder / "tiny")
        self.input = write_rows(folder / "in.jsonl", rows)

    def start(self, output: Path) -> subprocess.Popen[bytes]:
        options = ["--temperature", "0", "--num-kvcache-blocks", "512", "--max-num-seqs", "64"]
        options += ["--cluster", "--engines", "2"] if self.is_cluster else []
        command = [sys.executable, "-m", "infinilm", "batch", str(self.input), str(output)]
        command += ["--model", str(self.model), *options]
        log = (self.folder / "log").open("ab")
        return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def read(self, output: Path) -> list[dict[str, Any]]:
        """The answers without ids, times and prefix cache hits, which depend on chance."""
        files = sorted(output.glob("part-*.jsonl")) if self.is_cluster else [output]
        answers = [json.loads(line) for file in files for line in file.read_bytes().splitlines()]
        for answer in answers:
            if answer["response"] is not None:
                del answer["response"]["request_id"]
                body = answer["response"]["body"]
                del body["id"], body["created"], body["timings"], body["usage"]["prompt_tokens_details"]
        return answers

    def num_logged(self, output: Path) -> int:
        """Rows that are answered so far."""
        paths = [*output.with_name(f"{output.name}.progress").glob("*.log"), *output.glob("part-*.jsonl")]
        return sum(path.read_bytes().count(b"\n") for path in paths if path.exists())

    def run_unbroken(self) -> tuple[list[dict[str, Any]], float, float]:
        """Run a job without kills. Returns the answers, the seconds to the first one, and the seconds after it."""
        output = self.folder / "unbroken"
        begin = time.monotonic()
        process = self.start(output)
        while process.poll() is None and not self.num_logged(output):
            time.sleep(0.05)
        first = time.monotonic()
        if process.wait() != 0:
            raise SystemExit(f"the unbroken job failed:\n{(self.folder / 'log').read_text()[-2000:]}")
        return self.read(output), first - begin, time.monotonic() - first


def start_cluster() -> Callable[[], None]:
    """Start a cluster that jobs find. Returns a function that stops it."""
    import ray

    os.environ["OMP_NUM_THREADS"] = "1"
    context = ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    os.environ["RAY_ADDRESS"] = context.address_info["gcs_address"]
    stop: Callable[[], None] = ray.shutdown
    return stop


def processes_with(text: str) -> list[int]:
    """Processes whose command line or environment names a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in (path / "cmdline").read_bytes() + (path / "environ").read_bytes():
                found.append(int(path.name))
        except OSError:  # the process has ended, or belongs to another user
            continue
    return [pid for pid in found if pid != os.getpid()]


def run_until_killed(jobs: Jobs, output: Path, draw: random.Random, start_s: float, work_s: float) -> int | None:
    """Start a job and kill it at a random moment. Returns its exit code if it ended before."""
    num_before = jobs.num_logged(output)
    process = jobs.start(output)
    if draw.random() < 1 / 3:
        delay = draw.uniform(0, start_s)
    else:
        while process.poll() is None and jobs.num_logged(output) == num_before:
            time.sleep(0.05)
        delay = draw.uniform(0, work_s)
    try:
        return process.wait(delay)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        num_now = jobs.num_logged(output)
        print(f"killed: {num_now - num_before} more rows, {num_now} so far", flush=True)
        return None


def check(jobs: Jobs, output: Path, code: int, expected: list[dict[str, Any]]) -> None:
    if code != 0:
        raise SystemExit(f"a resumed job failed:\n{(jobs.folder / 'log').read_text()[-2000:]}")
    found = jobs.read(output)
    num_equal = sum(a == b for a, b in zip(found, expected, strict=False))
    print(f"ended: {len(found)} rows, {num_equal} equal to the unbroken job's, in order", flush=True)
    if found != expected:
        raise SystemExit("rows were lost, doubled or changed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cluster", action="store_true")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="batch-kills-") as name, ExitStack() as stack:
        os.environ["BATCH_KILLS"] = name  # marks all processes of the jobs
        jobs = Jobs(Path(name), options.rows, options.cluster)
        if options.cluster:
            stack.callback(start_cluster())
        expected, start_s, work_s = jobs.run_unbroken()
        print(
            f"unbroken: {len(expected)} rows, {start_s:.1f} s to the first answer and {work_s:.1f} s more", flush=True
        )
        num_kills = num_jobs = 0
        while num_kills < options.kills:  # a job may end before it is killed
            num_jobs += 1
            output = jobs.folder / f"killed-{num_jobs}"
            code = None
            while code is None and num_kills < options.kills:
                code = run_until_killed(jobs, output, draw, start_s, 2 * work_s / options.kills)
                num_kills += code is None
            check(jobs, output, jobs.start(output).wait() if code is None else code, expected)
        stack.close()
        deadline = time.monotonic() + EMPTY_S
        while (left := processes_with(name)) and time.monotonic() < deadline:
            time.sleep(0.2)
        print(f"{num_kills} kills, {num_jobs} jobs: no row lost, doubled or changed; {len(left)} processes left")


if __name__ == "__main__":
    main()
