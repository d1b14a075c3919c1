"""What is wrong with a schema."""

import json

_MAX_EXCERPT_CHARS = 120


class SchemaError(ValueError):
    """A schema can't be supported; the message says why."""


def excerpt(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_EXCERPT_CHARS else text[:_MAX_EXCERPT_CHARS] + "…"
