"""Converts any JSON schema to one that llguidance supports, whose values all satisfy the original.

`canonical` converts all drafts to one form without changing the meaning. `narrowing` replaces the keywords that
llguidance lacks (`oneOf` with overlaps, `not`, `if`, `dependencies`, …) by ones that it has. If it can't replace a
keyword exactly, it uses something stricter; if it can't replace it at all, it refuses the schema. `facts` and
`negation` analyse schemas: whether two have no value in common, and which values a schema excludes.

All of it runs in the sandbox process: see `trial_process`.
"""

from infinilm.structured.schema.canonical import Reader, SchemaError
from infinilm.structured.schema.narrowing import Narrowing

__all__ = ["SchemaError", "supported_schema"]


def supported_schema(schema: object) -> dict[str, object]:
    """A schema for llguidance whose values all satisfy `schema`. Raises `SchemaError` if there is none."""
    return Narrowing(Reader(schema).read()).run()
