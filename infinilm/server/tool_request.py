"""A request's tool fields: their checks, and the prompt and the grammar that follow from them."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infinilm.checks import check_choice
from infinilm.errors import InvalidValueError
from infinilm.server.call_syntax import (
    GemmaCall,
    JsonCall,
    NamedCall,
    PythonCall,
    TaggedCall,
    kinds_of,
    parameter_schema,
)
from infinilm.server.tool_formats import HERMES, ToolFormat

_CHOICES = ("none", "auto", "required")
_NO_PARAMETERS = {"type": "object", "properties": {}}
# JSON as `json.dumps` and the templates' `tojson` write it. If white space were free, a model could write only that.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


_TEXT = r"TEXT: /(.|\n)*/"


@dataclass(frozen=True)
class FunctionTool:
    name: str
    parameters: dict[str, Any]
    """The JSON schema of its arguments, an object's."""
    definition: dict[str, Any]
    """The tool as chat templates expect it."""
    is_strict: bool
    """Whether arguments must follow the schema even if the model may choose not to call."""


@dataclass(frozen=True)
class ToolRequest:
    """A request's checked `tools`, `tool_choice` and `parallel_tool_calls`."""

    tools: tuple[FunctionTool, ...]
    """The tools in the prompt: none if the model must not call any."""
    is_required: bool
    """Whether the model must call one."""
    forced_name: str | None
    """The function that it must call, if the request names one."""
    is_parallel: bool
    """Whether one answer may hold several calls."""

    @property
    def callable_tools(self) -> list[FunctionTool]:
        return [tool for tool in self.tools if self.forced_name in (None, tool.name)]

    @property
    def names(self) -> list[str]:
        return [tool.name for tool in self.callable_tools]


def check_tool_request(
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel_tool_calls: bool | None = None,
) -> ToolRequest:
    """Check that three fields of a request, each of its documented type or None, are consistent."""
    if tools is not None and not tools:
        raise InvalidValueError("tools is empty; give at least one tool, or leave it out")
    checked = tuple(_check_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools or ()))
    names = [tool.name for tool in checked]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise InvalidValueError(f"tools has two functions with the name {repeated!r}; names must be unique")
    if not checked and tool_choice not in (None, "none", "auto"):
        raise InvalidValueError("tool_choice needs tools; give tools, or leave it out")
    if isinstance(tool_choice, Mapping):
        forced_name = tool_choice["function"]["name"]
        if forced_name not in names:
            raise InvalidValueError(f"tool_choice names the function {forced_name!r}, which is not among the tools")
        return ToolRequest(checked, is_required=True, forced_name=forced_name, is_parallel=False)
    if tool_choice is not None:
        check_choice("tool_choice", tool_choice, _CHOICES)
    return ToolRequest(
        () if tool_choice == "none" else checked,
        is_required=tool_choice == "required",
        forced_name=None,
        is_parallel=parallel_tool_calls is not False,
    )


def _check_tool(tool: Mapping[str, Any], path: str) -> FunctionTool:
    function = tool["function"]
    parameters = function.get("parameters")
    parameters = dict(_NO_PARAMETERS if parameters is None else parameters)
    if parameters.get("type", "object") != "object":
        raise InvalidValueError(
            f"{path}['function']['parameters']['type'] is {parameters['type']!r}; arguments are an object"
        )
    shown = {"name": function["name"], "description": function.get("description"), "parameters": parameters}
    return FunctionTool(
        name=function["name"],
        parameters={"type": "object", **parameters},
        definition={"type": "function", "function": {key: value for key, value in shown.items() if value is not None}},
        is_strict=bool(function.get("strict")),
    )


def to_json(value: object, field: str, ensure_ascii: bool = False) -> str:
    """Write a part of the request's `field` as JSON."""
    try:
        return json.dumps(value, ensure_ascii=ensure_ascii)
    except RecursionError:
        raise InvalidValueError(f"{field} is nested too deeply") from None


# --- the prompt -----------------------------------------------------------------------------------------------


def prepare_messages(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    template_supports_tools: bool = True,
    *,
    parallel_tool_calls: bool | None = None,
    tool_format: ToolFormat = HERMES,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the messages and the keyword arguments for `Tokenizer.apply_chat_template`.

    Arguments of earlier calls become objects, as templates expect, and results get their function's name. If
    `tool_choice` is "none", the prompt has no tools. Otherwise the prompt is the same for every choice, so that
    requests share a cached prefix; `call_grammar` and `AnswerParser` enforce the choice.

    For a template without tools, everything is written as text. A section of the system message describes the tools
    and how to call them in `tool_format`. Calls are part of the assistant's text. Results are the user's text within
    `<tool_response>` tags.
    """
    request = check_tool_request(tools, tool_choice, parallel_tool_calls)
    prepared = _parse_calls(messages)
    if template_supports_tools:
        return prepared, {"tools": [tool.definition for tool in request.tools]} if request.tools else {}
    written = _write_out(prepared, tool_format)
    if request.tools:
        may_repeat = parallel_tool_calls is not False and tool_format.is_parallel
        _add_to_system_message(written, _describe_tools(request.tools, tool_format, may_repeat))
    return written, {}


def _parse_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copy the messages, with the arguments of calls parsed and their results named."""
    parsed: list[dict[str, Any]] = []
    names_by_id: dict[str, str] = {}
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        copy = dict(message)
        calls = copy.pop("tool_calls", None)  # templates test for the key
        if calls:
            if copy["role"] != "assistant":
                raise InvalidValueError(f"{path} has tool_calls; only messages of the assistant can")
            copy["tool_calls"] = [
                _parse_call(call, f"{path}['tool_calls'][{position}]") for position, call in enumerate(calls)
            ]
            names_by_id |= {call["id"]: call["function"]["name"] for call in copy["tool_calls"]}
        if copy["role"] == "tool":
            call_id = copy.get("tool_call_id")
            if call_id not in names_by_id:
                raise InvalidValueError(f"{path}['tool_call_id'] is {call_id!r}, which is no earlier tool call's id")
            copy["name"] = copy.get("name") or names_by_id[call_id]
        parsed.append(copy)
    return parsed


def _parse_call(call: Mapping[str, Any], path: str) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"], parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(f"{path}['function']['arguments'] is not valid JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise InvalidValueError(f"{path}['function']['arguments'] must hold an object, not {type(arguments).__name__}")
    return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _write_out(messages: Sequence[dict[str, Any]], tool_format: ToolFormat) -> list[dict[str, Any]]:
    """Turn calls and results into text. Successive results become one message, because turns may have to alternate."""
    written: list[dict[str, Any]] = []
    is_behind_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            result = [_part("<tool_response>"), *_parts(message), _part("</tool_response>")]
            if is_behind_result:
                written[-1]["content"] += result
            else:
                written.append({"role": "user", "content": result})
        elif "tool_calls" in message:
            functions = [call["function"] for call in message["tool_calls"]]
            calls = [tool_format.write_call(each["name"], to_json(each["arguments"], "messages")) for each in functions]
            written.append({"role": "assistant", "content": [*_parts(message), _part(tool_format.write_answer(calls))]})
        else:
            written.append(message)
        is_behind_result = is_result
    return written


def _add_to_system_message(messages: list[dict[str, Any]], section: str) -> None:
    if messages and messages[0]["role"] == "system":
        messages[0] = {**messages[0], "content": [*_parts(messages[0]), _part("\n" + section)]}
    else:
        messages.insert(0, {"role": "system", "content": section})


def _describe_tools(tools: Sequence[FunctionTool], tool_format: ToolFormat, may_repeat: bool) -> str:
    has_json = isinstance(tool_format.syntax, JsonCall | NamedCall)
    example = tool_format.write_call(
        "<function name>", "<object with the arguments>" if has_json else '{"<argument>": "<value>"}'
    )
    return "\n".join(
        [
            "# Tools",
            "",
            "You can call these functions:",
            "<tools>",
            *(to_json(tool.definition, "tools") for tool in tools),
            "</tools>",
            "",
            "To call a function, write its name and an object with its arguments in exactly this form:",
            tool_format.write_answer([example]),
            "You can make several calls in one answer." if may_repeat else "Make at most one call in an answer.",
            "Results will be given to you within <tool_response></tool_response> tags.",
        ]
    )


def _parts(message: Mapping[str, Any]) -> list[Any]:
    """Return a message's content as a list of parts, which reach templates joined by newlines."""
    content = message.get("content") or []
    return [_part(content)] if isinstance(content, str) else list(content)


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


# --- the grammar ----------------------------------------------------------------------------------------------


def call_grammar(
    tool_format: ToolFormat,
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel_tool_calls: bool | None = None,
    *,
    special_tokens: Mapping[str, int] | None = None,
    answer_schema: Mapping[str, Any] | None = None,
    answer_header: str = "",
) -> str | None:
    """Return the Lark grammar (in llguidance's dialect) that an answer must follow; None if there is none.

    With "required" or a named function, the answer consists of calls only. With "auto", it is calls, or JSON that
    follows `answer_schema`. Without that schema there is no grammar, unless a function is `strict`; then the answer is
    any text in which every call is valid. `special_tokens` are the ids of the format's markers that are special tokens:
    a grammar must name those by id. `answer_header` comes before an answer that is not a call.
    """
    request = check_tool_request(tools, tool_choice, parallel_tool_calls)
    is_free = not request.is_required and answer_schema is None and not any(tool.is_strict for tool in request.tools)
    if not request.tools or is_free:
        return None
    if not tool_format.is_parsed or isinstance(tool_format.syntax, PythonCall | GemmaCall):
        reason = "can't be enforced" if tool_format.is_parsed else "leaves calls in the text"
        raise InvalidValueError(
            f"tool_call_parser={tool_format.name!r} {reason}, so they cannot be required, strict or an "
            f"alternative to response_format; start the server with another one, or ask for none of these"
        )
    ids = special_tokens or {}
    header = _literal(answer_header, ids)
    is_parallel = request.is_parallel and tool_format.is_parallel
    before, calls, after = _calls(tool_format.layout, is_parallel, ids)
    if request.is_required:
        rules = [f"start: {before} {calls} {after}"]
    elif answer_schema is not None:
        schema = to_json({**answer_schema, "x-guidance": _SPACING}, "response_format", ensure_ascii=True)
        rules = [f"start: {before} {calls} {after} | answer", f"answer: {header} %json {schema}"]
    elif header:
        rules = [f"start: {before} {calls} {after} | {header} TEXT", _TEXT]
    else:
        opening = tool_format.opening
        behind_opening = _literal(tool_format.layout[0].removeprefix(opening), ids)
        rules = [
            f"start: (opening {behind_opening} {calls} {after}){'*' if is_parallel else '?'} TEXT",
            # A marker counts even if the model spells it out. "lazy" stops at its first occurrence.
            f"opening: spelled_out{f' | TEXT <[{ids[opening]}]>' if opening in ids else ''}",
            f'spelled_out[lazy]: TEXT "{opening}"',
            _TEXT,
        ]
        if tool_format.may_be_bare:
            rules[0] += f" | {calls}"
            rules[-1] = r"TEXT: /[ \t\n\r]*([^{ \t\n\r](.|\n)*)?/"
    syntax = tool_format.syntax
    if isinstance(syntax, TaggedCall):
        bodies = [_tagged_call(tool, syntax, ids) for tool in request.callable_tools]
        rules.append(f"tagged_text[lazy]: /(.|\\n)*/ {_quote(syntax.pad + syntax.after_value)}")
    else:
        bodies = [_call(tool, tool_format, ids) for tool in request.callable_tools]
    rules.append("call: " + " | ".join(bodies))
    return "\n".join(rules) + "\n"


def _calls(layout: tuple[str, str, str], is_parallel: bool, ids: Mapping[str, int]) -> tuple[str, str, str]:
    """The terms for the text before calls, for the calls, and for the text after them."""
    before, between, after = (_literal(text, ids) for text in layout)
    if layout[1] and layout[2].startswith(layout[1]):  # the library does not look ahead
        calls = f"(call {between})+" if is_parallel else f"call {between}"
        return before, calls, _literal(layout[2].removeprefix(layout[1]), ids)
    return before, f"call ({between} call)*" if is_parallel else "call", after


def _call(tool: FunctionTool, tool_format: ToolFormat, ids: Mapping[str, int]) -> str:
    head, tail = (_literal(text, ids) for text in tool_format.write_call(tool.name, "\0").split("\0"))
    return f"{head} {_json(tool.parameters, is_lenient=not tool.is_strict)} {tail}"


def _json(schema: Mapping[str, Any], *, is_lenient: bool) -> str:
    # The schema is complete by itself, so that its references resolve. If llguidance can't enforce part of it, that is
    # an error only for a strict function.
    guidance = {**_SPACING, "lenient": is_lenient}
    return f"%json {to_json({**schema, 'x-guidance': guidance}, 'tools', ensure_ascii=True)}"


def _tagged_call(tool: FunctionTool, syntax: TaggedCall, ids: Mapping[str, int]) -> str:
    """A call whose arguments come in the schema's order. Texts end with their closing tag, other values are JSON."""
    parts = [_literal(f"{syntax.head}{tool.name}{syntax.after_name}\n", ids)]
    required = tool.parameters.get("required", [])
    for key in tool.parameters.get("properties", {}):
        schema = parameter_schema(tool.parameters, key)
        is_text = "string" in kinds_of(schema)
        attribute = f'" string="{"true" if is_text else "false"}' if "DSML" in syntax.parameter else ""
        head = _literal(f"{syntax.parameter}{key}{attribute}{syntax.after_key}{syntax.pad}", ids)
        tail = _literal(f"{syntax.pad}{syntax.after_value}", ids)
        if is_text and isinstance(choices := schema.get("enum"), list):
            value = f"({' | '.join(_literal(str(choice), ids) for choice in choices)}) {tail}"
        elif is_text:
            value = _text_before(syntax.after_value, ids) if "<[" in tail else "tagged_text"
        else:
            value = f"{_json(schema, is_lenient=not tool.is_strict)} {tail}"
        parts.append(f'({head} {value} "\\n"){"" if key in required else "?"}')
    return " ".join([*parts, _literal(syntax.tail, ids)])


def _text_before(end: str, ids: Mapping[str, int]) -> str:
    """Any text, and `end`, which holds a special token and so can't be mistaken for text."""
    start = min(end.index(marker) for marker in ids if marker in end)
    pattern = "".join(f"\\x{{{ord(char):X}}}" for char in end[:start])
    return f"/(.|\\n)*{pattern}/ {_literal(end[start:], ids)}"


def _literal(text: str, special_tokens: Mapping[str, int]) -> str:
    """Return the grammar's terms for a text, special tokens by their ids."""
    if not special_tokens:
        return _quote(text)
    parts = re.split(f"({'|'.join(map(re.escape, special_tokens))})", text)
    return " ".join(f"<[{special_tokens[part]}]>" if part in special_tokens else _quote(part) for part in parts)


def _quote(text: str) -> str:
    return json.dumps(text) if text else ""
