"""From any JSON schema to one that llguidance can hold to, with no answer that the first one would refuse.

`canonical` brings all drafts to one form without changing the meaning. `narrowing` replaces the keywords that
llguidance lacks (`oneOf` that may overlap, `not`, `if`, `dependencies`, …) by ones that it has. What it can't replace
exactly it replaces by something stricter; what it can't replace at all it refuses. `facts` and `negation` say what it
needs to know of a schema: whether two have no value in common, and which values are outside.

All of it runs in the process that tries out grammars: see `trial_process`.
"""

from infinilm.structured.schema.canonical import canonical_document
from infinilm.structured.schema.errors import SchemaError
from infinilm.structured.schema.narrowing import narrowed

__all__ = ["SchemaError", "supported_schema"]


def supported_schema(schema: object) -> dict[str, object]:
    """A schema for llguidance: all that it allows, `schema` allows. Raises `SchemaError` if there is none."""
    return narrowed(canonical_document(schema))
