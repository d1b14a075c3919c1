"""Facts that hold for all values of a schema. If a fact is uncertain, more values are assumed."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import inf
from typing import Any

from infinilm.structured.schema.canonical import Document, Schema

# `number` is `integer` or `fraction`.
TYPES = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
_RANGES = {"integer": "number", "fraction": "number", "string": "length", "array": "items", "object": "size"}
_MAX_ALTERNATIVES = 32
_MAX_DEPTH = 12
_MAX_STEPS = 200_000


def types_of(names: str | Sequence[str]) -> frozenset[str]:
    listed = [names] if isinstance(names, str) else names
    return frozenset(t for name in listed for t in (("integer", "fraction") if name == "number" else (name,)))


def type_names(types: Iterable[str]) -> list[str]:
    """The `type` keyword for these types, or for as many of them as it can express."""
    found = set(types)
    names = sorted(found - {"integer", "fraction"})
    if "integer" in found:
        names.append("number" if "fraction" in found else "integer")
    return names


def type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "integer" if value == int(value) else "fraction"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def is_equal(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal; True is not 1."""
    if type_of(one) != type_of(other):
        return False
    if isinstance(one, list):
        return len(one) == len(other) and all(is_equal(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_equal(value, other[name]) for name, value in one.items())
    return bool(one == other)


@dataclass(slots=True)
class Facts:
    """Conditions that every value of one alternative of a schema satisfies."""

    types: frozenset[str] = TYPES
    values: list[Any] | None = None
    required: frozenset[str] = frozenset()
    properties: dict[str, list[Schema]] = field(default_factory=dict)
    # For each `additionalProperties: false`: the names and patterns beside it.
    closed: list[tuple[frozenset[str], tuple[str, ...]]] = field(default_factory=list)
    # Bounds of: number, length, items, size (number of properties).
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    patterns: tuple[str, ...] = ()
    items: list[tuple[list[Schema], Schema]] = field(default_factory=list)  # `prefixItems` and `items`

    def merged(self, other: "Facts") -> "Facts":
        """The conjunction of both."""
        values = self.values
        if other.values is not None:
            mine = self.values
            values = other.values if mine is None else [v for v in other.values if any(is_equal(v, m) for m in mine)]
        properties = {name: list(schemas) for name, schemas in self.properties.items()}
        for name, schemas in other.properties.items():
            properties.setdefault(name, []).extend(schemas)
        ranges = dict(self.ranges)
        for name, (low, high) in other.ranges.items():
            mine_low, mine_high = ranges.get(name, (-inf, inf))
            ranges[name] = (max(low, mine_low), min(high, mine_high))
        return Facts(
            self.types & other.types,
            values,
            self.required | other.required,
            properties,
            self.closed + other.closed,
            ranges,
            self.patterns + other.patterns,
            self.items + other.items,
        )

    def forbids(self, name: str) -> bool:
        if any(schema is False for schema in self.properties.get(name, ())):
            return True
        return any(
            name not in names and not any(matches(pattern, name, if_uncertain=True) for pattern in patterns)
            for names, patterns in self.closed
        )


def matches(pattern: str, text: str, *, if_uncertain: bool) -> bool:
    try:
        return re.search(pattern, text) is not None
    except re.error:
        return if_uncertain


@lru_cache(10_000)
def is_empty(patterns: tuple[str, ...], low: float, high: float) -> bool:
    """Whether no text of `low` to `high` characters matches all patterns; False if that is uncertain."""
    from llguidance import LLMatcher

    limits = {"minLength": low} | ({} if high == inf else {"maxLength": high})
    schema = {"type": "string", "allOf": [limits, *({"pattern": pattern} for pattern in patterns)]}
    return "Regex is empty" in LLMatcher.validate_grammar(json.dumps({"grammars": [{"json_schema": schema}]}))


class Analysis:
    def __init__(self, document: Document) -> None:
        self.definitions = document.definitions
        self._num_steps = 0
        # By identity, with the schema itself, to keep it alive.
        self._expanded: dict[int, tuple[Schema, list[Facts]]] = {}

    def are_disjoint(self, some: Sequence[Schema], others: Sequence[Schema], depth: int = 0) -> bool:
        """Whether no value satisfies all of `some` and all of `others`; False if that is uncertain."""
        self._num_steps += 1
        if depth > _MAX_DEPTH or self._num_steps > _MAX_STEPS:
            return False
        mine, theirs = self.alternatives(some), self.alternatives(others)
        return all(self._no_common(a, b, depth) for a in mine for b in theirs)

    def rejects(self, schemas: Sequence[Schema], value: Any, depth: int = 0) -> bool:
        """Whether a value certainly violates one of these schemas."""
        if depth > _MAX_DEPTH:
            return False
        return all(self._rejects(facts, value, depth) for facts in self.alternatives(schemas))

    def alternatives(self, schemas: Sequence[Schema]) -> list[Facts]:
        """Facts such that each value of all `schemas` satisfies at least one of them."""
        result = [Facts()]
        for schema in schemas:
            if id(schema) not in self._expanded:
                self._expanded[id(schema)] = (schema, self._expand(schema, 0))
            result = _all_pairs(result, self._expanded[id(schema)][1])
        return [facts for facts in result if facts.types and facts.values != []]

    def resolved(self, schema: Schema) -> Schema:
        """The target of a schema that is only a reference, or the schema itself."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, dict) or list(schema) != ["$ref"]:
                break
            schema = self.definitions[schema["$ref"]]
        return schema

    def _expand(self, schema: Schema, depth: int) -> list[Facts]:
        if isinstance(schema, bool):
            return [Facts()] if schema else []
        result = [_local_facts(schema)]
        if depth > _MAX_DEPTH:
            return result
        for part in schema.get("allOf", ()):
            result = _all_pairs(result, self._expand(part, depth + 1))
        if "$ref" in schema:
            result = _all_pairs(result, self._expand(self.definitions[schema["$ref"]], depth + 1))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                options = [facts for part in schema[keyword] for facts in self._expand(part, depth + 1)]
                result = _all_pairs(result, options)
        return result

    def _no_common(self, a: Facts, b: Facts, depth: int) -> bool:
        if a.values is not None or b.values is not None:
            both = a.merged(b).values or []
            return all(self._rejects(a, value, depth) or self._rejects(b, value, depth) for value in both)
        return all(self._no_common_of_type(kind, a, b, depth) for kind in a.types & b.types)

    def _no_common_of_type(self, kind: str, a: Facts, b: Facts, depth: int) -> bool:
        low_a, high_a = a.ranges.get(_RANGES.get(kind, ""), (-inf, inf))
        low_b, high_b = b.ranges.get(_RANGES.get(kind, ""), (-inf, inf))
        low, high = max(low_a, low_b), min(high_a, high_b)
        if low > high:
            return True
        if kind == "string" and (a.patterns or b.patterns):
            return is_empty((*a.patterns, *b.patterns), low, high)
        if kind == "array" and low > 0:
            return self.are_disjoint(_first_items(a), _first_items(b), depth + 1)
        return kind == "object" and self._no_common_object(a, b, depth)

    def _no_common_object(self, a: Facts, b: Facts, depth: int) -> bool:
        for name in a.required | b.required:
            if a.forbids(name) or b.forbids(name):
                return True
            mine, theirs = a.properties.get(name), b.properties.get(name)
            if mine and theirs and self.are_disjoint(mine, theirs, depth + 1):
                return True
        return False

    def _rejects(self, facts: Facts, value: Any, depth: int) -> bool:  # noqa: PLR0911
        kind = type_of(value)
        if kind not in facts.types:
            return True
        if facts.values is not None and not any(is_equal(value, each) for each in facts.values):
            return True
        low, high = facts.ranges.get(_RANGES.get(kind, ""), (-inf, inf))
        if kind == "string":
            return not low <= len(value) <= high or not all(
                matches(pattern, value, if_uncertain=True) for pattern in facts.patterns
            )
        if kind in ("integer", "fraction"):
            return not low <= value <= high
        if kind == "array":
            return not low <= len(value) <= high
        if kind == "object":
            return not facts.required <= value.keys() or any(
                facts.forbids(name) or self.rejects(facts.properties.get(name, ()), inner, depth + 1)
                for name, inner in value.items()
            )
        return False


def _first_items(facts: Facts) -> list[Schema]:
    return [prefix[0] if prefix else rest for prefix, rest in facts.items]


def _all_pairs(some: list[Facts], others: list[Facts]) -> list[Facts]:
    """Each of `some` merged with each of `others`; if that is too many, without `others`, which assumes more values."""
    if some and len(some) * len(others) > _MAX_ALTERNATIVES and len(others) > 1:
        types = frozenset[str]().union(*(facts.types for facts in others))
        return [facts.merged(Facts(types=types)) for facts in some]
    return [a.merged(b) for a, b in product(some, others)]


def _local_facts(schema: dict[str, Any]) -> Facts:
    """Facts from a schema's own keywords, without `allOf`, `anyOf`, `oneOf` and `$ref`."""
    facts = Facts()
    if "type" in schema:
        facts.types = types_of(schema["type"])
    if "enum" in schema:
        facts.values = list(schema["enum"])
    if "const" in schema:
        facts = facts.merged(Facts(values=[schema["const"]]))
    facts.required = frozenset(schema.get("required", ()))
    facts.properties = {name: [inner] for name, inner in schema.get("properties", {}).items()}
    if schema.get("additionalProperties") is False:
        facts.closed = [(frozenset(schema.get("properties", ())), tuple(schema.get("patternProperties", ())))]
    if "prefixItems" in schema or "items" in schema:
        facts.items = [(schema.get("prefixItems", []), schema.get("items", True))]
    low = max(schema.get("minimum", -inf), schema.get("exclusiveMinimum", -inf))
    high = min(schema.get("maximum", inf), schema.get("exclusiveMaximum", inf))
    facts.ranges = {
        "number": (low, high),
        "length": (schema.get("minLength", 0), schema.get("maxLength", inf)),
        "items": (schema.get("minItems", 0), schema.get("maxItems", inf)),
        "size": (max(schema.get("minProperties", 0), len(facts.required)), schema.get("maxProperties", inf)),
    }
    if "pattern" in schema:
        facts.patterns = (schema["pattern"],)
    inverse = schema.get("not")
    if isinstance(inverse, dict) and list(inverse) == ["required"] and len(inverse["required"]) == 1:
        facts = facts.merged(Facts(types=frozenset({"object"}), properties={inverse["required"][0]: [False]}))
    return facts
