"""How near the next-token distributions of quantised computation are to the dense float32 model's.

    python benchmarks/cpu_accuracy.py [MODEL.gguf] [--threads N] [--max-len 512] [--quick] [--json FILE]

The reference is `LLM(dtype="float32")`, which computes with the file's dequantised weights and matches transformers
(`infinilm verify`). Three engines are compared with it on the same token ids: this engine with its defaults, which
multiplies packed weights; the same with `activation_bits=8`; and llama.cpp. All read the texts twice: as prompts, many
tokens at a time, and one token at a time, as decoding does, because engines may compute the two in different ways. The
columns:

- `mean KL`, with its standard error, and `max`: the Kullback-Leibler divergence of the whole vocabulary's distribution
  from the reference's, in nats, computed in float64.
- `perplexity` of the texts, and how far it is from the reference's.
- `same top`: positions at which the most likely token is the reference's.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from benchmarks.cpu_texts import read_texts
from benchmarks.distance import Distance, Floats, Ours
from benchmarks.peers import LLAMA_CPP, OURS
from benchmarks.peers.engine_process import EngineProcess
from benchmarks.peers.llamacpp import LlamaCpp
from benchmarks.peers.side_by_side import count_cores
from infinilm import LLM
from infinilm.bench.measure import Workload, describe_machine
from infinilm.cli.bench import write_json
from infinilm.cli.display import console, make_table
from infinilm.loading.sources import resolve

ROWS = {"prefill": 512, "decode": 1}
"""Tokens computed at a time."""


class Engine(Protocol):
    """An engine that returns the logits of a text."""

    def logits(self, token_ids: Sequence[int], rows: int) -> Floats:
        """The logits of each next token: `[tokens, vocab]`. `rows` tokens are computed at a time."""
        ...


def compare(
    texts: dict[str, list[int]], exact: Engine, engines: dict[str, Engine]
) -> tuple[Distance, dict[str, Distance]]:
    """Read every text with every engine, as a prompt and token by token.

    Returns the reference compared with itself, and the engines compared with the reference.
    """
    reference = Distance()
    found = {f"{name} {way}": Distance() for name in engines for way in ROWS}
    for text, token_ids in texts.items():
        start_time = perf_counter()
        following = np.array(token_ids[1:])
        expected = exact.logits(token_ids[:-1], ROWS["prefill"])
        reference.add(expected, expected, following)
        for name, engine in engines.items():
            for way, rows in ROWS.items():
                found[f"{name} {way}"].add(expected, engine.logits(token_ids[:-1], rows), following)
        print(f"{text}: {len(following)} positions, {perf_counter() - start_time:.1f} s", flush=True)
    return reference, found


def main(args: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", help="a .gguf file; the embedded model by default")
    parser.add_argument("--threads", type=int, default=count_cores())
    parser.add_argument("--max-len", type=int, default=512, help="tokens of each text at most")
    parser.add_argument("--quick", action="store_true", help="64 tokens of each text at most")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(args)
    path = resolve(options.model)
    check_llamacpp(path, options.threads)

    import torch

    torch.set_num_threads(options.threads)
    max_len = 64 if options.quick else options.max_len
    settings = {"device": "cpu", "max_model_len": max_len, "max_num_seqs": 1}
    with (
        LLM(path, dtype="float32", **settings) as exact,
        LLM(path, **settings) as packed,
        LLM(path, activation_bits=8, **settings) as short,
    ):
        texts = read_texts(exact, max_len)
        peer = LlamaCpp(path, num_threads=options.threads)
        engines: dict[str, Engine] = {OURS: Ours(packed), f"{OURS}, 8 bits": Ours(short), LLAMA_CPP: peer}
        reference, found = compare(texts, Ours(exact), engines)
    report = {
        "model": path.name,
        "machine": describe_machine(),
        LLAMA_CPP: peer.version,
        "num_positions": len(reference.divergences),
        "perplexity": reference.perplexity,
        "engines": {name: distance.summary(reference) for name, distance in found.items()},
    }
    show(report)
    if options.json is not None:
        write_json(report, options.json)


def check_llamacpp(path: Path, num_threads: int) -> None:
    """Try llama.cpp in a separate process, which may die if it was built for another CPU. The error says so then."""
    work = Workload("try", num_prompts=1, input_len=8, output_len=2)
    with EngineProcess(LLAMA_CPP, {"model": str(path)}, num_threads) as process:
        process.run(work, work.prompts(process.vocab_size, repeat=0))


def show(report: dict[str, Any]) -> None:
    """Print the figures as a table."""
    print(f"\n{report['model']}: {report['num_positions']:,} positions, against float32 by {OURS}\n")
    table = make_table("", "mean KL", "error", "max", "perplexity", "change", "same top")
    table.add_row("float32", "", "", "", f"{report['perplexity']:.3f}", "", "")
    for name, figures in report["engines"].items():
        table.add_row(
            name,
            f"{figures['mean_kl']:.2e}",
            f"{figures['mean_kl_error']:.0e}",
            f"{figures['max_kl']:.0e}",
            f"{figures['perplexity']:.3f}",
            f"{figures['perplexity_change']:+.3%}",
            f"{figures['same_top']:.2%}",
        )
    console().print(table)


if __name__ == "__main__":
    main()
