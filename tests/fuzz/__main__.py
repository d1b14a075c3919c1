"""`python -m fuzz --cases 5000 --seed 1`: any number of cases. The exit status is 1 if one failed."""

import argparse
import logging
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from checkpoints import ARCHITECTURES

from fuzz.cases import PATHS, Case, make_case
from fuzz.oracle import Oracle, make_checkpoint
from fuzz.runs import Lab, Report, reproduce
from fuzz.shrink import shrink

PROGRESS_INTERVAL = 500

logger = logging.getLogger("infinilm")


class Summary:
    """Counts by path."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.num_cases, self.num_failed = Counter[str](), Counter[str]()
        self.facts = {path: Counter[str]() for path in paths}
        self.features = {path: Counter[str]() for path in paths}
        self._start_time = perf_counter()

    def add(self, report: Report) -> None:
        path = report.case.path
        self.num_cases[path] += 1
        self.num_failed[path] += bool(report.problems)
        self.facts[path].update(report.facts)
        self.features[path].update(report.case.features())

    def print(self) -> None:
        seconds = perf_counter() - self._start_time
        print(f"\n{self.num_cases.total()} cases in {seconds:.1f} s, {self.num_failed.total()} failed")
        print(f"{'':24}" + "".join(f"{path:>13}" for path in self.facts))
        self._print_row("cases", self.num_cases)
        self._print_row("failed", self.num_failed)
        for title, tables in (("happened", self.facts), ("cases with", self.features)):
            print(f"{title}:")
            for name in sorted(set().union(*tables.values())):
                self._print_row(f"  {name}", {path: table[name] for path, table in tables.items()})

    def _print_row(self, name: str, counts: dict[str, int]) -> None:
        print(f"{name:24}" + "".join(f"{counts[path]:13,}" for path in self.facts))


def main() -> int:
    args = _parse()
    logger.setLevel(logging.CRITICAL)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are stopped on the way out
    summary = Summary(args.paths)
    with TemporaryDirectory() as directory:
        oracle = Oracle(
            make_checkpoint(Path(directory), args.kind),
            tolerance=args.tolerance,
            device=args.device,
            quantization=args.quantization,
        )
        with Lab(oracle) as lab:
            for number in range(args.cases):
                path, seed = args.paths[number % len(args.paths)], args.seed + number // len(args.paths)
                case = make_case(seed, path)
                if args.quantization:  # a hook would have torch compute all steps
                    case = replace(case, fault_at=None)
                report = lab.run(case)
                summary.add(report)
                if report.problems:
                    _print_failure(report, lab, is_shrunk=args.shrink)
                    if summary.num_failed.total() >= args.max_failures:
                        break
                if (number + 1) % PROGRESS_INTERVAL == 0:
                    print(f"{number + 1} cases, {summary.num_failed.total()} failed", flush=True)
    summary.print()
    return 1 if summary.num_failed.total() else 0


def _print_failure(report: Report, lab: Lab, *, is_shrunk: bool) -> None:
    case = report.case
    print(f"\nFAILED: {reproduce(case)}")
    if is_shrunk:
        case = shrink(case, lambda smaller: bool(lab.run(smaller).problems))
        report = lab.run(case)
        _print_case(case)
    for problem in report.problems[:5]:
        print(f"  {problem[:1000]}")
    sys.stdout.flush()


def _print_case(case: Case) -> None:
    print(f"  {case.engine}")
    for arrival in case.arrivals:
        spec = arrival.spec
        print(f"  {arrival.name} at {arrival.tick} by {arrival.entry}: {spec.prompt!r} {spec.settings}")
        print(f"    request_id={arrival.request_id!r} cache_salt={arrival.cache_salt!r} {arrival.callback or ''}")
    for abort in case.aborts:
        print(f"  {abort}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; each path counts on from it")
    parser.add_argument("--paths", type=_paths, default=PATHS, help=",".join(PATHS))
    parser.add_argument("--kind", default="llama-gqa", choices=ARCHITECTURES, metavar="KIND", help="of model")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--quantization", choices=("q8", "q4"), help="run engines without torch; the oracle with it")
    parser.add_argument(
        "--tolerance", type=float, default=1e-4, help="of log-probabilities; of logits that are near a tie, a tenth"
    )
    parser.add_argument("--shrink", action="store_true", help="make failing cases smaller, and show them")
    parser.add_argument("--max-failures", type=int, default=10)
    return parser.parse_args()


def _paths(text: str) -> list[str]:
    paths = text.split(",")
    if unknown := set(paths).difference(PATHS):
        raise argparse.ArgumentTypeError(f"unknown path {min(unknown)!r}; known are {', '.join(PATHS)}")
    return paths


if __name__ == "__main__":
    sys.exit(main())
