"""Schemas that the grammar library refuses as they are: what is made of them allows only what they allow."""

import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from infinilm.errors import InvalidValueError
from infinilm.structured.schema import SchemaError, supported_schema
from infinilm.structured.schema.formats import AS_THEY_ARE, PATTERNS

DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
PAIR = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}

# For each schema values that it allows and that must stay possible, and values that it refuses.
CASES: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "oneOf by required": (
        {**PAIR, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 1}],
    ),
    "oneOf of references": (
        {
            "$defs": {"a": {"type": "object", "required": ["a"]}, "b": {"type": "array"}},
            "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        },
        [{"a": 1}, []],
        [{}, 1],
    ),
    "oneOf by constants": (
        {"oneOf": [{"properties": {"k": {"const": k}}, "required": ["k"], "type": "object"} for k in ("x", "y")]},
        [{"k": "x"}, {"k": "y"}],
        [{"k": "z"}, {}],
    ),
    "oneOf of a text and some texts": (
        {"oneOf": [{"type": "string"}, {"enum": ["one", "on", ""]}]},
        ["o", "ones", "two"],
        ["one", "on", ""],
    ),
    "oneOf of patterns": (
        {"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "^b"}]},
        ["a", "bc"],
        ["c", ""],
    ),
    "oneOf of ranges": ({"oneOf": [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 3}]}, [2, 6], [4]),
    "oneOf where one holds the other": (
        {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 2}]},
        ["abc"],
        ["ab"],
    ),
    "not required": ({**PAIR, "not": {"required": ["a"]}}, [{"b": 1}, {}], [{"a": 1}]),
    "not both": ({**PAIR, "not": {"required": ["a", "b"]}}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}]),
    "not a type": ({"not": {"type": ["string", "number"]}}, [None, True, []], ["a", 1, 1.5]),
    "not some texts": ({"type": "string", "not": {"enum": ["ab", "abc", "ü"]}}, ["a", "abcd", "b"], ["ab", "abc", "ü"]),
    "not these characters alone": (
        {"type": "string", "not": {"pattern": "^[\\s\\-.]+$"}},
        ["", "a", "- a"],
        ["-", ". -"],
    ),
    "not these characters": ({"type": "string", "not": {"pattern": "[^a-c]"}}, ["", "abc"], ["d", "ad"]),
    "a property that a pattern matches too": (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "patternProperties": {"^[a-z]": {"type": "integer"}},
        },
        [{"a": 1}, {"a": 1, "b": 2}, {"0": "x"}],
        [{"a": "x"}, {"b": "x"}],
    ),
    "not one of two": ({"not": {"anyOf": [{"type": "string"}, {"type": "null"}]}}, [1], ["a", None]),
    "never": ({"type": "object", "properties": {"a": {"not": {}}}}, [{"b": 1}, {}], [{"a": 1}]),
    "if": (
        {
            "type": "object",
            "properties": {"k": {"enum": ["x", "y"]}, "v": {}},
            "required": ["k"],
            "if": {"properties": {"k": {"const": "x"}}},
            "then": {"required": ["v"]},
            "else": {"properties": {"v": False}},
        },
        [{"k": "x", "v": 1}, {"k": "y"}],
        [{"k": "x"}, {"k": "y", "v": 1}],
    ),
    "dependencies": (
        {**PAIR, "dependencies": {"a": ["b"]}, "$schema": DRAFT_7},
        [{"b": 1}, {"a": 1, "b": 1}, {}],
        [{"a": 1}],
    ),
    "dependencies on a schema": (
        {**PAIR, "dependentSchemas": {"a": {"properties": {"b": {"minimum": 5}}, "required": ["b"]}}},
        [{"b": 1}, {"a": 1, "b": 7}],
        [{"a": 1}, {"a": 1, "b": 1}],
    ),
    "contains": ({"type": "array", "contains": {"const": 1}}, [[1], [1, 2]], [[], [2]]),
    "names by pattern": ({"type": "object", "propertyNames": {"pattern": "^x"}}, [{"x1": 1}, {}], [{"y": 1}]),
    "names of a list": (
        {"type": "object", "propertyNames": {"enum": ["u", "v"]}},
        [{"u": 1}, {"u": 1, "v": 2}],
        [{"y": 1}],
    ),
    "at least one": ({**PAIR, "minProperties": 1}, [{"a": 1}, {"b": 1}, {"c": 1}], [{}]),
    "at most one": ({**PAIR, "maxProperties": 1}, [{"a": 1}, {"c": 1}, {}], [{"a": 1, "b": 1}, {"a": 1, "c": 1}]),
    "patterns with names in common": (
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "^ab$": False}},
        [{"a": 1}, {"abc": 1}],
        [{"ab": 1}, {"a": "x"}],
    ),
    "draft 4": (
        {"$schema": DRAFT_4, "minimum": 3, "exclusiveMinimum": True, "type": "integer", "const": 5, "id": "http://x/y"},
        [4, 5],
        [3],
    ),
    "what is beside a reference in draft 7": (
        {"$schema": DRAFT_7, "definitions": {"a": {"type": "string"}}, "$ref": "#/definitions/a", "minLength": 5},
        ["a"],
        [1],
    ),
    "a tuple": (
        {"type": "array", "items": [{"type": "integer"}], "additionalItems": {"type": "string"}, "$schema": DRAFT_7},
        [[1, "a"], []],
        [["a"], [1, 2]],
    ),
    "unknown format and keyword": ({"type": "string", "format": "strange", "x-order": 3, "options": {}}, ["a"], [1]),
    "reference to itself in allOf": (
        {
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {"next": {"allOf": [{"$ref": "#/$defs/node"}, {"type": "object"}]}},
                    "additionalProperties": False,
                }
            },
            "$ref": "#/$defs/node",
        },
        [{}, {"next": {"next": {}}}],
        [{"next": 1}, {"x": 1}],
    ),
    "identifiers": (
        {
            "$id": "http://x/root.json",
            "$defs": {"a": {"$id": "a.json", "type": "integer"}, "b": {"$anchor": "bee", "type": "null"}},
            "anyOf": [{"$ref": "http://x/a.json"}, {"$ref": "#bee"}],
        },
        [1, None],
        ["a"],
    ),
}


@pytest.fixture(scope="module")
def lltokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def allows(schema: dict[str, Any], value: Any, lltokenizer: LLTokenizer) -> bool:
    grammar = {"grammars": [{"json_schema": supported_schema(schema)}]}
    matcher = LLMatcher(lltokenizer, json.dumps(grammar), log_level=0)
    assert not matcher.get_error()
    tokens = lltokenizer.tokenize_str(json.dumps(value, ensure_ascii=False))
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("name", CASES)
def test_allows_what_the_schema_allows_and_nothing_else(name, lltokenizer):
    schema, allowed, refused = CASES[name]
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    for value in allowed:
        assert validator.is_valid(value), value
        assert allows(schema, value, lltokenizer), value
    for value in refused:
        assert not validator.is_valid(value), value
        assert not allows(schema, value, lltokenizer), value


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "not": {"pattern": "ab"}}, "not"),
        ({"oneOf": [{"type": "string", "pattern": "ab"}, {"type": "string", "pattern": "bc"}]}, "can't be told apart"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "can't be told apart"),
        ({"oneOf": [{"type": "string"}, {"type": "string"}]}, "no value fits exactly one"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "draft-03"),
        ({"$ref": "#/definitions/x"}, "points to nothing"),
        ({"$ref": "other.json"}, "points outside"),
        ({"type": "strange"}, "strange"),
        ({"minLength": "3"}, "minLength"),
        ({"required": True}, "required"),
        ({"items": 3}, "is not a schema"),
        ({"not": {}}, "permits no answer"),
    ],
)
def test_refuses_by_name(schema, message):
    with pytest.raises(SchemaError, match=message):
        supported_schema(schema)


@pytest.mark.parametrize("name", sorted([*PATTERNS, *AS_THEY_ARE]))
def test_formats_are_held_to(name, real):
    checker = jsonschema.FormatChecker()
    texts = real.texts({"json_schema": {"type": "string", "format": name, "maxLength": 80}}, seeds=12)
    if name in checker.checkers and name != "time":  # that of jsonschema is an older one
        for text in texts:
            checker.check(json.loads(text), name)


def test_schemas_within_a_grammar(real):
    """A tool's parameters are a schema within a grammar."""
    schema = {**PAIR, "required": ["a", "b"], "additionalProperties": False, "not": {"required": ["c"]}}
    texts = real.texts({"grammar": 'start: "<" %json ' + json.dumps(schema) + ' ">"'})
    for text in texts:
        assert text.startswith("<")
        assert set(json.loads(text[1:-1])) == {"a", "b"}


def test_a_lenient_schema_within_a_grammar_is_never_refused(real):
    schema = {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "maxItems": 3}
    lenient = {**schema, "x-guidance": {"lenient": True}}
    assert real.texts({"grammar": "start: %json " + json.dumps(lenient)})
    with pytest.raises(InvalidValueError, match="uniqueItems"):
        real.texts({"grammar": "start: %json " + json.dumps(schema)})


def test_a_grammar_that_only_mentions_a_schema_stays_as_it_is(real):
    grammar = r'start: "%json {\"not\": 3}" | "%json" | /%json \{\}/'
    assert set(real.texts({"grammar": grammar}, seeds=8)) <= {'%json {"not": 3}', "%json", "%json {}"}
