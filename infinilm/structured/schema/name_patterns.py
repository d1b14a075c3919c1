"""Rewrites `patternProperties` with overlapping patterns, which llguidance refuses."""

import json
import re
from typing import Any

from infinilm.structured.schema.canonical import Schema
from infinilm.structured.schema.facts import certainly_matches

_WORDS = re.compile(r"\^(?:(?P<word>[\w\-]+)|\((?:\?:)?(?P<words>[\w\-]+(?:\|[\w\-]+)*)\))\$")
"""Patterns that are lists of names."""
_ANYTHING = frozenset({"", "^", "$", ".*", "^.*", ".*$", "^.*$"})


def told_apart(schema: dict[str, Any]) -> dict[str, Any]:
    """An equivalent schema. Patterns that list names become properties; patterns with equal schemas are merged."""
    properties = _without_repeats(schema.get("properties", {}), schema["patternProperties"])
    if len(schema["patternProperties"]) == 1:
        return {**schema, "properties": properties} if properties else schema
    patterns: dict[str, Schema] = {}
    additional = schema.get("additionalProperties", True)
    for pattern, inner in schema["patternProperties"].items():
        if found := _WORDS.fullmatch(pattern):
            for word in (found["word"] or found["words"]).split("|"):
                properties[word] = _both(properties.get(word, True), inner)
        else:
            patterns[pattern] = inner
    patterns = _merged(patterns)
    if general := [pattern for pattern in patterns if pattern in _ANYTHING]:
        additional = patterns.pop(general[0])
        patterns = {pattern: _both(inner, additional) for pattern, inner in patterns.items()}
        properties = {name: _both(inner, additional) for name, inner in properties.items()}
    return {**schema, "properties": properties, "patternProperties": patterns, "additionalProperties": additional}


def _without_repeats(properties: dict[str, Schema], patterns: dict[str, Schema]) -> dict[str, Schema]:
    """Drop a property's schema if a pattern requires the same anyway: llguidance would intersect it with itself."""
    return {
        name: True
        if name.isascii() and any(other == inner and certainly_matches(p, name) for p, other in patterns.items())
        else inner
        for name, inner in properties.items()
    }


def _merged(patterns: dict[str, Schema]) -> dict[str, Schema]:
    groups: dict[str, list[str]] = {}
    for pattern, schema in patterns.items():
        groups.setdefault(json.dumps(schema), []).append(pattern)
    return {
        group[0] if len(group) == 1 else "|".join(f"(?:{pattern})" for pattern in group): patterns[group[0]]
        for group in groups.values()
    }


def _both(one: Schema, other: Schema) -> Schema:
    if one is False or other is False:
        return False
    return other if one is True else one if other is True else {"allOf": [one, other]}
