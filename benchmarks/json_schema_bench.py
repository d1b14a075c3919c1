"""JSONSchemaBench: which of its schemas are compiled, which are refused and why, and whether the answers fit.

The set is that of https://github.com/guidance-ai/jsonschemabench, in its folder `data`:

    python benchmarks/json_schema_bench.py jsonschemabench/data --answers 1000

Each schema is compiled as the engine does it, in a process with limits on time, memory and stack. Answers are drawn at
random among the tokens that the grammar lets through, with a liking for what closes an object, a list or a text; with
`--model-answers` they are written by the embedded model. Completed answers are validated with jsonschema.
"""

import argparse
import json
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import jsonschema
import numpy as np

from infinilm import LLM, SamplingParams, StructuredOutput
from infinilm.errors import InfinilmError
from infinilm.loading.checkpoint import open_checkpoint
from infinilm.loading.sources import resolve
from infinilm.structured.compiler import GrammarCompiler
from infinilm.text.tokenizer import Tokenizer

DRAFTS = (
    jsonschema.Draft202012Validator,
    jsonschema.Draft201909Validator,
    jsonschema.Draft7Validator,
    jsonschema.Draft6Validator,
    jsonschema.Draft4Validator,
)
VALIDATION_S = 30
NUM_RETRIES = 2

REASONS = (
    ("no value fits", r"permits no answer|Unsatisfiable|no value fits"),
    ("`uniqueItems`", r"uniqueItems"),
    ("`oneOf` whose options can't be told apart", r"oneOf"),
    ("`not` or `if` of a pattern and the like", r"refused: (not|if) "),
    ("`unevaluatedProperties`, `unevaluatedItems`", r"unevaluated"),
    ("`propertyNames` that are neither a pattern nor a list", r"propertyNames"),
    ("`minProperties`, `maxProperties` among many optional properties", r"(min|max)Properties"),
    ("`patternProperties` with names in common", r"not disjoint|are disjoint"),
    ("`pattern` with look-around, back references or other syntax", r"regex parse error|lookarounds|backreference"),
    ("a reference to itself within `allOf` or beside other keywords", r"circular references|stack level"),
    ("`$ref` to another document, or to nothing", r"points outside|points to nothing"),
    (
        "too large, or too slow to compile",
        r"too large|too big|characters|longer than|nested deeper|too many|Unable to|max is",
    ),
    ("bounds of an integer that are too large", r"integer range"),
    ("a keyword with a value of a wrong type", r"must be"),
)
CRASHES = r"^Error:|PanicException|refused: \w+Error:|more memory or a deeper stack"


@dataclass
class Found:
    """The results of compiling the schemas."""

    compiled: list[Path] = field(default_factory=list)
    refused: dict[str, list[Path]] = field(default_factory=dict)
    crashed: list[tuple[Path, str]] = field(default_factory=list)
    other_drafts: list[Path] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def num_supported(self) -> int:
        return len(self.compiled) + sum(map(len, self.refused.values())) + len(self.crashed)


def reason_of(message: str) -> str:
    """The row of the table that counts a refusal."""
    return next((name for name, pattern in REASONS if re.search(pattern, message)), "other: " + message[:100])


def compile_all(compiler: GrammarCompiler, files: list[Path], log: TextIO | None) -> Found:
    found = Found()
    for path in files:
        start = time.perf_counter()
        message = refusal(compiler, path)
        for _ in range(NUM_RETRIES):  # the limit is in wall-clock time, and the machine may be busy
            if message is not None and "longer than" in message:
                message = refusal(compiler, path)
        found.seconds.append(time.perf_counter() - start)
        if message is None:
            found.compiled.append(path)
            continue
        if log is not None:
            print(json.dumps([str(path), message]), file=log)
        if "$schema is" in message:
            found.other_drafts.append(path)
        elif re.search(CRASHES, message):
            found.crashed.append((path, message))
        else:
            found.refused.setdefault(reason_of(message), []).append(path)
    return found


def refusal(compiler: GrammarCompiler, path: Path) -> str | None:
    try:
        compiler.compile(StructuredOutput(json_schema=path.read_text()))
    except InfinilmError as error:
        return str(error)
    except Exception as error:
        return f"Error: {error!r}"
    return None


class RandomWriter:
    """Writes answers by drawing tokens at random."""

    def __init__(self, tokenizer: Tokenizer, compiler: GrammarCompiler, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._compiler = compiler
        self._max_tokens = max_tokens
        self._vocab_size = tokenizer.vocab_size
        tokens = [tokenizer.token_bytes(token_id) for token_id in range(self._vocab_size)]
        self._liking = np.array([_liking(token) for token in tokens], np.float32) * 6
        assert tokenizer.eos_token_id is not None
        self._end = tokenizer.eos_token_id
        self._liking[self._end] = 20
        self._draws = np.random.default_rng(0)

    def write(self, schema: str) -> str | None:
        """One answer, or None if it does not end."""
        matcher = self._compiler.compile(StructuredOutput(json_schema=schema)).matcher([], [self._end], 0)
        mask = np.zeros(-(-self._vocab_size // 32), np.int32)
        drawn: list[int] = []
        for _ in range(self._max_tokens):
            matcher.fill(mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: self._vocab_size])
            scores = self._draws.gumbel(size=len(allowed)) + self._liking[allowed]
            token_id = int(allowed[int(scores.argmax())])
            if token_id == self._end:
                return self._tokenizer.decode(drawn)
            drawn.append(token_id)
            matcher.advance(token_id)
        return None


def _liking(token: bytes) -> float:
    if set(token) & set(b"[{"):
        return -1.0
    return 1.0 if set(token) & set(b'"]}') else 0.0


def model_answers(files: list[Path], max_tokens: int) -> Iterator[tuple[Path, str | None]]:
    """Answers of the embedded model."""
    with LLM() as llm:
        for start in range(0, len(files), 16):
            batch = files[start : start + 16]
            params = [
                SamplingParams(
                    structured=StructuredOutput(json_schema=path.read_text()), max_tokens=max_tokens, temperature=1.0
                )
                for path in batch
            ]
            prompts = ["Write a JSON document as an example.\n"] * len(batch)
            for path, output in zip(batch, llm.generate(prompts, params), strict=True):
                answer = output.outputs[0]
                yield path, answer.text if answer.finish_reason == "stop" else None


def random_answers(writer: RandomWriter, files: list[Path]) -> Iterator[tuple[Path, str | None]]:
    for path in files:
        try:
            yield path, writer.write(path.read_text())
        except InfinilmError as error:
            print(f"{path}: {error}", file=sys.stderr)
            yield path, None


def validator_of(schema: Any) -> Any:
    """The validator of the draft that a schema names, or else of the latest draft whose rules the schema keeps."""
    if "$schema" in schema:
        kind = jsonschema.validators.validator_for(schema)
    else:
        kind = next((each for each in DRAFTS if is_schema(each, schema)), DRAFTS[0])
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


def is_schema(kind: Any, schema: Any) -> bool:
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError:
        return False
    return True


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def end(_signum: int, _frame: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def validate_all(answers: Iterator[tuple[Path, str | None]]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for path, text in answers:
        if text is None:
            counts["not completed"] += 1
            continue
        try:
            with time_limit(VALIDATION_S):
                errors = list(validator_of(json.loads(path.read_text())).iter_errors(json.loads(text)))
        except Exception as error:
            counts["could not be validated"] += 1
            print(f"{path}: {error!r}: {text[:500]}", file=sys.stderr)
            continue
        counts["invalid" if errors else "valid"] += 1
        if errors:
            print(f"{path}: {errors[0].message[:300]} at {errors[0].json_path}: {text[:500]}", file=sys.stderr)
    return counts


def table(found: Found) -> str:
    total = found.num_supported
    rows = sorted(found.refused.items(), key=lambda row: -len(row[1]))
    named = [("compiled", len(found.compiled)), *((f"refused: {name}", len(paths)) for name, paths in rows)]
    named.append(("crashed", len(found.crashed)))
    lines = ["| | schemas | share |", "|---|---:|---:|"]
    lines += [f"| {name} | {count} | {count / total:.2%} |" for name, count in named]
    lines += [f"| all of the supported drafts | {total} | |", f"| other drafts | {len(found.other_drafts)} | |"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder with the set, JSON files in folders")
    parser.add_argument("--answers", type=int, default=0, metavar="N", help="draw and validate so many answers")
    parser.add_argument("--model-answers", type=int, default=0, metavar="N", help="the same with the embedded model")
    parser.add_argument("--max-tokens", type=int, default=800, help="of an answer")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="take only each N-th schema")
    parser.add_argument("--log", type=argparse.FileType("w"), default=None, help="write each refusal to this file")
    arguments = parser.parse_args()
    files = sorted(arguments.folder.rglob("*.json"))[:: arguments.every]
    if not files:
        parser.error(f"{arguments.folder} has no JSON files")
    checkpoint = open_checkpoint(resolve(None))
    tokenizer = checkpoint.tokenizer()
    checkpoint.close()
    assert tokenizer is not None
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    compiler.prepare()
    found = compile_all(compiler, files, arguments.log)
    print(table(found))
    seconds = sorted(found.seconds)
    print(
        f"\nSeconds for one: median {seconds[len(seconds) // 2]:.3f}, "
        f"99 of 100 within {seconds[len(seconds) * 99 // 100]:.2f}, at most {seconds[-1]:.2f}"
    )
    for path, message in found.crashed:
        print(f"crashed: {path}: {message[:200]}")
    sample = random.Random(0)
    for count, name in ((arguments.answers, "Drawn at random"), (arguments.model_answers, "By the model")):
        if count:
            chosen = sample.choices(found.compiled, k=count)
            writer = RandomWriter(tokenizer, compiler, arguments.max_tokens)
            answers = (
                random_answers(writer, chosen)
                if count == arguments.answers and name == "Drawn at random"
                else model_answers(chosen, arguments.max_tokens)
            )
            counts = validate_all(answers)
            print(f"\n{name}, {count} answers: " + ", ".join(f"{n} {what}" for what, n in counts.most_common()))
    compiler.close()


if __name__ == "__main__":
    main()
