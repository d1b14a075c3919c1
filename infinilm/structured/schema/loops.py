"""Unrolls recursive references beside other keywords, which llguidance refuses."""

import json
from typing import Any

from infinilm.structured.schema.canonical import Document, Schema


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
