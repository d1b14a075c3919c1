"""What can be said about a form before anybody compiles it."""

import dataclasses

import pytest

from infinilm import SamplingParams, StructuredOutput
from infinilm.errors import InvalidTypeError, InvalidValueError

BAD = [
    ({}, InvalidValueError, "has nothing; give exactly one of json_schema, json_object, regex, choice, grammar"),
    ({"json_object": False}, InvalidValueError, "has nothing"),
    ({"json_object": True, "regex": "a"}, InvalidValueError, "has json_object and regex"),
    ({"json_schema": {}, "choice": ["a"]}, InvalidValueError, "has json_schema and choice"),
    ({"json_schema": False, "grammar": "a"}, InvalidValueError, "has json_schema and grammar"),
    ({"json_object": 1}, InvalidTypeError, "json_object=1 must be True or False"),
    ({"json_schema": [1]}, InvalidTypeError, "json_schema is of type list"),
    ({"json_schema": 3.5}, InvalidTypeError, "json_schema is of type float"),
    ({"json_schema": "{"}, InvalidValueError, "json_schema is not valid JSON"),
    ({"json_schema": {"a": object()}}, InvalidTypeError, "can't be written as JSON"),
    ({"json_schema": {"minimum": float("nan")}}, InvalidTypeError, "can't be written as JSON"),
    ({"regex": b"a"}, InvalidTypeError, "regex has a value of type bytes"),
    ({"regex": "a" * 20_000}, InvalidValueError, "regex has 20000 characters; at most 16384"),
    ({"regex": "\ud800"}, InvalidValueError, r"regex has a lone surrogate '\\ud800' at character 0"),
    ({"grammar": 1}, InvalidTypeError, "grammar has a value of type int"),
    ({"choice": "yes"}, InvalidTypeError, "choice is of type str"),
    ({"choice": {"yes"}}, InvalidTypeError, "choice is of type set"),
    ({"choice": []}, InvalidValueError, "choice has 0 texts; give 1 to 10000"),
    ({"choice": [None]}, InvalidTypeError, "choice has a value of type NoneType"),
]


@pytest.mark.parametrize(("form", "error", "message"), BAD, ids=[str(form)[:40] for form, *_ in BAD])
def test_bad_forms_are_refused_by_name(form, error, message):
    with pytest.raises(error, match=message):
        StructuredOutput(**form)


def test_a_schema_that_holds_itself_is_refused():
    schema: dict = {"type": "array"}
    schema["items"] = schema
    with pytest.raises(InvalidValueError, match="nested deeper than"):
        StructuredOutput(json_schema=schema)


def test_forms_are_values():
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    form = StructuredOutput(json_schema=schema)
    schema["type"] = "string"
    assert form.json_schema == '{"type":"object","properties":{"b":{},"a":{}}}'
    assert form == StructuredOutput(json_schema={"type": "object", "properties": {"b": {}, "a": {}}})
    assert len({form, StructuredOutput(choice=["a"]), StructuredOutput(choice=("a",))}) == 2
    assert dataclasses.replace(form) == form
    assert [form.kind, StructuredOutput(json_object=True).kind] == ["json_schema", "json_object"]


COMBINATIONS = [
    ({"ignore_eos": True}, InvalidValueError, "ignore_eos=True can't be combined with structured"),
    ({"stop": "x"}, InvalidValueError, "stop can't be combined with structured"),
    ({"structured": {"regex": "a"}}, InvalidTypeError, "structured=.* must be a StructuredOutput"),
]


@pytest.mark.parametrize(("settings", "error", "message"), COMBINATIONS)
def test_what_does_not_go_together(settings, error, message):
    with pytest.raises(error, match=message):
        SamplingParams(**{"structured": StructuredOutput(regex="a"), **settings})
