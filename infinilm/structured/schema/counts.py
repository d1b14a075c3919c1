"""`minProperties` and `maxProperties` beside optional properties, which llguidance does not count."""

from itertools import combinations, islice
from math import inf
from typing import Any

from infinilm.structured.schema.canonical import Schema, property_names
from infinilm.structured.schema.errors import SchemaError, excerpt

MAX_WAYS = 64  # alternatives that the keywords of one schema may expand to


def counted(result: dict[str, Any], schema: dict[str, Any]) -> list[Schema] | None:
    """The alternatives for `minProperties` and `maxProperties`, or None where llguidance can count by itself."""
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
        return _at_least(num_least, optional, {} if is_closed else counts)
    return _between(num_least, num_most, optional, is_closed, counts)


def _at_least(num_least: int, optional: list[str], counts: dict[str, int]) -> list[Schema]:
    ways: list[Schema] = [{"required": list(names)} for names in islice(combinations(optional, num_least), MAX_WAYS)]
    if counts:
        ways.append({"properties": dict.fromkeys(optional, False), **counts})
    return ways


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
        f"{excerpt(counts)} can't be held to with {len(optional)} optional properties; make them required"
    )
