"""Forms that are meant to hurt are refused in time, or do no harm; and the next request is served."""

import json
import os
import time
from typing import Any

import pytest
from narrow import present
from processes import children, eventually

from infinilm.errors import InvalidTypeError, InvalidValueError
from infinilm.structured.grammar_sandbox import MAX_PROCESSES
from infinilm.structured_output import MAX_SCHEMA_DEPTH, StructuredOutput

PATIENCE_S = 10.0
"""Two seconds are what it may take; the machine may be busy with other things."""


def nested(depth: int, inner: Any, wrap: Any) -> Any:
    for _ in range(depth):
        inner = wrap(inner)
    return inner


def chain(links: int, rule: str, last: str, name: str = "a") -> str:
    """A Lark grammar whose rules each use the next one, `{}` in the template."""
    rules = "".join(f"{name}{i}: {rule.replace('{}', f'{name}{i + 1}')}\n" for i in range(links))
    return f"start: {name}0\n{rules}{name}{links}: {last}\n"


def doubling(levels: int, last: Any, wrap: Any) -> dict[str, Any]:
    """A schema whose definitions each use the next one twice."""
    definitions = {f"d{i}": wrap({"$ref": f"#/$defs/d{i + 1}"}) for i in range(levels)}
    return {"$defs": {**definitions, f"d{levels}": last}, "$ref": "#/$defs/d0"}


REFUSED_SCHEMAS: dict[str, Any] = {
    "10 MB": {"properties": {f"p{i}": {"description": "x" * 100} for i in range(80_000)}},
    "10 MB of text": json.dumps({"const": "x" * 10_000_000}),
    "depth 10000": nested(10_000, {}, lambda inner: {"items": inner}),
    "depth 10000 as text": '{"items":' * 10_000 + "{}" + "}" * 10_000,
    "depth 10000 of lists": '{"enum":' + "[" * 10_000 + "]" * 10_000 + "}",
    "depth 10000 not closed": '{"items":' * 10_000,
    "shared to the power": nested(60, {}, lambda inner: {"anyOf": [inner, inner]}),
    "enum of 100000": {"enum": [f"value {i * 7919 % 100_003}" for i in range(100_000)]},
    "properties 5000": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}},
    "reference to itself": {"$ref": "#"},
    "reference loop": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "allOf loop": {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "object"}]}}, "$ref": "#/$defs/a"},
    "allOf cross product": {
        "allOf": [
            {"anyOf": [{"properties": {f"p{i}": {"const": j}}, "required": [f"p{i}"]} for j in range(10)]}
            for i in range(10)
        ]
    },
    "allOf of oneOf": {
        "allOf": [
            {"oneOf": [{"properties": {f"p{i}": {"const": j}}, "required": [f"p{i}"]} for j in range(3)]}
            for i in range(14)
        ]
    },
    "allOf of patterns": {"type": "string", "allOf": [{"pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(5, 25)]},
    "patternProperties that overlap": {"patternProperties": {f"^a.*{i}$": {"maxLength": i} for i in range(1000)}},
    "patternProperties 1000": {"patternProperties": {f"^p{i}x.*$": {"maxLength": i} for i in range(1000)}},
    "oneOf that backtracks": {"oneOf": [{"enum": ["a" * 60 + "!"]}, {"type": "string", "pattern": "^(a+)+$"}]},
    "oneOf of patterns": {"oneOf": [{"type": "string", "pattern": f"a.*{i}"} for i in range(100)]},
    "oneOf of itself": {"$defs": {"a": {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
    "not of itself": {"$defs": {"a": {"not": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"},
    "maxProperties among many": {
        "properties": {f"p{i}": {} for i in range(200)},
        "minProperties": 90,
        "maxProperties": 100,
    },
    "const of 1 MB": {"const": "x" * 1_000_000},
    "multipleOf": {"type": "integer", "multipleOf": 1_000_000_007, "minimum": 0, "maximum": 10**30},
    "http": {"$ref": "http://127.0.0.1:9/schema.json"},
    "https": {"$ref": "https://example.com/schema.json#/$defs/a"},
    "file": {"$ref": "file:///etc/hostname"},
    "other file": {"$ref": "other.json#/a"},
    "foreign dialect": {"$schema": "http://127.0.0.1:9/dialect", "type": "string"},
    "dangling": {"$ref": "#/$defs/missing"},
    "not JSON": '{"type": "object"',
    "NaN": '{"minimum": NaN}',
    "a list": "[1, 2]",
    "a number": "3",
    "False": False,
    "false as text": "false",
    "unknown type": {"type": "strange"},
    "not a pattern": {"type": "string", "not": {"pattern": "ab"}},
    "maxContains": {"type": "array", "contains": {"type": "string"}, "maxContains": 2},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "oneOf that overlaps": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "nothing fits": {"type": "string", "minLength": 5, "maxLength": 2},
    "lone surrogate": '{"const": "\\ud800"}',
    "x-guidance": {"x-guidance": {"item_separator": ";"}, "type": "array"},
    "a set": {"enum": {1, 2}},
}

REFUSED_REGEXES = {
    "counted counts": "(a{1,1000}){1,1000}",
    "deep counts": "((((a{1,100}){1,100}){1,100}){1,100}){1,100}",
    "huge count": "a{4294967295}",
    "many optional": "a?" * 500 + "a" * 500,
    "deep": "(" * 8000 + "a" + ")" * 8000,
    "100 kB": "ab|" * 35_000,
    "unclosed": "(",
    "bad range": "[z-a]",
    "look-ahead": "(?=a)b",
    "back reference": r"(a)\1",
    "nothing matches": r"[^\s\S]",
    "ends with a backslash": "a\\",
    "lone surrogate": "\ud800",
}

REFUSED_GRAMMARS = {
    "only itself": "start: start",
    "never ends": 'start: "a" start',
    "doubling rules": chain(40, "{} {}", '"x"'),
    "doubling terminals": chain(40, "{} {}", '"x"', name="A"),
    "long chain of rules": chain(10_000, '"x" {} | "y"', '"z"'),
    "long chain of terminals": chain(10_000, '"x" {} | "y"', '"z"', name="A"),
    "many alternatives": "start: " + " | ".join(f'"w{i}"' for i in range(20_000)),
    "huge count": 'start: a{1000000}\na: "x"',
    "deep parentheses": "start: " + "(" * 5000 + '"a"' + ")" * 5000,
    "deep negation": "start: A\nA: " + "~(" * 200 + "/a*b/" + ")" * 200,
    "permutations": 'start: p::0\np::_: "" %if is_ones([0:20])\n'
    + "".join(f'  | "{chr(97 + i)}" p::set_bit({i}) %if bit_clear({i})\n' for i in range(20)),
    "deep schema": "start: %json " + '{"type":"array","items":' * 2000 + "{}" + "}" * 2000,
    "terminal in itself": 'start: A\nA: "x" A | "y"',
    "file": "%import .secret.X\nstart: X",
    "unknown rule": "start: other",
    "no start": 'other: "a"',
    "not closed": 'start: "',
    "empty": "",
    "many bytes": 'start: "' + "a" * 300_000 + '"',
    "as JSON": '{"grammars": [{"lark_grammar": "start: \\"a\\""}]}',
    "temperature": "start: text\ntext[temperature=0.5]: /[a-z]+/",
    "unknown special token": "start: <|no_such_token|>",
}

REFUSED = [
    *(("json_schema", name, value) for name, value in REFUSED_SCHEMAS.items()),
    *(("regex", name, value) for name, value in REFUSED_REGEXES.items()),
    *(("grammar", name, value) for name, value in REFUSED_GRAMMARS.items()),
    ("choice", "100000", [f"choice {i}" for i in range(100_000)]),
    ("choice", "long", ["x" * 1_000_000]),
    ("choice", "long together", ["x" * 1000] * 1000),
    ("choice", "none", []),
    ("choice", "not texts", ["a", 3]),
    ("choice", "a text", "abc"),
]


@pytest.mark.parametrize(("field", "name", "value"), REFUSED, ids=[f"{field}-{name}" for field, name, _ in REFUSED])
def test_refused_in_time(field, name, value, real):
    start = time.monotonic()
    with pytest.raises((InvalidValueError, InvalidTypeError)) as caught:
        real.compiler.compile(StructuredOutput(**{field: value}))
    assert time.monotonic() - start < PATIENCE_S
    message = str(caught.value)
    assert field in message
    assert 20 < len(message) < 700
    assert "\n" not in message
    assert "backtrace" not in message
    assert real.texts({"choice": ["served"]}) == ["served"] * 4


HARMLESS = [
    ("json_schema", {"type": "array", "items": {"type": "string"}, "minItems": 10**18}),
    ("json_schema", {"type": "string", "minLength": 5 * 10**8, "maxLength": 10**9}),
    ("json_schema", {"type": "object", "minProperties": 10**6, "additionalProperties": {"type": "string"}}),
    ("json_schema", nested(8, {"type": "string"}, lambda inner: {"type": "array", "items": inner, "minItems": 100})),
    ("json_schema", nested(MAX_SCHEMA_DEPTH // 2, {}, lambda inner: {"type": "array", "prefixItems": [inner]})),
    ("json_schema", nested(13, {"type": "string"}, lambda inner: {"anyOf": [inner, inner]})),
    (
        "json_schema",
        nested(12, {"type": "string"}, lambda inner: {"oneOf": [inner, {"type": "array", "items": inner}]}),
    ),
    ("json_schema", nested(40, {"type": "string"}, lambda inner: {"not": {"not": inner}})),
    ("json_schema", {"oneOf": [{"required": [f"p{i}"]} for i in range(100)]}),
    ("json_schema", {"oneOf": [{"properties": {f"p{i}": {"const": i}}} for i in range(60)]}),
    ("json_schema", {"dependencies": {f"p{i}": [f"p{i + 1}", f"p{i + 2}"] for i in range(200)}}),
    (
        "json_schema",
        {"allOf": [{"if": {"required": [f"p{i}"]}, "then": {"required": [f"q{i}"]}} for i in range(100)]},
    ),
    ("json_schema", {"properties": {f"p{i}": {} for i in range(60)}, "minProperties": 30}),
    ("json_schema", {"not": {"enum": ["x" * i for i in range(300)]}}),
    ("json_schema", doubling(30, {"type": "string"}, lambda next: {"anyOf": [next, next]})),
    ("json_schema", doubling(30, {"type": "string"}, lambda next: {"oneOf": [next, next]})),
    ("json_schema", doubling(30, {"type": "string"}, lambda next: {"not": {"allOf": [next, next]}})),
    ("json_schema", doubling(30, {"type": "object"}, lambda next: {"allOf": [next, next]})),
    (
        "json_schema",
        doubling(30, {"type": "string"}, lambda next: {"type": "object", "properties": {"l": next, "r": next}}),
    ),
    ("json_schema", {"type": "object", "patternProperties": {"(a|b)*a(a|b){25}$": {}}}),
    ("json_schema", {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}),
    ("json_schema", {"enum": [f"{i * 7919 % 100_003} value" for i in range(10_000)]}),
    ("regex", "(a|b)*a(a|b){30}"),
    ("regex", "(.*a.{500}){5}"),
    ("regex", "(a+)+b"),
    ("regex", "(a|a|aa|aaa)*" * 50),
    ("regex", r"(\p{L}{1,1000}\s){1,1000}"),
    ("regex", r".{1,10000000}"),
    ("grammar", 'start: s\ns: s s | s s s | "a" | ""'),
    ("grammar", "start: s\ns: s s s s s s | A |\nA: /[a-z]/"),
    ("grammar", 'start: a{1,1000}\na: b{1,1000}\nb: c{1,1000}\nc: "x" | "y"'),
    ("grammar", "start: " + " ".join(f"a{i}" for i in range(300)) + "".join(f'\na{i}: "{i}" |' for i in range(300))),
    ("grammar", 'start: A\nA: %regex { "substring_chars": "' + "abcdefghij" * 6000 + '" }'),
    ("grammar", 'start: a\na: b |\nb: c |\nc: a | "x"'),
    ("grammar", "start: A\nA: ~/(a|b)*a(a|b){20}/ & ~/(a|b)*b(a|b){20}/ & /(?s:.*)/"),
    ("grammar", "start: (" + " | ".join(f"/(a|b)*a(a|b){{{i}}}c/" for i in range(40)) + ")*"),
    ("grammar", 'start: "a" start | "b"\n%ignore /(a|b)*a(a|b){25}/'),
]


@pytest.mark.parametrize(("field", "value"), HARMLESS, ids=[f"{field}-{str(value)[:30]}" for field, value in HARMLESS])
def test_refused_or_followed_at_a_bearable_pace(field, value, real):
    """Some look dangerous and are not; others are found out at work, and then fail alone."""
    start = time.process_time()
    errors: list[Exception | None] = []
    try:
        errors += [answer.error for answer in real.answers({field: value}, seeds=3, max_tokens=120)]
    except InvalidValueError as refusal:
        errors.append(refusal)
    assert all(error is None or field in str(error) for error in errors)
    # Three answers share half a second, and what each token may take anyway.
    assert time.process_time() - start < PATIENCE_S
    assert real.texts({"choice": ["served"]}) == ["served"] * 4


def test_processes_are_few_and_end_with_the_compiler(tiny_dir):
    from concurrent.futures import ThreadPoolExecutor

    from structured.structured_helpers import Source

    from infinilm.text.tokenizer import Tokenizer

    before = set(children(os.getpid()))
    source = Source.of(present(Tokenizer.from_directory(tiny_dir)))

    def refusal(number: int) -> str:
        bomb = {"patternProperties": {f"^p{number}{i}x.*$": {"maxLength": i} for i in range(1000)}}
        with pytest.raises(InvalidValueError) as caught:
            source.compiler.compile(StructuredOutput(json_schema=bomb))
        return str(caught.value)

    with ThreadPoolExecutor(8) as pool:
        assert all("longer than" in message for message in pool.map(refusal, range(8)))
        assert len(set(children(os.getpid())) - before) <= MAX_PROCESSES
        list(pool.map(lambda n: source.compiler.compile(StructuredOutput(regex=f"a{n}")), range(8)))
    assert 0 < len(set(children(os.getpid())) - before) <= MAX_PROCESSES
    source.compiler.close()
    assert eventually(lambda: set(children(os.getpid())) <= before)
    # Closed is not broken: it starts anew.
    assert source.texts({"regex": "ab"})[0] == "ab"
    source.compiler.close()
    assert eventually(lambda: set(children(os.getpid())) <= before)


def test_a_process_that_is_gone_is_replaced(tiny):
    tiny.compiler.compile(StructuredOutput(regex="first"))
    for process in tiny.compiler._tools.trials._idle:
        process._process.kill()
        process._process.wait()
    assert tiny.texts({"regex": "second"})[0] == "second"


def test_one_pause_of_the_machine_ends_no_answer_and_slow_tokens_do(real):
    grammar = real.compiler.compile(StructuredOutput(choice=["served"]))
    grammar.spend(60)
    grammar.spend(0.001)
    grammar.spend(60)
    with pytest.raises(InvalidValueError, match="choice: following it takes too long"):
        grammar.spend(60)
