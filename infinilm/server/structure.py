"""From what a request says about the form of its answer to the constraint that the engine keeps."""

from typing import Any

from infinilm.errors import InfinilmError
from infinilm.server.api_errors import bad_request
from infinilm.server.protocol import ChatRequest, JsonObjectFormat, JsonSchemaFormat, SamplingFields
from infinilm.structured_output import StructuredOutput

_GUIDES = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Our own fields, and what `StructuredOutput` calls them."""


def find_structure(body: SamplingFields, tool_grammar: str | None = None) -> StructuredOutput | None:
    """The constraint on a request's answers, or None. More than one is refused."""
    asked: dict[str, tuple[str, Any]] = {
        name: (kind, getattr(body, name)) for name, kind in _GUIDES.items() if getattr(body, name) is not None
    }
    if isinstance(body, ChatRequest):
        if isinstance(body.response_format, JsonObjectFormat):
            asked["response_format"] = ("json_object", True)
        elif isinstance(body.response_format, JsonSchemaFormat):
            asked["response_format"] = ("json_schema", body.response_format.json_schema.schema_)
    if tool_grammar is not None:
        asked["tool_choice"] = ("grammar", tool_grammar)
    if not asked:
        return None
    names = list(asked)
    if len(names) > 1:
        raise bad_request(f"{' and '.join(names)} can't be combined; give one of them", names[0])
    if body.stop:
        raise bad_request(
            f"stop can't be combined with {names[0]}: it could cut off an answer before it is complete", "stop"
        )
    kind, value = asked[names[0]]
    return _make(names[0], kind, value)


def _make(param: str, kind: str, value: Any) -> StructuredOutput:
    try:
        return StructuredOutput(**{kind: value})
    except InfinilmError as error:
        raise bad_request(f"{param}: {error}", param) from error
