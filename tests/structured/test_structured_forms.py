"""Whatever the model would like to say: what ends has the form that was asked for."""

import json
import re

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

STRING = {"type": "string", "maxLength": 12}
POINT = {
    "type": "object",
    "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": 0, "maximum": 9},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}

SCHEMAS = {
    "string": {"type": "string"},
    "short string": {"type": "string", "minLength": 3, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "integer": {"type": "integer"},
    "integer range": {"type": "integer", "minimum": -5, "maximum": 1234},
    "exclusive": {"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 13},
    "multiple": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    "number": {"type": "number"},
    "number range": {"type": "number", "minimum": 0, "maximum": 1},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "const": {"const": {"a": [1, None, 'é\n"\\']}},
    "enum": {"enum": ["red", "green", 3, None, {"k": "v"}]},
    "several types": {"type": ["integer", "null", "boolean"]},
    "array": {"type": "array", "items": {"type": "integer"}},
    "array of 2 to 4": {"type": "array", "items": STRING, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [STRING, {"type": "integer"}], "items": False, "minItems": 2},
    "nested arrays": {
        "type": "array",
        "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "maxItems": 3,
    },
    "empty array": {"type": "array", "maxItems": 0},
    "object": POINT,
    "optional properties": {"type": "object", "properties": {"a": STRING, "b": POINT}, "additionalProperties": False},
    "closed empty object": {"type": "object", "additionalProperties": False},
    "map": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 3},
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^n_": {"type": "null"}},
        "additionalProperties": False,
    },
    "odd names": {
        "type": "object",
        "properties": {'a "b"': STRING, "ü/🙂": STRING},
        "required": ["ü/🙂"],
        "additionalProperties": False,
    },
    "anyOf": {"anyOf": [POINT, {"type": "array", "items": {"type": "null"}, "maxItems": 3}]},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]},
    "allOf": {
        "allOf": [POINT | {"additionalProperties": True, "maxProperties": 2}, {"properties": {"x": {"minimum": 0}}}]
    },
    "list by reference": TREE,
    "draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"d": STRING},
        "type": "array",
        "items": {"$ref": "#/definitions/d"},
        "maxItems": 2,
    },
    "annotated": {
        "title": "T",
        "description": "D",
        "type": "object",
        "properties": {"k": {"type": "boolean", "default": True}},
        "required": ["k"],
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_json_schema(name, real, tiny):
    schema = SCHEMAS[name]
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(
        schema, format_checker=jsonschema.FormatChecker(["date", "uuid", "ipv4"])
    )
    for source in (real, tiny):
        for text in source.texts({"json_schema": schema}):
            validator.validate(json.loads(text))


@pytest.mark.parametrize("schema", [True, "true", {}, "{}", '{"type": ["object", "array"]}'])
def test_schemas_as_text_and_those_that_permit_anything(schema, real):
    for text in real.texts({"json_schema": schema}, seeds=6):
        json.loads(text)


def test_json_object(real, tiny):
    for source in (real, tiny):
        for text in source.texts({"json_object": True}, seeds=8):
            assert isinstance(json.loads(text), dict)


REGEXES = [
    r"[0-9]{3}-[0-9]{4}",
    r"(yes|no)( please)?!",
    r"[a-zäöüß]{1,20}",
    r"\([a-z]+\)/\"[^\"]*\"",
    r"(?i)hello (world)?",
    r"^anchored$",
    r"line\nbreak\t.",
    r"🙂+(é|日本)",
    r"",
]


@pytest.mark.parametrize("regex", REGEXES)
def test_regex(regex, real, tiny):
    for source in (real, tiny):
        for text in source.texts({"regex": regex}):
            assert re.fullmatch(regex, text), text


CHOICES = [
    ["yes", "no"],
    ["a", "aa", "aaa", "aaaa"],
    ["", "something"],
    [" leading", "trailing ", "in side", "line\nbreak"],
    ["/", "//", "\\", "\\n", '"', "a|b", "(", "[a-z]", ".*", "{}", "#", "é", "🙂", "日本"],
    ["</s>", "<|im_end|>", "<|endoftext|>"],
    [f"option {number}" for number in range(1000)],
]


@pytest.mark.parametrize("choices", CHOICES, ids=lambda choices: choices[0][:10])
def test_choice(choices, real, tiny):
    for source in (real, tiny):
        texts = source.texts({"choice": choices}, seeds=30)
        assert set(texts) <= set(choices)
        assert len(texts) == 30
        assert len(set(texts)) > 1


GRAMMARS = {
    "list": ('start: "[" (INT ("," INT)*)? "]"\nINT: /[0-9]{1,3}/', r"\[(\d{1,3}(,\d{1,3})*)?\]"),
    "left recursion": ('start: start "+" TERM | TERM\nTERM: /[a-c]/', r"[a-c](\+[a-c])*"),
    "inline schema": ('start: "<" %json {"type": "boolean"} ">"', r"<(true|false)>"),
    "braces": ('start: "(" start? ")"', r"\(+\)+"),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_grammar(name, real, tiny):
    grammar, regex = GRAMMARS[name]
    for source in (real, tiny):
        for text in source.texts({"grammar": grammar}, seeds=6):
            assert re.fullmatch(regex, text), text
            if name == "braces":
                assert text.count("(") == text.count(")")


SCHEMA_TREES = st.recursive(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "integer"}, {"enum": ["a", 1]}, STRING]),
    lambda inner: st.one_of(
        st.builds(lambda item: {"type": "array", "items": item, "maxItems": 2}, inner),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(
            lambda properties, required: {
                "type": "object",
                "properties": properties,
                "required": [name for name in properties if name in required],
                "additionalProperties": False,
            },
            st.dictionaries(st.text('abc"\\é ', max_size=3), inner, max_size=3),
            st.sets(st.text('abc"\\é ', max_size=3)),
        ),
    ),
    max_leaves=5,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=SCHEMA_TREES)
def test_any_schema(schema, tiny):
    for answer in tiny.answers({"json_schema": schema}, seeds=3, max_tokens=150):
        assert answer.error is None
        if answer.text is not None:
            jsonschema.validate(json.loads(answer.text), schema, jsonschema.Draft202012Validator)
