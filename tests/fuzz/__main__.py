"""`python -m fuzz --cases 5000 --seed 1`: any number of cases. The exit status is 1 if one failed."""

import argparse
import logging
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from fuzz.cases import PATHS, make_case
from fuzz.oracle import Oracle, make_checkpoint
from fuzz.runs import run_case
from fuzz.served import Servers


def main() -> int:
    args = _parse()
    logging.getLogger("infinilm").setLevel(logging.CRITICAL)
    facts, features, done, failed = Counter(), Counter(), Counter(), Counter()
    start_time = perf_counter()
    with TemporaryDirectory() as directory:
        oracle = Oracle(make_checkpoint(Path(directory)), tolerance=args.tolerance, device=args.device)
        servers = Servers(oracle.model, oracle.tokenizer)
        for number in range(args.cases):
            path = args.paths[number % len(args.paths)]
            seed = args.seed + number // len(args.paths)
            report = run_case(make_case(seed, path), oracle, servers)
            done[path] += 1
            facts += report.facts
            features.update(report.case.features())
            if report.problems:
                failed[path] += 1
                print(f"\nFAILED: --paths {path} --seed {seed} --cases 1")
                for problem in report.problems[: args.problems]:
                    print(f"  {problem[:600]}")
                if args.cases == 1:
                    for each in (report.case.engine, *report.case.arrivals, *report.case.aborts):
                        print(" ", each)
                sys.stdout.flush()
                if sum(failed.values()) >= args.max_failures:
                    break
        servers.close()
        oracle.close()
    _print(done, failed, facts, features, perf_counter() - start_time)
    return 1 if failed else 0


def _print(done, failed, facts, features, seconds) -> None:
    print(f"\n{sum(done.values())} cases in {seconds:.1f} s, {sum(failed.values())} failed")
    for path, number in done.items():
        print(f"  {path:24} {number:6} cases {failed[path]:6} failed")
    for title, counts in (("happened", facts), ("cases with", features)):
        print(f"{title}:")
        for name, number in sorted(counts.items()):
            print(f"  {name:24} {number:6}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; each path counts on from it")
    parser.add_argument("--paths", type=lambda text: text.split(","), default=PATHS, help=",".join(PATHS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="for log-probabilities, and for ties")
    parser.add_argument("--max-failures", type=int, default=10)
    parser.add_argument("--problems", type=int, default=3, help="to print of each failed case")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
