"""Code that the scripts for GPUs share: the workloads, running them, tables."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

from infinilm import LLM, RequestOutput, SamplingParams


@dataclass(frozen=True, slots=True)
class Work:
    """Prompts of token ids, and the number of tokens to generate for each."""

    prompts: list[list[int]]
    output_lens: list[int]
    shared_len: int = 0
    """The length of the beginning that all prompts share."""

    @property
    def params(self) -> list[SamplingParams]:
        """Answers are drawn at temperature 0.6 and have their full length."""
        return [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length) for length in self.output_lens]

    def within(self, vocab_size: int) -> "Work":
        """The same work with token ids below `vocab_size`."""
        prompts = [[token % vocab_size for token in prompt] for prompt in self.prompts]
        return Work(prompts, self.output_lens, self.shared_len)


def nano(scale: float = 1.0, seed: int = 0) -> Work:
    """256 prompts of 100 to 1,024 tokens, answers of 100 to 1,024."""
    random, low, high = Random(seed), scaled(100, scale), scaled(1024, scale)
    prompts = []
    for _ in range(scaled(256, scale)):
        length = random.randint(low, high)
        prompts.append([random.randint(0, 10000) for _ in range(length)])
    return Work(prompts, [random.randint(low, high) for _ in prompts])


def single(scale: float = 1.0, seed: int = 1) -> Work:
    """One stream: 128 tokens in, 256 out."""
    return Work([tokens(Random(seed), scaled(128, scale))], [scaled(256, scale)])


def prefix(scale: float = 1.0, seed: int = 2) -> Work:
    """256 prompts of 64 tokens after a shared beginning of 1,024 tokens, 64 out."""
    random = Random(seed)
    common = tokens(random, scaled(1024, scale))
    prompts = [common + tokens(random, scaled(64, scale)) for _ in range(scaled(256, scale))]
    return Work(prompts, [scaled(64, scale)] * len(prompts), len(common))


def long(scale: float = 1.0, seed: int = 3) -> Work:
    """Eight prompts of 16,000 tokens, 32 out."""
    random = Random(seed)
    prompts = [tokens(random, scaled(16000, scale)) for _ in range(8)]
    return Work(prompts, [scaled(32, scale)] * len(prompts))


WORKLOADS: dict[str, Callable[..., Work]] = {"single": single, "nano": nano, "prefix": prefix, "long": long}
"""The default seed gives the prompts on which every engine is timed, another seed as much work on other prompts."""


def scaled(number: int, scale: float) -> int:
    """A share of a number, at least 2, because the prompt's own step draws one token."""
    return max(2, round(number * scale))


def tokens(random: Random, count: int) -> list[int]:
    """Random token ids."""
    return [random.randint(3, 10000) for _ in range(count)]


def timed_generate(llm: LLM, work: Work) -> tuple[float, list[RequestOutput]]:
    """Run a workload. Returns the seconds that it took, and its outputs."""
    params = work.params
    start_time = perf_counter()
    outputs = llm.generate(work.prompts, params, use_tqdm=False)
    seconds = perf_counter() - start_time
    if errors := [output.error for output in outputs if output.error]:
        raise RuntimeError(f"{len(errors)} requests failed, the first with: {errors[0]}")
    return seconds, outputs


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print columns as wide as their content. The first holds names, aligned left; the others hold figures."""
    lines = [tuple(header), *map(tuple, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for name, *figures in lines:
        cells = [figure.rjust(width) for figure, width in zip(figures, widths[1:], strict=True)]
        print("  ".join((name.ljust(widths[0]), *cells)).rstrip())


def write_json(path: str | None, report: dict[str, Any]) -> None:
    """Write a report, if there is a path."""
    if path is not None:
        Path(path).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
