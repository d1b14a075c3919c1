"""Make a conversation with tools into one that the model's chat template can render."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from infinilm.errors import InvalidValueError
from infinilm.server.tools.choice import FunctionTool, check_tool_request, to_json
from infinilm.server.tools.formats import HERMES, ToolFormat


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

    Arguments of earlier calls become objects, as templates expect, and results are given their function's name.
    Tools are left out of the prompt if `tool_choice` is "none"; otherwise the prompt is the same for every choice, so
    that requests share their cached beginning, and `call_grammar` and `ToolCallParser` see to the rest.

    For a template that knows nothing of tools everything is written out: a section of the system message describes
    the tools and, in `tool_format`, how to call them; calls are part of the assistant's text; results are the user's
    text within `<tool_response>` tags.
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
        calls = copy.pop("tool_calls", None)  # templates ask whether there is such a key
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
    """Turn calls and results into text; results in a row into one message, as turns may have to alternate."""
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
    example = tool_format.write_call("<function name>", "<object with the arguments>")
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
