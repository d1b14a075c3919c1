"""Expresses the values that a schema refuses as schemas."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from infinilm.structured.schema.canonical import Schema
from infinilm.structured.schema.facts import TYPES, Analysis, matches, type_names, type_of, types_of

_MAX_DEPTH = 6
_MAX_WORDS = 400
_MAX_WORD_CHARS = 100
_MAX_LIMIT = 64  # values beyond a higher limit are not expressed

# `^[…]+$`, or `[…]` anywhere in a text.
_ONE_CLASS = re.compile(
    r"""(?P<start>\^)? \(?
    (?: \[ (?P<inner> \^? (?:[^\]\[\\] | \\[^pPbBuxkcQEwWdD])+ ) \] | (?P<char> \w | \\[$.*+?/(){}|^-] ) )
    \)? (?(start) (?P<all>[+*]) \$ )""",
    re.VERBOSE,
)


class Negation:
    def __init__(self, analysis: Analysis) -> None:
        self._analysis = analysis

    def ways_out(self, schema: Schema, names: Iterable[str] = (), depth: int = 0) -> list[Schema]:
        """Schemas, in canonical form, whose values all violate `schema`; as many as can be expressed, possibly none.

        `names` are properties that a value may have.
        """
        if isinstance(schema, bool):
            return [] if schema else [True]
        if depth > _MAX_DEPTH:
            return []
        names = list(names)
        found: list[Schema] = []
        for keyword, value in schema.items():
            found += self._of_keyword(keyword, value, schema, names, depth)
        return found

    def is_complete(self, schema: Schema, depth: int = 0) -> bool:
        """Whether `ways_out` covers all values that violate `schema`."""
        if isinstance(schema, bool):
            return True
        return depth <= _MAX_DEPTH and all(
            self._is_complete(keyword, value, schema, depth) for keyword, value in schema.items()
        )

    def _is_complete(self, keyword: str, value: Any, schema: dict[str, Any], depth: int) -> bool:  # noqa: PLR0911
        match keyword:
            case "type":
                return types_of(value) & {"integer", "fraction"} != {"integer"}
            case "const" | "enum":
                values = value if keyword == "enum" else [value]
                return all(each is None or isinstance(each, (str, bool)) for each in values) and _are_short(values)
            case "properties":
                return all(self.is_complete(inner, depth + 1) for inner in value.values())
            case "allOf" | "anyOf":
                return all(self.is_complete(inner, depth + 1) for inner in value)
            case "$ref":
                return self.is_complete(self._analysis.definitions[value], depth + 1)
            case "maxLength" | "maxItems" | "maxProperties":
                return bool(value < _MAX_LIMIT)
            case "additionalProperties" | "items":
                return value is True or (keyword == "items" and not schema.get("prefixItems") and value is False)
            case _:
                return keyword in _COMPLETE

    def _of_keyword(  # noqa: PLR0911
        self, keyword: str, value: Any, schema: dict[str, Any], names: list[str], depth: int
    ) -> list[Schema]:
        match keyword:
            case "type":
                others = type_names(TYPES - types_of(value))
                return [{"type": others}] if others else []
            case "const" | "enum":
                return _other_values(value if keyword == "enum" else [value])
            case "required":
                return [{"type": "object", "properties": {name: False}} for name in value]
            case "properties":
                return self._other_properties(value, names, depth)
            case "additionalProperties":
                return self._other_properties(dict.fromkeys(_additional(names, schema), value), names, depth)
            case "patternProperties":
                matching = {
                    name: inner
                    for name in names
                    for pattern, inner in value.items()
                    if matches(pattern, name, if_uncertain=False)
                }
                return self._other_properties(matching, names, depth)
            case "items" if not schema.get("prefixItems"):
                inner = self.ways_out(value, (), depth + 1)
                return [{"type": "array", "minItems": 1, "prefixItems": [any_of(inner)]}] if inner else []
            case "not":
                return [value]
            case "allOf":
                return [way for part in value for way in self.ways_out(part, names, depth + 1)]
            case "anyOf":
                ways = [self.ways_out(part, names, depth + 1) for part in value]
                return [{"allOf": [any_of(each) for each in ways]}] if all(ways) else []
            case "$ref":
                return self.ways_out(self._analysis.definitions[value], names, depth + 1)
            case _:
                return _beyond(keyword, value)

    def _other_properties(self, properties: dict[str, Schema], names: list[str], depth: int) -> list[Schema]:
        found: list[Schema] = []
        for name, inner in properties.items():
            if inner is False:
                found.append({"type": "object", "required": [name]})
            elif ways := self.ways_out(inner, names, depth + 1):
                found.append({"type": "object", "required": [name], "properties": {name: any_of(ways)}})
        return found


def _additional(names: list[str], schema: dict[str, Any]) -> list[str]:
    """The names that `additionalProperties` of a schema applies to."""
    patterns = schema.get("patternProperties", {})
    return [
        name
        for name in names
        if name not in schema.get("properties", {})
        and not any(matches(each, name, if_uncertain=True) for each in patterns)
    ]


def any_of(schemas: Sequence[Schema]) -> Schema:
    return schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}


def _beyond(keyword: str, value: Any) -> list[Schema]:  # noqa: PLR0911
    match keyword:
        case "minLength" | "minItems" | "minProperties" if value > 0:
            return [{"type": _HOLDERS[keyword[3:]], "max" + keyword[3:]: value - 1}]
        case "maxLength" | "maxItems" | "maxProperties" if value < _MAX_LIMIT:
            return [{"type": _HOLDERS[keyword[3:]], "min" + keyword[3:]: value + 1}]
        case "pattern":
            return [{"type": "string", "pattern": outside}] if (outside := _other_texts(value)) else []
        case "minimum":
            return [{"type": "number", "exclusiveMaximum": value}]
        case "maximum":
            return [{"type": "number", "exclusiveMinimum": value}]
        case "exclusiveMinimum":
            return [{"type": "number", "maximum": value}]
        case "exclusiveMaximum":
            return [{"type": "number", "minimum": value}]
        case _:
            return []


_COMPLETE = frozenset(
    {
        *("required", "not", "format", "minLength", "minItems", "minProperties"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    }
)
_HOLDERS = {"Length": "string", "Items": "array", "Properties": "object"}


def _other_values(values: Sequence[Any]) -> list[Schema]:
    kinds = {type_of(value) for value in values}
    found: list[Schema] = []
    if others := type_names(TYPES - kinds - ({"fraction"} if "integer" in kinds else set())):
        found.append({"type": others})
    if "string" in kinds:
        words = sorted({value for value in values if isinstance(value, str)})
        if _are_short(words):
            found.append({"type": "string", "pattern": f"^{none_of(words)}$"})
    if kinds & {"integer", "fraction"}:
        numbers = [value for value in values if type_of(value) in ("integer", "fraction")]
        found.append({"type": "number", "exclusiveMaximum": min(numbers)})
        found.append({"type": "number", "exclusiveMinimum": max(numbers)})
    if "boolean" in kinds and (left := {True, False} - {value for value in values if isinstance(value, bool)}):
        found.append({"enum": sorted(left)})
    return found


def _other_texts(pattern: str) -> str | None:
    """A regular expression for the texts that a pattern does not match, if it is about one set of characters."""
    if not (found := _ONE_CLASS.fullmatch(pattern)):
        return None
    inner = found["inner"] or found["char"]
    others = f"[{inner[1:]}]" if found["inner"] and inner.startswith("^") else f"[^{inner}]"
    if not found["all"]:
        return f"^{others}*$"  # a text matches if it has one of these characters
    return f"{others}|^$" if found["all"] == "+" else others


def _are_short(words: Sequence[Any]) -> bool:
    return len(words) <= _MAX_WORDS and all(len(word) <= _MAX_WORD_CHARS for word in words if isinstance(word, str))


def none_of(words: Sequence[str]) -> str:
    """A regular expression for all texts but these."""
    followers: dict[str, list[str]] = {}
    for word in words:
        if word:
            followers.setdefault(word[0], []).append(word[1:])
    if not followers:
        return r"[\s\S]+" if words else r"[\s\S]*"
    others = rf"[^{''.join(map(_escaped, followers))}][\s\S]*"
    rest = "|".join([others, *(f"{_escaped(char)}(?:{none_of(rest)})" for char, rest in followers.items())])
    return f"(?:{rest})" if "" in words else f"(?:{rest})?"


def word_pattern(word: str) -> str:
    return "".join(map(_escaped, word))


def _escaped(char: str) -> str:
    """The character, escaped in the syntax that Rust and Python share."""
    if char.isascii() and char.isalnum():
        return char
    return f"\\u{ord(char):04X}" if ord(char) < 0x10000 else f"\\U{ord(char):08X}"
