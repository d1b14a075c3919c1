"""What is wrong with a schema."""

import json

_MAX_EXCERPT_CHARS = 120


class SchemaError(ValueError):
    """A schema can't be held to; says why."""


def excerpt(value: object) -> str:
    """The beginning of a value as JSON, for a message."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_EXCERPT_CHARS else text[:_MAX_EXCERPT_CHARS] + "…"
