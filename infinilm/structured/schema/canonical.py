"""One form for the schemas of all drafts, with the same meaning.

It is draft 2020-12 without annotations and unknown keywords. `dependencies` is split, tuples are `prefixItems`,
exclusive bounds are numbers, and each `$ref` is a key of `Document.definitions`.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

_MAX_EXCERPT_CHARS = 120


class SchemaError(ValueError):
    """A schema can't be supported; the message says why."""


def excerpt(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_EXCERPT_CHARS else text[:_MAX_EXCERPT_CHARS] + "…"


Schema = dict[str, Any] | bool

_DRAFTS = {
    "http://json-schema.org/draft-04/schema": 4,
    "http://json-schema.org/draft-06/schema": 6,
    "http://json-schema.org/draft-07/schema": 7,
    "https://json-schema.org/draft/2019-09/schema": 2019,
    "https://json-schema.org/draft/2020-12/schema": 2020,
}
_ANY_DRAFT = 0  # the schema names no draft: each keyword has the meaning that some draft gives it
_SINCE = {
    **dict.fromkeys(("const", "contains", "propertyNames"), 6),
    **dict.fromkeys(("if", "then", "else"), 7),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "minContains", "maxContains"), 2019),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties", "$recursiveRef"), 2019),
    **dict.fromkeys(("prefixItems", "$dynamicRef"), 2020),
}
"""The first draft that has a keyword, if not draft 4. Earlier drafts ignore it."""
_MAX_SCHEMAS = 60_000

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "multipleOf")
_SCHEMAS = ("additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_LISTS = ("allOf", "anyOf", "oneOf")
_MAPS = ("properties", "patternProperties", "dependentSchemas")
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


@dataclass(slots=True)
class Document:
    root: Schema = True
    definitions: dict[str, Schema] = field(default_factory=dict)  # by `$ref` value


def property_names(schema: Schema) -> list[str]:
    """The properties that a schema names and does not exclude."""
    properties = {} if isinstance(schema, bool) else schema.get("properties", {})
    return [name for name, inner in properties.items() if inner is not False]


class Reader:
    """Converts a schema to canonical form. Raises `SchemaError` for an invalid schema or an unknown draft."""

    def __init__(self, schema: object) -> None:
        self._source = schema
        self._document = Document()
        self._draft = _draft_of(schema)
        self._num_schemas = 0
        self._resources: dict[str, object] = {"": schema}  # by identifier without fragment, and by anchor
        # By identity: the base URI of references in a schema, where it differs from the enclosing schema's.
        self._bases: dict[int, str] = {}
        self._pending: list[tuple[str, object, str]] = []
        self._keys: dict[int, str] = {}  # keys of definitions, by the identity of their source
        self._index(schema, "")

    def read(self) -> Document:
        base = self._bases.get(id(self._source), "")
        self._document.root = self._convert(self._source, base)
        while self._pending:
            key, source, base = self._pending.pop()
            self._document.definitions[key] = self._convert(source, base)
        return self._document

    def _index(self, value: object, base: str) -> None:
        """Record identifiers and anchors within a schema. Values that are not schemas are harmless here."""
        if isinstance(value, dict):
            if isinstance(identifier := value.get("id" if self._draft == 4 else "$id"), str):
                address, fragment = urldefrag(_join(base, identifier))
                if fragment:
                    self._resources.setdefault(f"{address}#{fragment}", value)
                else:
                    self._resources.setdefault(address, value)
                    self._bases[id(value)] = base = address
            if isinstance(anchor := value.get("$anchor"), str):
                self._resources.setdefault(f"{base}#{anchor}", value)
            for inner in value.values():
                self._index(inner, base)
        elif isinstance(value, list):
            for inner in value:
                self._index(inner, base)

    def _convert(self, schema: object, base: str) -> Schema:
        self._num_schemas += 1
        if self._num_schemas > _MAX_SCHEMAS:
            raise SchemaError(f"it has more than {_MAX_SCHEMAS} subschemas; make it smaller")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise SchemaError(f"{excerpt(schema)} is not a schema; give an object or a boolean")
        base = self._bases.get(id(schema), base)
        if "$ref" in schema and 4 <= self._draft <= 7:
            return {"$ref": self._reference(schema["$ref"], base)}  # these drafts ignore all other keywords
        result: dict[str, Any] = {}
        for keyword, value in schema.items():
            if self._draft and _SINCE.get(keyword, 4) > self._draft:
                continue
            self._convert_keyword(result, keyword, value, schema, base)
        return False if result.get("not") in (True, {}) else result

    def _convert_keyword(  # noqa: PLR0912
        self, result: dict[str, Any], keyword: str, value: Any, schema: dict[str, Any], base: str
    ) -> None:
        def convert(inner: object) -> Schema:
            return self._convert(inner, base)

        if keyword in _CHECKS:
            result[keyword] = _CHECKS[keyword](value)
        elif keyword in _COUNTS or keyword in ("minContains", "maxContains"):
            result[keyword] = _count(keyword, value)
        elif keyword in _NUMBERS:
            result[keyword] = _number(keyword, value)
        elif keyword in ("exclusiveMinimum", "exclusiveMaximum"):
            self._convert_exclusive(result, keyword, value, schema)
        elif keyword in _SCHEMAS:
            result[keyword] = convert(value)
        elif keyword in _LISTS:
            result[keyword] = [convert(inner) for inner in _of_type(keyword, value, list, "a list")]
        elif keyword in _MAPS:
            result[keyword] = {n: convert(inner) for n, inner in _of_type(keyword, value, dict, "an object").items()}
        elif keyword == "$ref":
            result[keyword] = self._reference(value, base)
        elif keyword == "dependencies":
            self._convert_dependencies(result, _of_type(keyword, value, dict, "an object"), convert)
        elif keyword == "prefixItems" or (keyword == "items" and isinstance(value, list)):
            result["prefixItems"] = [convert(inner) for inner in _of_type(keyword, value, list, "a list")]
        elif keyword == "items" or (keyword == "additionalItems" and isinstance(schema.get("items"), list)):
            result["items"] = convert(value)
        elif keyword == "uniqueItems" and _of_type(keyword, value, bool, "a boolean"):
            result[keyword] = True
        elif keyword in ("unevaluatedProperties", "unevaluatedItems", "$recursiveRef", "$dynamicRef"):
            result[keyword] = value

    def _convert_exclusive(self, result: dict[str, Any], keyword: str, value: Any, schema: dict[str, Any]) -> None:
        if isinstance(value, bool) and self._draft in (4, _ANY_DRAFT):
            bound = "minimum" if keyword == "exclusiveMinimum" else "maximum"
            if value and bound in schema:
                result[keyword] = _number(bound, schema[bound])
        else:
            result[keyword] = _number(keyword, value)

    def _convert_dependencies(
        self, result: dict[str, Any], dependencies: dict[str, Any], convert: Callable[[object], Schema]
    ) -> None:
        for name, value in dependencies.items():
            if isinstance(value, list):
                result.setdefault("dependentRequired", {})[name] = _names("dependencies", value)
            elif isinstance(value, str):  # as in drafts before the fourth
                result.setdefault("dependentRequired", {})[name] = [value]
            else:
                result.setdefault("dependentSchemas", {})[name] = convert(value)

    def _reference(self, reference: object, base: str) -> str:
        if not isinstance(reference, str):
            raise SchemaError(f"$ref is {excerpt(reference)}; it must be a string")
        source, base = self._look_up(reference, base)
        if (key := self._keys.get(id(source))) is None:
            name = unquote(reference).rpartition("/")[2].strip("#") or "root"
            key = name if name not in self._keys.values() else f"{name}.{len(self._keys)}"
            self._keys[id(source)] = key
            self._pending.append((key, source, base))
        return key

    def _look_up(self, reference: str, base: str) -> tuple[object, str]:
        """The target of a reference, and the base URI of references in it."""
        address, fragment = urldefrag(_join(base, reference))
        fragment = unquote(fragment)
        is_path = fragment.startswith("/")
        name = f"{address}#{fragment}" if fragment and not is_path else address
        if name not in self._resources:
            raise SchemaError(f"$ref {excerpt(reference)} points outside of the schema; nothing is fetched")
        source, base = self._resources[name], address
        for token in fragment[1:].split("/") if is_path else ():
            name = token.replace("~1", "/").replace("~0", "~")
            if isinstance(source, dict) and name in source:
                source = source[name]
            elif isinstance(source, list) and name.isdecimal() and int(name) < len(source):
                source = source[int(name)]
            else:
                raise SchemaError(f"$ref {excerpt(reference)} points to nothing in the schema")
            base = self._bases.get(id(source), base)
        return source, base


def _draft_of(schema: object) -> int:
    name = schema.get("$schema") if isinstance(schema, dict) else None
    if name is None:
        return _ANY_DRAFT
    address = name.rstrip("#") if isinstance(name, str) else ""
    if address.replace("https:", "http:") in _DRAFTS:
        address = address.replace("https:", "http:")
    if address not in _DRAFTS:
        raise SchemaError(f"$schema is {excerpt(name)}; supported are {', '.join(_DRAFTS)}, or none")
    return _DRAFTS[address]


def _join(base: str, reference: str) -> str:
    try:
        return urljoin(base, reference) if not reference.startswith("#") else base + reference
    except ValueError:
        raise SchemaError(f"{excerpt(reference)} is no URI") from None


def _of_type(keyword: str, value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind):
        raise SchemaError(f"{keyword} is {excerpt(value)}; it must be {name}")
    return value


def _number(keyword: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SchemaError(f"{keyword} is {excerpt(value)}; it must be a number")
    return value


def _count(keyword: str, value: Any) -> int:
    number = _number(keyword, value)
    if number != int(number) or number < 0:
        raise SchemaError(f"{keyword} is {excerpt(value)}; it must be a whole number, 0 or more")
    return int(number)


def _names(keyword: str, value: Any) -> list[str]:
    names = _of_type(keyword, value, list, "a list of strings")
    return [_of_type(keyword, name, str, "a list of strings") for name in names]


def _type(value: Any) -> Any:
    for name in value if isinstance(value, list) else [value]:
        if name not in _TYPES:
            raise SchemaError(f"type is {excerpt(value)}; it must be of {', '.join(_TYPES)}")
    return value


def _dependent_required(value: Any) -> dict[str, list[str]]:
    dependencies = _of_type("dependentRequired", value, dict, "an object")
    return {name: _names("dependentRequired", names) for name, names in dependencies.items()}


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "type": _type,
    "enum": lambda value: _of_type("enum", value, list, "a list"),
    "const": lambda value: value,
    "format": lambda value: _of_type("format", value, str, "a string"),
    "pattern": lambda value: _of_type("pattern", value, str, "a string"),
    "required": lambda value: _names("required", value),
    "dependentRequired": _dependent_required,
}
