"""What a request says about tools: which there are, and whether the model may, must or must not call them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infinilm.checks import check_choice
from infinilm.errors import InvalidValueError

_CHOICES = ("none", "auto", "required")
_NO_PARAMETERS = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class FunctionTool:
    """A function that the model can call."""

    name: str
    parameters: dict[str, Any]
    """The JSON schema of its arguments, an object's."""
    definition: dict[str, Any]
    """The tool as chat templates take it."""
    is_strict: bool
    """Whether arguments must follow the schema even where the model is free to call or not."""


@dataclass(frozen=True)
class ToolRequest:
    """A request's checked `tools`, `tool_choice` and `parallel_tool_calls`."""

    tools: tuple[FunctionTool, ...]
    """The tools that the model is told about: none if it must not call any."""
    is_required: bool
    """Whether it must call one."""
    forced_name: str | None
    """The one it must call, if the request names it."""
    is_parallel: bool
    """Whether one answer may hold several calls."""

    @property
    def callable_tools(self) -> list[FunctionTool]:
        """The tools that may be called."""
        return [tool for tool in self.tools if self.forced_name in (None, tool.name)]

    @property
    def names(self) -> list[str]:
        """The names of the functions that may be called."""
        return [tool.name for tool in self.callable_tools]


def check_tool_request(
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel_tool_calls: bool | None = None,
) -> ToolRequest:
    """Check what three fields of a request, each of its documented form or None, say together."""
    if tools is not None and not tools:
        raise InvalidValueError("tools is empty; give at least one tool, or leave it out")
    checked = tuple(_check_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools or ()))
    names = [tool.name for tool in checked]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise InvalidValueError(f"tools has two functions with the name {repeated!r}; names must be unique")
    for field, value in {"tool_choice": tool_choice, "parallel_tool_calls": parallel_tool_calls}.items():
        if not checked and value not in (None, "none"):
            raise InvalidValueError(f"{field} needs tools; give tools, or leave it out")
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
