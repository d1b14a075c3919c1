"""Rewrites of three keywords that llguidance refuses or ignores in some combinations.

- `counted`: `minProperties` and `maxProperties` beside optional properties, which llguidance does not count.
- `told_apart`: `patternProperties` with overlapping patterns, which it refuses.
- `Loops`: recursive references beside other keywords, which it refuses.
"""

import json
import re
from itertools import combinations, islice
from math import inf
from typing import Any

from infinilm.structured.schema.canonical import Document, Schema, SchemaError, excerpt, property_names
from infinilm.structured.schema.facts import matches

MAX_WAYS = 64  # alternatives that the keywords of one schema may expand to
# Patterns that are lists of names.
_WORDS = re.compile(r"\^(?:(?P<word>[\w\-]+)|\((?:\?:)?(?P<words>[\w\-]+(?:\|[\w\-]+)*)\))\$")
_ANYTHING = frozenset({"", "^", "$", ".*", "^.*", ".*$", "^.*$"})


def counted(result: dict[str, Any], schema: dict[str, Any]) -> list[Schema] | None:
    """The alternatives for `minProperties` and `maxProperties`, or None if llguidance can count by itself."""
    if "minProperties" not in schema and "maxProperties" not in schema:
        return None
    counts: dict[str, int] = {name: schema[name] for name in ("minProperties", "maxProperties") if name in schema}
    required = schema.get("required", ())
    optional = [name for name in property_names(schema) if name not in required]
    num_least = max(0, schema.get("minProperties", 0) - len(required))
    num_most = schema.get("maxProperties", inf) - len(required)
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if is_closed and num_most >= len(optional):
        num_most = inf
        counts.pop("maxProperties", None)
    if not optional or (is_closed and num_least <= 1 and num_most in (1, inf)):
        result.update(counts)
        return None
    if num_least == 0 and num_most == inf:
        return None
    if num_most == inf:
        ways: list[Schema] = [{"required": [*names]} for names in islice(combinations(optional, num_least), MAX_WAYS)]
        return ways if is_closed or not counts else [*ways, {"properties": dict.fromkeys(optional, False), **counts}]
    return _between(num_least, num_most, optional, is_closed, counts)


def _between(
    num_least: int, num_most: float, optional: list[str], is_closed: bool, counts: dict[str, int]
) -> list[Schema]:
    ways: list[Schema] = []
    for count in range(num_least, int(min(num_most, len(optional))) + 1):
        for names in combinations(optional, count):
            others = [name for name in optional if name not in names]
            ways.append(
                {"required": list(names), "properties": dict.fromkeys(others, False), **({} if is_closed else counts)}
            )
            if len(ways) > MAX_WAYS:
                break
    if not is_closed:
        ways += [{"properties": dict.fromkeys(optional, False), **counts}]
    if len(ways) <= MAX_WAYS:
        return ways
    if num_most >= len(optional) and num_least == 0:
        return [{"properties": dict.fromkeys(optional, True), "additionalProperties": False}]
    raise SchemaError(
        f"{excerpt(counts)} can't be enforced with {len(optional)} optional properties; make them required"
    )


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
        if name.isascii()
        and any(other == inner and matches(pattern, name, if_uncertain=False) for pattern, other in patterns.items())
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


class Loops:
    """Replaces recursive references by their targets, once."""

    def __init__(self, document: Document) -> None:
        self._definitions = document.definitions
        targets = {key: _references(schema) for key, schema in document.definitions.items()}
        self._recursive = {key for key in targets if key in _reachable(key, targets)}
        self._keys: dict[str, str] = {}  # of the definitions added here, by the JSON text of their source

    def unrolled(self, schema: dict[str, Any]) -> str | None:
        """The key of a new, equivalent definition without a recursive reference at its top; None if there is no such
        reference.
        """
        if not self._recursive or not self._has_loop(schema):
            return None
        text = json.dumps(schema)
        if text not in self._keys:
            key = f"unrolled.{len(self._keys)}"
            self._keys[text] = key
            self._definitions[key] = self._inlined(schema)
        return self._keys[text]

    def _has_loop(self, schema: dict[str, Any]) -> bool:
        if schema.get("$ref") in self._recursive:
            return len(schema) > 1
        if any(self._is_loop(part) for part in schema.get("allOf", ())):
            return True
        options = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
        return len(schema) > 1 and any(map(self._is_loop, options))

    def _is_loop(self, schema: Schema) -> bool:
        return isinstance(schema, dict) and schema.get("$ref") in self._recursive

    def _inlined(self, schema: dict[str, Any]) -> Schema:
        result: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword in ("allOf", "anyOf", "oneOf"):
                result[keyword] = result.get(keyword, []) + [self._body(part) for part in value]
            elif keyword == "$ref" and value in self._recursive:
                result["allOf"] = [*result.get("allOf", []), self._definitions[value]]
            else:
                result[keyword] = value
        return result

    def _body(self, schema: Schema) -> Schema:
        if not isinstance(schema, dict) or not self._is_loop(schema):
            return schema
        return self._definitions[schema["$ref"]] if len(schema) == 1 else self._inlined(schema)


def _references(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(_references, value))
    if not isinstance(value, dict):
        return set()
    found = set().union(*map(_references, value.values()))
    return found | {value["$ref"]} if isinstance(value.get("$ref"), str) else found


def _reachable(key: str, targets: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    pending = list(targets[key])
    while pending:
        if (target := pending.pop()) not in found:
            found.add(target)
            pending += targets.get(target, ())
    return found
