"""The benchmark of JSON schemas: what it counts as what."""

import json
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from infinilm.structured.compiler import GrammarCompiler
from infinilm.text.tokenizer import Tokenizer

BENCH = Path(__file__).parents[2] / "benchmarks"
SCHEMAS = {
    "point": {"type": "object", "properties": {"x": {"type": "boolean"}}, "additionalProperties": False},
    "old": {"$schema": "http://json-schema.org/draft-03/schema#", "type": "string"},
    "set": {"type": "array", "uniqueItems": True},
    "empty": {"type": "string", "minLength": 3, "maxLength": 2},
}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCH)
    return import_module("json_schema_bench")


def test_each_schema_is_counted_once(bench: ModuleType, tiny_dir: Path, tmp_path: Path) -> None:
    for name, schema in SCHEMAS.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(schema))
    (tmp_path / "broken.json").write_text("{")
    tokenizer = Tokenizer.from_directory(tiny_dir)
    assert tokenizer is not None
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    found = bench.compile_all(compiler, sorted(tmp_path.glob("*.json")), None)
    assert [path.stem for path in found.compiled] == ["point"]
    assert [path.stem for path in found.other_drafts] == ["old"]
    reasons = {path.stem: reason for reason, paths in found.refused.items() for path in paths}
    assert reasons["set"] == "`uniqueItems`"
    assert reasons["empty"] == "no value fits"
    assert set(reasons) == {"set", "empty", "broken"}
    assert found.crashed == []
    assert found.num_supported == 4
    assert "| compiled | 1 | 25.00% |" in bench.table(found)
    answers = list(bench.random_answers(bench.RandomWriter(tokenizer, compiler, 100), found.compiled * 3))
    assert bench.validate_all(iter(answers)).keys() <= {"valid", "not completed"}
    compiler.close()


def test_answers_are_validated_by_the_draft_of_the_schema(bench: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "number.json"
    path.write_text(json.dumps({"minimum": 3, "exclusiveMinimum": True}))  # as draft 4 has it
    answers = [(path, text) for text in ("3", "4", "nothing", None)]
    assert bench.validate_all(iter(answers)) == {
        "invalid": 1,
        "valid": 1,
        "could not be validated": 1,
        "not completed": 1,
    }


@pytest.mark.parametrize("message", ["Error: KeyError('x')", "structured: this json_schema is refused: TypeError: x"])
def test_our_own_errors_are_crashes(bench: ModuleType, message: str) -> None:
    assert bench.re.search(bench.CRASHES, message)
    assert not bench.re.search(bench.CRASHES, "structured: this json_schema is refused: Parser Error: x")
