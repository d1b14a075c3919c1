"""Replaces the keywords that llguidance lacks. No step admits a value that the schema refuses."""

from collections.abc import Sequence
from typing import Any

from infinilm.structured.schema import formats
from infinilm.structured.schema.canonical import Document, Schema, SchemaError, excerpt, property_names
from infinilm.structured.schema.facts import Analysis, types_of
from infinilm.structured.schema.negation import Negation, any_of, word_pattern
from infinilm.structured.schema.rewrites import MAX_WAYS, Loops, counted, told_apart

Way = list[Schema]  # schemas that must all hold
Choice = list[Way]  # alternatives, of which one must hold

_COPIED = (
    *("type", "enum", "const", "required", "pattern", "minLength", "maxLength", "minItems", "maxItems"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
)
_MAX_OUTS = 12  # combinations of exclusions that keep an option of `oneOf` disjoint from the others
_UNSUPPORTED = ("unevaluatedItems", "$recursiveRef", "$dynamicRef", "maxContains")


class Narrowing:
    """Makes a schema of the keywords that llguidance has, whose values all satisfy the document's schema."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._analysis = Analysis(document)
        self._negation = Negation(self._analysis)
        self._loops = Loops(document)
        self._definitions: dict[str, Schema] = {}
        self._pending: list[str] = []

    def run(self) -> dict[str, Any]:
        root = self._narrow(self._document.root)
        if root is False:
            raise SchemaError("it permits no answer at all; give a schema that some value satisfies")
        while self._pending:
            key = self._pending.pop()
            self._definitions[key] = self._narrow(self._document.definitions[key])
        result = {} if root is True else root
        return {**result, "$defs": self._definitions} if self._definitions else result

    def _narrow(self, schema: Schema) -> Schema:
        if isinstance(schema, bool):
            return schema
        if (unrolled := self._loops.unrolled(schema)) is not None:
            return {"$ref": self._reference(unrolled)}
        if schema.get("patternProperties"):
            schema = told_apart(schema)
        result: dict[str, Any] = {}
        parts: list[Schema] = []
        for keyword, value in schema.items():
            self._narrow_keyword(result, parts, keyword, value, schema)
        if (ways := self._ways(result, schema)) is not None:
            parts.append(_any_of(ways))
        if len(parts) == 1 and self._goes_without(result, parts[0]):
            return self._narrow(parts[0])
        if parts:
            result["allOf"] = result.get("allOf", []) + [self._narrow(part) for part in parts]
        return result

    def _goes_without(self, result: dict[str, Any], part: Schema) -> bool:
        """Whether `part` alone suffices. llguidance can't intersect a recursive schema with another one."""
        if not result:
            return True
        types = types_of(result.get("type", ()))
        return set(result) == {"type"} and all(facts.types <= types for facts in self._analysis.alternatives([part]))

    def _narrow_keyword(  # noqa: PLR0912
        self, result: dict[str, Any], parts: list[Schema], keyword: str, value: Any, schema: dict[str, Any]
    ) -> None:
        """Add one keyword to the result, or its replacement to `parts`, which are narrowed later."""
        match keyword:
            case _ if keyword in _COPIED:
                result[keyword] = value
            case "$ref":
                result[keyword] = self._reference(value)
            case "allOf":
                if inner := [self._narrow(inner) for inner in value if not _is_conditional(inner)]:
                    result[keyword] = inner
            case "anyOf" | "prefixItems":
                result[keyword] = [self._narrow(inner) for inner in value]
            case "properties" | "patternProperties":
                result[keyword] = {name: self._narrow(inner) for name, inner in value.items()}
            case "additionalProperties" | "items":
                result[keyword] = self._narrow(value)
            case "format":
                if (part := _format_part(value)) is not None:
                    parts.append(part) if "pattern" in part and "pattern" in schema else result.update(part)
            case "propertyNames":
                parts.append(self._named(value))
            case "contains" if schema.get("minContains", 1) > 0:
                parts.append(self._containing(value, schema))
            case "uniqueItems" if schema.get("maxItems", 2) > 1:
                raise SchemaError("uniqueItems can't be enforced; leave it out, or set maxItems to 1")
            case "unevaluatedProperties" if value is not True:
                raise SchemaError("unevaluatedProperties can't be enforced; use additionalProperties")
            case _ if keyword in _UNSUPPORTED and value is not True:
                raise SchemaError(f"{keyword} {excerpt(value)} can't be enforced; leave it out")

    def _reference(self, key: str) -> str:
        if key not in self._definitions:
            self._definitions[key] = True  # a placeholder until it is narrowed
            self._pending.append(key)
        return "#/$defs/" + key.replace("~", "~0").replace("/", "~1").replace("%", "%25")

    # Keywords with alternatives

    def _ways(self, result: dict[str, Any], schema: dict[str, Any]) -> Choice | None:
        """The alternatives of the keywords with a choice, each as schemas that must all hold."""
        choices: list[Choice] = []
        around = {keyword: value for keyword, value in schema.items() if keyword not in ("oneOf", "not", "if")}
        if "oneOf" in schema:
            choices.append(self._exclusive(schema["oneOf"], around))
        if "not" in schema:
            if not (outs := self._negation.ways_out(schema["not"], property_names(schema))):
                raise SchemaError(f"not {excerpt(schema['not'])} can't be enforced; leave it out")
            choices.append([[out] for out in outs])
        choices += self._conditional(schema)
        choices += _dependent(schema)
        if (counts := counted(result, schema)) is not None:
            choices.append([[way] for way in counts])
        if not choices:
            return None
        ways: Choice = [[]]
        for choice in choices:
            longer = [
                way + option
                for way in ways
                for option in choice
                if not self._analysis.are_disjoint([around, *way], option)
            ]
            if len(longer) > MAX_WAYS and len(ways) > 1:
                longer = [way + choice[-1] for way in ways]
            ways = longer
        return ways

    def _exclusive(self, options: list[Schema], around: dict[str, Any]) -> Choice:
        """The options of `oneOf`, each without the values of the others."""
        found: Choice = []
        for index, option in enumerate(options):
            overlaps = [
                other
                for other in options[:index] + options[index + 1 :]
                if not self._analysis.are_disjoint([around, option], [around, other])
            ]
            names = [*property_names(around), *property_names(self._analysis.resolved(option))]
            if (way := self._apart(option, overlaps, around, names)) is not None:
                found.append(way)
        if not found:
            raise SchemaError(f"oneOf {excerpt(options)}: no value fits exactly one option; use anyOf")
        return found

    def _apart(self, option: Schema, overlaps: list[Schema], around: dict[str, Any], names: list[str]) -> Way | None:
        """An option with exclusions that keep it disjoint from others; None if another option contains it."""
        way = [option]
        num_outs = max(1, int(_MAX_OUTS ** (1 / max(1, len(overlaps)))))
        for other in overlaps:
            if self._analysis.are_disjoint([around, *way], [around, other]):
                continue
            outs = [
                out
                for out in self._negation.ways_out(other, names)
                if not self._analysis.are_disjoint([around, *way], [out])
            ]
            if outs:
                way.append(any_of(outs[:num_outs]))
            elif self._negation.is_complete(other):
                return None
            else:
                raise SchemaError(
                    f"oneOf: the options {excerpt(option)} and {excerpt(other)} can't be told apart; use anyOf"
                )
        return way

    def _conditional(self, schema: dict[str, Any]) -> list[Choice]:
        """The alternatives of each `if`."""
        found: list[Choice] = []
        for part in [schema, *filter(_is_conditional, schema.get("allOf", ()))]:
            if "if" in part and ("then" in part or "else" in part):
                outs = self._negation.ways_out(part["if"], property_names(schema))
                if not outs and not self._negation.is_complete(part["if"]):
                    raise SchemaError(f"if {excerpt(part['if'])} can't be enforced; leave it out")
                met: list[Schema] = [part["if"], part.get("then", True)]
                found.append([*([out, part.get("else", True)] for out in outs), met])
        return found

    # Objects and arrays

    def _named(self, names: Schema) -> Schema:
        """The replacement of `propertyNames`."""
        resolved = self._analysis.resolved(names)
        if resolved is True:
            return True
        if isinstance(resolved, dict) and isinstance(words := resolved.get("enum"), list):
            allowed = [word for word in words if isinstance(word, str) and not self._analysis.rejects([resolved], word)]
            return {"properties": dict.fromkeys(allowed, True), "additionalProperties": False}
        pattern = self._name_pattern(resolved)
        if pattern is None:
            raise SchemaError(f"propertyNames {excerpt(names)} can't be enforced; use a pattern or an enum")
        return {"patternProperties": {pattern: True}, "additionalProperties": False} if pattern else True

    def _name_pattern(self, names: Schema) -> str | None:  # noqa: PLR0911
        """A regular expression for names, empty if any name is allowed; None if there is none."""
        names = self._analysis.resolved(names)
        if names is True or names == {"type": "string"}:
            return ""
        if not isinstance(names, dict):
            return None
        keywords = set(names) - {"type"} - ({"format"} if _format_part(names.get("format", "")) is None else set())
        if not keywords:
            return "" if "string" in types_of(names["type"]) else None
        if keywords == {"pattern"}:
            return str(names["pattern"])
        if keywords in ({"const"}, {"enum"}):
            words = names["enum"] if "enum" in names else [names["const"]]
            return "^(?:" + "|".join(word_pattern(word) for word in words if isinstance(word, str)) + ")$"
        if keywords <= {"minLength", "maxLength"}:
            return rf"^[\s\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
        if keywords == {"anyOf"}:
            patterns = [self._name_pattern(inner) for inner in names["anyOf"]]
            return None if not patterns or not all(patterns) else "|".join(f"(?:{pattern})" for pattern in patterns)
        if keywords == {"not"}:
            ways = [way for way in self._negation.ways_out(names["not"]) if isinstance(way, dict)]
            return next((str(way["pattern"]) for way in ways if "pattern" in way), None)
        return None

    def _containing(self, item: Schema, schema: dict[str, Any]) -> Schema:
        """The replacement of `contains`: the first items that may satisfy it must do so."""
        prefix: list[Schema] = schema.get("prefixItems", [])
        start = next(
            (index for index, other in enumerate(prefix) if not self._analysis.are_disjoint([other], [item])),
            len(prefix),
        )
        count = schema.get("minContains", 1)
        if count > MAX_WAYS:
            raise SchemaError(f"minContains is {count}; at most {MAX_WAYS} can be enforced")
        return {"prefixItems": [True] * start + [item] * count, "minItems": start + count}


def _any_of(ways: Sequence[Sequence[Schema]]) -> Schema:
    if not ways:
        return False
    options: list[Schema] = []
    for way in ways:
        parts = [schema for schema in way if schema is not True]
        options.append(parts[0] if len(parts) == 1 else {"allOf": parts} if parts else True)
    return options[0] if len(options) == 1 else {"anyOf": options}


def _is_conditional(schema: Schema) -> bool:
    """Whether the schema is an `if` and nothing else. Several of them are handled together."""
    return isinstance(schema, dict) and "if" in schema and not set(schema) - {"if", "then", "else"}


def _dependent(schema: dict[str, Any]) -> list[Choice]:
    """The alternatives for each property that others depend on. The last one is always correct."""
    needs: list[tuple[str, Schema]] = [
        (name, {"required": names}) for name, names in schema.get("dependentRequired", {}).items()
    ]
    found: list[Choice] = []
    for name, needed in [*needs, *schema.get("dependentSchemas", {}).items()]:
        is_there = name in schema.get("required", ())
        found.append([[needed]] if is_there else [[{"properties": {name: False}}], [needed]])
    return found


def _format_part(name: str) -> dict[str, Any] | None:
    """The replacement of a format; None if it is an annotation."""
    name = formats.ALIASES.get(name, name)
    if name in formats.AS_THEY_ARE:
        return {"format": name}
    return {"pattern": f"^(?:{formats.PATTERNS[name]})$"} if name in formats.PATTERNS else None
