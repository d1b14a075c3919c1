"""Grammars that leave a model no way but to write valid calls."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from infinilm.errors import InvalidValueError
from infinilm.server.tools.choice import FunctionTool, check_tool_request, to_json
from infinilm.server.tools.formats import ToolFormat

# JSON as `json.dumps` and the templates' `tojson` write it: with free white space a model may write nothing else.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def call_grammar(
    tool_format: ToolFormat,
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel_tool_calls: bool | None = None,
    *,
    special_tokens: Mapping[str, int] | None = None,
) -> str | None:
    """Return the Lark grammar (in llguidance's dialect) that an answer must follow; None if it is free.

    "required" and a named function: the answer is calls and nothing else. "auto": it is free, unless a function is
    `strict`; then it is any text in which every call is valid. `special_tokens` are the ids of those of the format's
    markers that are tokens of their own, because to a grammar such a token is no text.
    """
    request = check_tool_request(tools, tool_choice, parallel_tool_calls)
    if not request.is_required and not any(tool.is_strict for tool in request.tools):
        return None
    if not tool_format.is_parsed:
        raise InvalidValueError(
            f"tool_call_parser={tool_format.name!r} leaves calls in the text, so they cannot be required or strict; "
            f"start the server with another one, or ask for neither"
        )
    ids = special_tokens or {}
    before, between, after = (_literal(text, ids) for text in tool_format.layout)
    is_parallel = request.is_parallel and tool_format.is_parallel
    calls = f"call ({between} call)*" if is_parallel else "call"
    if request.is_required:
        rules = [f"start: {before} {calls} {after}"]
    else:
        opening = tool_format.opening
        behind_opening = _literal(tool_format.layout[0].removeprefix(opening), ids)
        rules = [
            f"start: (opening {behind_opening} {calls} {after}){'*' if is_parallel else '?'} TEXT",
            # A marker counts even if the model spells it out; lazy: from the first place where it stands.
            f"opening: spelled_out{f' | TEXT <[{ids[opening]}]>' if opening in ids else ''}",
            f'spelled_out[lazy]: TEXT "{opening}"',
            r"TEXT: /(.|\n)*/",
        ]
        if tool_format.may_be_bare:
            rules[0] += f" | {calls}"
            rules[-1] = r"TEXT: /[ \t\n\r]*([^{ \t\n\r](.|\n)*)?/"
    rules.append("call: " + " | ".join(_call(tool, tool_format) for tool in request.callable_tools))
    return "\n".join(rules) + "\n"


def _call(tool: FunctionTool, tool_format: ToolFormat) -> str:
    # The schema stands by itself, so that references within it find their targets. What llguidance cannot enforce of it
    # is an error only for a strict function.
    head, tail = tool_format.write_call(tool.name, "\0").split("\0")
    schema = {**tool.parameters, "x-guidance": {**_SPACING, "lenient": not tool.is_strict}}
    return f"{_quote(head)} %json {to_json(schema, 'tools', ensure_ascii=True)} {_quote(tail)}"


def _literal(text: str, special_tokens: Mapping[str, int]) -> str:
    """Return the grammar's terms for a text, special tokens by their ids."""
    if not special_tokens:
        return _quote(text)
    parts = re.split(f"({'|'.join(map(re.escape, special_tokens))})", text)
    return " ".join(f"<[{special_tokens[part]}]>" if part in special_tokens else _quote(part) for part in parts)


def _quote(text: str) -> str:
    return json.dumps(text) if text else ""
